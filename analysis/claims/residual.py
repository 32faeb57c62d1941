"""Section 3 of the lecture: residual connections and pre-normalisation."""

from __future__ import annotations

from statistics import mean

import torch
from torch import Tensor

from analysis.ablation import ablate
from analysis.claims.claim import Finding, above, applies, claim, measurement, within
from analysis.claims.conventions import off_block
from analysis.claims.subject import Subject, difference, largest
from analysis.geometry import euler_steps, update_sizes
from analysis.geometry.bandwidth import coherence, sampled_embeddings, welch_bound
from circuits.block import TransformerBlock
from circuits.layers import Norm
from circuits.names import block_names
from circuits.residual import direct_logit_attribution
from circuits.run import Run

_POST = "norms stand after the additions (post-norm): there is no identity path"


def attention_of(block: TransformerBlock, read: Tensor, run: Run) -> Tensor:
    """``MHA`` of an input that is normalised already, and the norm on what it adds where there is one."""
    out: Tensor = block.attn((read, read, read), block.names, run)
    return out if block.ln1_post is None else block.ln1_post(out)


def mlp_of(block: TransformerBlock, read: Tensor) -> Tensor:
    """``MLP`` of an input that is normalised already, likewise."""
    assert block.mlp is not None
    out: Tensor = block.mlp(read, block.names)
    return out if block.ln2_post is None else block.ln2_post(out)


def norm_of(norm: Norm | None, x: Tensor) -> Tensor:
    """``LN(x)``; `x` itself where there is no norm."""
    return x if norm is None else norm(x)


def update(block: TransformerBlock, X: Tensor, run: Run) -> Tensor:
    """``F(X)``: what a pre-norm block adds to its input, attention and MLP together."""
    read = norm_of(block.ln1, X)
    attn_out = attention_of(block, read, run)
    if block.mlp is None:
        return attn_out
    if block.parallel:
        return attn_out + mlp_of(block, read if block.ln2 is None else norm_of(block.ln2, X))
    return attn_out + mlp_of(block, norm_of(block.ln2, X + attn_out))


@claim(
    "3.1",
    "Definition 3.1",
    "A pre-norm block is Y = X + MHA(LN₁(X)), X' = Y + MLP(LN₂(Y)).",
    "largest relative difference of a block's output from the definition",
)
def pre_norm_block(on: Subject) -> Finding:
    """``Y = X + MHA(LN₁(X))`` and ``X' = Y + MLP(LN₂(Y))``, the additions being the residual connections.

    The maps are the block's own (definitions 1.1, 2.1 and 4.1 have rows of their own); what is checked is how they are
    put together. An RMSNorm stands for LN where the architecture has one.
    """
    off = off_block(on.model.config)
    applies(not off, off)
    worst, run = 0.0, on.start()
    for layer in on.layers:
        block, X = on.model.blocks[layer], on.stream(layer)
        Y = X + attention_of(block, norm_of(block.ln1, X), run)
        worst = largest(worst, difference(block(X, run), Y + mlp_of(block, norm_of(block.ln2, Y))))
    return within(worst, on.tolerance, "" if on.model.config.norm == "layernorm" else "with RMSNorm")


@claim(
    "3.2.step",
    "Remark 3.2",
    "A block is one forward Euler step, X + h F(X) with h = 1.",
    "largest relative difference of a block's output from X + F(X)",
)
def euler_step(on: Subject) -> Finding:
    """``X⁽ˡ⁺¹⁾ = X⁽ˡ⁾ + F_l(X⁽ˡ⁾)`` with F everything that the branches add, is the forward Euler step of ``Ẋ = F(X)``
    of size 1: depth plays the role of time.
    """
    applies(on.model.config.norm_placement == "pre", _POST)
    worst, run = 0.0, on.start()
    for layer in on.layers:
        block, X = on.model.blocks[layer], on.stream(layer)
        worst = largest(worst, difference(block(X, run), X + update(block, X, run)))
    return within(worst, on.tolerance)


@claim(
    "3.2.flow",
    "Remark 3.2",
    "The step only resembles the flow of an ordinary differential equation.",
    "median distance of one step from the flow at time 1, over the length of the way",
)
def flow(on: Subject) -> Finding:
    """The flow of ``Ẋ = F(X)`` from X⁽ˡ⁾ at time 1 is approached by n steps of size 1/n, ``X ← X + F(X)/n``; the error
    of Euler's method falls as 1/n. How far the block itself (n = 1) is from the flow says how literally to take the
    analogy.
    """
    tokens = on.tokens[:1, :8] if on.large else on.tokens[:1]
    measured = euler_steps(on.model, tokens, steps=(1, 2, 4) if on.large else (1, 4, 8))
    order = float(measured.order.median())
    return measurement(
        float(measured.error[:, 0].median()),
        f"with smaller steps h the error falls as h^{order:.2f} (median over layers)",
    )


@claim(
    "3.4.sum",
    "Remark 3.4",
    "Every sublayer adds an increment to one running state.",
    "largest relative difference of the last stream from the first plus all increments",
)
def running_state(on: Subject) -> Finding:
    """``X⁽ᴸ⁾ = X⁽⁰⁾ + Σ_l (attn_out_l + mlp_out_l)``: summing definition 3.1 over the blocks."""
    config = on.model.config
    applies(config.norm_placement == "pre", _POST)
    total = on.stream(0)
    for layer in range(config.n_layers):
        names = block_names(layer)
        total = total + on.cache[names.attn_out]
        if config.has_mlp:
            total = total + on.cache[names.mlp_out]
    return within(difference(on.stream(config.n_layers), total), on.tolerance)


