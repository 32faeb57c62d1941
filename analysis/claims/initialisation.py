"""Project aside 5.2 of the lecture: how the weights are drawn before training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.claims.claim import Finding, applies, claim, measurement, within
from analysis.claims.subject import Subject
from circuits.arguments import seeded
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.tokens import next_token_losses

_LARGE = "the model is trained, and too large to draw a fresh one beside it"
_STANDARD_ERRORS = 6
_SAMPLE = 64


def _fresh(on: Subject) -> tuple[HookedGPT, str]:
    found = on.fresh
    applies(found is not None, _LARGE)
    assert found is not None
    return found


def _fresh_tokens(on: Subject) -> Tensor:
    """Random tokens, enough of them that the mean loss is that of the distribution."""
    config = on.model.config
    generator = seeded(on.seed)
    shape = (2 if on.large else _SAMPLE, min(config.n_ctx, 16 if on.large else 64))
    return torch.randint(config.d_vocab, shape, generator=generator).to(on.model.device)


@claim(
    "5.2b.scale",
    "Project aside 5.2 (initialization)",
    "Each branch's output projection is scaled by 1/√(2L) at initialisation.",
    "relative distance of std(output maps) / std(input maps) from 1/√(number of writes)",
)
def output_scale(on: Subject) -> Finding:
    """There are 2L residual writes (L without MLPs). With independent contributions of comparable variance s², their
    sum has variance ``2L s²``; output projections scaled by ``1/√(2L)`` bring it back to s².

    Standard deviations over all layers; the tolerance is six standard errors of their ratio, ``sqrt(1/2n + 1/2m)`` for
    n and m weights.
    """
    model, which = _fresh(on)
    writes, reads = [], []
    for block in model.blocks:
        writes.append(block.attn.out.weight)
        reads.append(block.attn.qkv.weight)
        if block.mlp is not None:
            writes.append(block.mlp.down.weight)
            reads.append(block.mlp.up.weight)
    sizes = [torch.cat([w.flatten() for w in group]) for group in (writes, reads)]
    ratio = float(sizes[0].square().mean().sqrt() / sizes[1].square().mean().sqrt())
    expected = 1 / math.sqrt(model.config.n_writes)
    error = math.sqrt(sum(1 / (2 * len(group)) for group in sizes))
    note = f"ratio {ratio:.4f} for 1/√{model.config.n_writes} = {expected:.4f}, {which}"
    return within(abs(ratio / expected - 1), _STANDARD_ERRORS * error, note)


@claim(
    "5.2b.variance",
    "Project aside 5.2 (initialization)",
    "Scaled so, the accumulated writes keep a variance of order one: that of a single unscaled write.",
    "variance of the sum of all writes over the sum of their variances",
)
def accumulated_variance(on: Subject) -> Finding:
    """``Var(Σ_i w_i) = Σ_i Var(w_i)`` if the writes w_i are independent: the quotient is 1, and with every variance
    ``s²/2L`` the sum has s². What the approximation leaves out is correlation: a quotient above 1 says that writes
    agree.
    """
    model, which = _fresh(on)
    config = model.config
    applies(
        config.norm_placement == "pre", "norms stand after the additions (post-norm): writes are rescaled on the way"
    )
    _, cache = model.run_with_cache(_fresh_tokens(on))
    writes = [cache[block_names(layer).attn_out] for layer in range(config.n_layers)]
    if config.has_mlp:
        writes += [cache[block_names(layer).mlp_out] for layer in range(config.n_layers)]
    total = torch.stack([write.square().mean() for write in writes]).sum()
    applies(float(total) > 0, "nothing is written")
    return measurement(float(sum(writes, total.new_zeros(())).square().mean() / total), which)


@claim(
    "5.2b.loss",
    "Project aside 5.2 (initialization)",
    "The model begins with a loss near ln V, as for uniform predictions.",
    "relative distance of the first loss from ln V",
)
def first_loss(on: Subject) -> Finding:
    """Uniform predictions have loss ``−log(1/V) = ln V``, 4.174 for V = 65. Logits of variance s² add about s²/2: with
    weights of standard deviation 0.02 behind a norm, ``s² = 4e-4 d``. On uniformly random tokens; near means within 5%.
    """
    model, which = _fresh(on)
    config = model.config
    tokens = _fresh_tokens(on)
    applies(tokens.shape[1] > 1, "n_ctx is 1: nothing is predicted")
    applies(config.d_vocab > 1, "a vocabulary of one token: the loss is 0")
    loss, uniform = float(next_token_losses(model(tokens), tokens).mean()), math.log(config.d_vocab)
    return within(abs(loss / uniform - 1), 0.05, f"loss {loss:.3f}, ln {config.d_vocab:,} = {uniform:.3f}, {which}")
