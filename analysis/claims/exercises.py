"""Exercises 1, 2, 4, 5, 7 and 8 of the lecture, as far as their answers can be checked on a model."""

from __future__ import annotations

import math
from functools import partial

import torch

from analysis.accounting import crossover_length, flops, parameter_count
from analysis.claims.claim import Finding, applies, claim, equal, measurement, within
from analysis.claims.subject import Subject, difference, largest, size_of
from analysis.geometry import private_copy, scale_invariance, sequence_jacobian
from analysis.geometry.weight_decay import scale_blindness
from circuits.config import GPTConfig
from circuits.model import HookedGPT


@claim(
    "ex1",
    "Exercise 1",
    "The count of theorem 5.2, re-derived for the model's own conventions, is numel() exactly.",
    "numel() of all parameters minus the closed form of this configuration",
)
def parameter_count_of_the_code(on: Subject) -> Finding:
    """The theorem's proof with every bias, norm, gate and sharing that the configuration states:
    ``d (H + 2 H_kv) d_head`` for queries, keys and values, ``H d_head d`` for the output, ``2 d d_mlp`` (gated
    ``3 d d_mlp``) for an MLP, 2d for a LayerNorm, d for an RMSNorm, Vd once or twice; see
    `analysis.accounting.parameter_table`.
    """
    return equal(size_of(on.given), parameter_count(on.model.config))