@claim(
    "3.4.bandwidth",
    "Remark 3.4",
    "The width d is the linear bandwidth: more features than d cannot be orthogonal.",
    "largest |cos| of two token embeddings, at least Welch's bound",
)
def bandwidth(on: Subject) -> Finding:
    """Of n unit vectors in d dimensions with n > d two have ``|cos| ≥ sqrt((n − d) / (d (n − 1)))`` (Welch 1974): the
    Gram matrix has rank at most d and trace n, so ``Σ cos² ≥ n²/d``, of which the diagonal gives n. More features than
    coordinates can be held only in nonorthogonal directions.
    """
    W_E = sampled_embeddings(on.model, seed=on.seed)
    n, d = W_E.shape
    applies(n > d, f"{n} embeddings fit into {d} dimensions at right angles")
    largest, typical = coherence(W_E)
    bound = welch_bound(n, d)
    return above(largest, bound * (1 - on.tolerance), f"root mean square {typical:.3f} over {n} embeddings")


@claim(
    "3.4.paths",
    "Remark 3.4",
    "The additive structure splits a logit into what every component adds to it.",
    "largest error of the sum of the parts, relative to the logit difference",
)
def paths(on: Subject) -> Finding:
    """With the final norm frozen at the scale of the run, a logit difference is linear in the stream, and the stream a
    sum of writes: ``Z[t, a] − Z[t, b] = Σ_c write_c · w / scale + constants`` with ``w = γ ⊙ (W_U[:, a] − W_U[:, b])``
    (centred for LayerNorm). The parts are listed by component and must add up to the logit difference itself.
    """
    config = on.model.config
    applies(config.norm_placement == "pre", _POST)
    applies(config.d_vocab > 1, "a vocabulary of one token: there is no other logit")
    likeliest = on.logits[:, -1].topk(2).indices
    split = direct_logit_attribution(
        on.model, on.cache, likeliest[:, 0], likeliest[:, 1], unit="layer" if on.large else "head"
    )
    size = max(float(split.values.abs().max()), float(split.total.abs().max()))
    return within(split.error / size if size else 0.0, on.tolerance, f"{len(split.components)} parts")


@claim(
    "3.5a.updates",
    "Empirical aside 3.5",
    "In many trained models the updates of single branches are small relative to the stream.",
    "mean over layers of ‖update of a branch‖ / ‖stream‖",
)
def small_updates(on: Subject) -> Finding:
    """``‖attn_out‖ / ‖X‖`` and ``‖mlp_out‖ / ‖Y‖``, means over tokens: observed, not implied by the formula."""
    sizes = update_sizes(on.model, on.tokens)
    both = {"attention": sizes.attn} | ({} if sizes.mlp is None else {"MLP": sizes.mlp})
    note = ", ".join(f"{name} {float(x.min()):.2f} to {float(x.max()):.2f} by layer" for name, x in both.items())
    return measurement(float(torch.cat(list(both.values())).mean()), note)


@claim(
    "3.5a.dropping",
    "Empirical aside 3.5",
    "Dropping one block may have a modest effect.",
    "mean over blocks of the change of the loss, nats, when a block is replaced by the identity",
)
def dropping_blocks(on: Subject) -> Finding:
    """Loss of the model with block l left out (``X⁽ˡ⁺¹⁾ = X⁽ˡ⁾``) minus that of the whole model, on these tokens."""
    applies(on.length > 1, "a single token: nothing is predicted")
    found = ablate(on.model, on.tokens[:1], components="blocks", progress=False)
    effects = found.mean.tolist()
    listed = ", ".join(f"{effect:+.2f}" for effect in effects[:8]) + (", …" if len(effects) > 8 else "")
    return measurement(mean(effects), f"clean loss {float(found.clean[0]):.2f}; by block {listed}")


@claim(
    "3.5b",
    "Aside 3.5 (pre-norm versus post-norm)",
    "Pre-norm is X ← X + F(LN(X)), post-norm X ← LN(X + F(X)); the model does what its configuration says.",
    "largest relative difference of a branch's step from the rule",
)
def norm_placement(on: Subject) -> Finding:
    """Pre-norm: ``X ← X + F(LN(X))``, the identity path unnormalised. Post-norm: ``X ← LN(X + F(X))``.

    For each branch in turn, F its own map. Parallel blocks take both steps from one X.
    """
    config = on.model.config
    applies(config.norm is not None, "there are no norms")
    worst, run = 0.0, on.start()
    for layer in on.layers:
        block, X = on.model.blocks[layer], on.stream(layer)
        if config.norm_placement == "pre":
            after = X + update(block, X, run)
        else:
            after = norm_of(block.ln1, X + attention_of(block, X, run))
            after = after if block.mlp is None else norm_of(block.ln2, after + mlp_of(block, after))
        worst = largest(worst, difference(block(X, run), after))
    lengths = [float(on.stream(layer).norm(dim=-1).mean()) for layer in (0, config.n_layers)]
    note = f"{config.norm_placement}-norm; the stream's mean length goes from {lengths[0]:.3g} to {lengths[1]:.3g}"
    return within(worst, on.tolerance, note)