@claim(
    "ex2",
    "Exercise 2",
    "Changing future tokens changes no earlier logit.",
    "largest relative change of logits before the first changed token",
)
def future_tokens(on: Subject) -> Finding:
    """End to end: for every t, replacing ``x_{t+1}, …, x_T`` leaves ``Z_1, …, Z_t`` as they are. All later tokens are
    replaced by others, at three places of the sequence, in a plain pass.

    Proof: embeddings, norms, MLPs, additions and the unembedding act on each position; in attention the row t is a
    combination of values at s ≤ t with weights that depend on scores at s ≤ t only, for the others are −∞ before the
    softmax. A composition of such maps is such a map.
    """
    applies(on.length > 1, "a single token: there is no future")
    worst, moved = 0.0, 0.0
    for t in sorted({1, on.length // 2, on.length - 1}):
        changed = torch.cat([on.tokens[:, :t], on.other_tokens()[:, t:]], dim=1)
        logits = on.model(changed)
        worst = largest(worst, difference(logits[:, :t], on.logits[:, :t]))
        moved = largest(moved, difference(logits[:, t:], on.logits[:, t:]))
    return within(worst, on.tolerance, f"later logits move by up to {moved:.2g}")


@claim(
    "ex4.decay",
    "Exercise 4",
    "Of weights in front of norms the loss does not see the scale; its gradient is orthogonal and falls as 1/c.",
    "largest of |cos(∇L, w)| and |c ‖∇L(cw)‖ / ‖∇L(w)‖ − 1|",
)
def weight_decay(on: Subject) -> Finding:
    """Let w be everything that writes to a stream which every reader normalises, with ε = 0. Then ``L(c w) = L(w)`` for
    c > 0. Differentiating by c at 1, ``⟨∇L(w), w⟩ = 0``; by w, ``c ∇L(c w) = ∇L(w)``.

    So weight decay on such weights does not restrain the function. Gradient steps, being orthogonal, only lengthen w;
    decay shortens it; a step of size η turns w by about ``η ‖∇L(w)‖ / ‖w‖ ∝ η / ‖w‖²``, so decay sets the effective
    learning rate.
    """
    seen = scale_blindness(on.model.config)
    applies(seen is None, seen or "")
    applies(on.length > 1, "a single token: there is no loss")
    found = scale_invariance(on.model, on.tokens, factors=(0.5, 1.0, 3.0))
    worst = largest(float(found.radial.abs().max()), float((found.scaled_gradient - 1).abs().max()))
    with_eps = scale_invariance(on.model, on.tokens, factors=(1.0,), eps=on.model.config.norm_eps)
    note = f"{found.weights:,} weights, ε = 0; with the model's ε the cosine is {float(with_eps.radial[0]):.1g}"
    return within(worst, 10 * on.tolerance, note)


@claim(
    "ex5",
    "Exercise 5",
    "Tied, W_U = Eᵀ, the model has Vd parameters fewer.",
    "numel() of the model tied minus that untied plus Vd",
)
def tied_count(on: Subject) -> Finding:
    """``Vd + T_max d + L (12d² + 10d) + 2d`` with the lecture's conventions, 808,320 in the course configuration: the
    total less ``V d``. Models of both kinds are laid out without memory and counted.
    """
    config = on.model.config

    def numel(tied: bool) -> int:
        return size_of(HookedGPT(config.replace(tie_embeddings=tied), device="meta"))

    tied = numel(True)
    found = equal(tied, numel(False) - config.d_vocab * config.d_model)
    matches = parameter_count(config.replace(tie_embeddings=True)) == tied
    return found if matches else within(1.0, 0.0, "the closed form of the tied model differs from numel()")


@claim(
    "ex7",
    "Exercise 7",
    "A pre-norm block's Jacobian is I + DF; a post-norm block's has the norm's behind it, and loses directions.",
    "largest singular value, relative, that a post-norm block of the same weights should lose",
)
def both_jacobians(on: Subject) -> Finding:
    """Pre-norm: ``J = I + DF``. Post-norm: ``J = (I + DF) D LN``, with ``D LN = (√d/‖v‖)(P − v vᵀ/‖v‖²) diag(γ)`` at ε
    = 0: of rank d − 2 (d − 1 for RMSNorm), so J has two (one) singular values 0, and no identity is left.

    Measured on the first block with the model's weights under both placements, one token, its whole Jacobian. (With ε >
    0 the radial direction is not lost entirely.)
    """
    config = on.model.config
    applies(config.norm is not None, "there are no norms")
    applies(not config.parallel_blocks and not config.branch_norm, "this block has no post-norm counterpart")
    lost = 2 if config.norm == "layernorm" else 1
    applies(config.d_model > lost, f"d_model = {config.d_model} leaves nothing but what is lost")
    s = {}
    for placement in ("pre", "post"):
        model = _placed(on.model, config.replace(norm_placement=placement, final_norm=config.final_norm))
        block, run = model.blocks[0], model.start(on.tokens[:1, :1])
        J = sequence_jacobian(partial(block, run=run), on.stream(0)[0, :1])
        eye = torch.eye(len(J), dtype=J.dtype, device=J.device)
        s[placement] = torch.linalg.svdvals(J), float((J - eye).norm()) / math.sqrt(len(J))
    worst = float(s["post"][0][-lost] / s["post"][0][0])
    shown = [
        f"{name}: singular values {float(v[0]):.2g} to {float(v[-1]):.2g}, ‖J − I‖/√d {off:.2g}"
        for name, (v, off) in s.items()
    ]
    return within(worst, 10 * on.tolerance, "; ".join(shown))


def _placed(model: HookedGPT, config: GPTConfig) -> HookedGPT:
    """The same weights with norms at another place and ε = 0."""
    placed = private_copy(HookedGPT.from_state_dict(config, model.state_dict()))
    for block in placed.blocks:
        for norm in (block.ln1, block.ln2):
            if norm is not None:
                norm.eps = 0.0
    return placed


@claim(
    "ex8.rule",
    "Exercise 8",
    "6 · (weights) · (tokens) is the exact cost of training without attention's T² work.",
    "operations of a training step minus T² work minus 6·N·D, N the entries of all weight matrices",
)
def derivation(on: Subject) -> Finding:
    """A product ``y = x W`` with n weights costs 2n operations for each token forward; backward ``∂x = ∂y Wᵀ`` and
    ``∂W = xᵀ ∂y`` cost 2n each. So the linear part of training is exactly ``6 N D`` with N the weights that multiply
    activations: all matrices but the embeddings, which are looked up, and with the unembedding. Biases and norms, which
    other readings of N count, cost no products.
    """
    model, config = on.given, on.model.config
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2) + model.W_U.numel()
    counted = flops(config, training=True)
    linear = counted.total - int(counted.flops[1])
    return equal(linear, 6 * matrices * counted.tokens)


@claim(
    "ex8.limits",
    "Exercise 8",
    "The T² term invalidates the rule when T is large relative to d.",
    "share of attention's T² work in a training step at n_ctx",
)
def limits(on: Subject) -> Finding:
    """The rule misses ``12 L T² H d_head`` operations of a sequence of T tokens: half of all at ``T = T*`` (about 6 d),
    and nearly all far above. Small models have a second error, the unembedding: 2 d V against 24 L d² per token.
    """
    config = on.model.config
    counted = flops(config, training=True)
    unembedding = float(counted.share[3])
    note = f"the rule misses half at T* = {crossover_length(config):,.0f}; the unembedding is {unembedding:.1%}"
    return measurement(float(counted.share[1]), note)
