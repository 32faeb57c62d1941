"""Section 2 of the lecture: the position-wise MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from analysis.claims import formulas
from analysis.claims.claim import Finding, above, applies, claim, equal, within
from analysis.claims.subject import Subject, difference, largest
from analysis.geometry import hull_membership, normalised
from circuits.hooks import Hook
from circuits.layers import MLPLayer, activation
from circuits.names import block_names

_NONE = "there are no MLPs"


def _mlp_of(on: Subject, layer: int) -> MLPLayer:
    mlp = on.model.blocks[layer].mlp
    assert mlp is not None
    return mlp


@claim(
    "2.gelu",
    "Section 2",
    "The activation is GELU, σ(t) = t Φ(t).",
    "largest difference of the activation from t Φ(t) for −8 ≤ t ≤ 8",
)
def gelu(on: Subject) -> Finding:
    """``σ(t) = t Φ(t)``, Φ the standard normal distribution function, ``Φ(t) = (1 + erf(t/√2))/2``.

    The tanh form of GPT-2, ``t (1 + tanh(√(2/π) (t + 0.044715 t³)))/2``, is an approximation, off by up to 5e-4.
    """
    config = on.model.config
    applies(config.has_mlp, _NONE)
    t = torch.linspace(-8, 8, 1601, dtype=on.model.dtype, device=on.model.device)
    off = float((formulas.activation(t, config.act) - formulas.gelu(t)).abs().max())
    applies(config.act == "gelu", f"the activation is {config.act}, up to {off:.2g} away from t Φ(t)")
    apart = (difference(activation(t, _mlp_of(on, layer).act), formulas.gelu(t)) for layer in on.layers)
    return within(largest(*apart), on.tolerance)


@claim(
    "2.1",
    "Definition 2.1",
    "The MLP is W₂ σ(W₁ u + b₁) + b₂.",
    "largest relative difference of an MLP's output from the formula",
)
def sublayer(on: Subject) -> Finding:
    """``MLP(u) = W₂ σ(W₁ u + b₁) + b₂`` for a column u; for rows, ``σ(u W_in + b_in) W_out + b_out``.

    With another activation σ is that one; biases are left out where the architecture has none.
    """
    config = on.model.config
    applies(config.has_mlp, _NONE)
    applies(not config.gated_mlp, "the MLPs are gated: their hidden layer is a product of two maps")
    worst = 0.0
    for layer in on.layers:
        u, mlp = _read_by_mlp(on, layer), _mlp_of(on, layer)
        worst = largest(worst, difference(mlp(u, block_names(layer)), formulas.mlp(u, mlp, config.act)))
    return within(worst, on.tolerance, "" if config.act == "gelu" else f"σ is {config.act}")


def _read_by_mlp(on: Subject, layer: int) -> Tensor:
    """A layer's normalised input; the attention's serves where the MLP shares it or its own is not at hand."""
    return on.model.blocks[layer].normalised(on.stream(layer))


@claim("2.1.width", "Definition 2.1", "The course model's hidden width is d_ff = 4d.", "d_mlp − 4 d_model")
def hidden_width(on: Subject) -> Finding:
    """``d_ff = 4 d``: a convention of GPT-2 and of the course, not a need."""
    config = on.model.config
    applies(config.has_mlp, _NONE)
    applies(config.d_mlp == 4 * config.d_model, f"d_mlp is {config.d_mlp}, not 4 d_model = {4 * config.d_model}")
    return equal(_mlp_of(on, 0).W_in.shape[-1], 4 * config.d_model)


@claim(
    "2.1.rows",
    "Definition 2.1",
    "The MLP acts on every position separately, with the same parameters.",
    "largest relative difference between rows alone and rows together, in another order",
)
def row_by_row(on: Subject) -> Finding:
    """``MLP(X)_t = MLP(X_t)`` for every row t: permuting rows permutes the output, and a row alone gives the same."""
    applies(on.model.config.has_mlp, _NONE)
    worst = 0.0
    for layer in on.layers:
        u, mlp, names = _read_by_mlp(on, layer), _mlp_of(on, layer), block_names(layer)
        together = mlp(u, names)
        worst = largest(worst, difference(mlp(u.flip(1), names).flip(1), together))
        worst = largest(worst, difference(mlp(u[:, -1:], names), together[:, -1:]))
    return within(worst, on.tolerance)


@claim(
    "2.2.count",
    "Section 2",
    "With d_ff = 4d an MLP has 8d² weights and 5d biases, more than the about 4d² of attention.",
    "parameters of a block's MLP against 8d² + 5d",
)
def count(on: Subject) -> Finding:
    """``W₁`` and ``W₂`` have ``4d · d`` entries each, 8d² together; b₁ has 4d, b₂ has d. Attention has ``4 · d²``
    weights.
    """
    config = on.model.config
    applies(config.has_mlp, _NONE)
    d = config.d_model
    applies(config.d_mlp == 4 * d, f"d_mlp is {config.d_mlp}, not 4 d_model = {4 * d}")
    applies(not config.gated_mlp, "the MLPs are gated: a third matrix")
    applies(config.bias_mlp, "the MLPs have no biases")
    attn = on.model.blocks[0].attn
    there = sum(p.numel() for p in _mlp_of(on, 0).parameters())
    beside = attn.qkv.weight.numel() + attn.out.weight.numel()
    found = equal(there, 8 * d**2 + 5 * d, f"attention has {beside:,} weights")
    return found if there > beside or config.n_heads * config.d_head != d else within(1.0, 0.0, found.because)


@claim(
    "2.2.communication",
    "Remark 2.2",
    "Attention is the only sublayer that communicates between positions.",
    "largest change at other positions when a token changes and attention outputs are held",
)
def only_attention_communicates(on: Subject) -> Finding:
    """Embeddings, norms, MLPs, additions and the unembedding act on each position by itself.

    So with the attention outputs of every layer held at their values, another token at position s changes the logits at
    s alone, to the last bit that arithmetic keeps.
    """
    config = on.model.config
    applies(on.length > 1, "a single token: there is no other position")
    applies(config.d_vocab > 1, "a vocabulary of one token: nothing can change")
    names = [block_names(layer).attn_out for layer in range(config.n_layers)]

    def held(activation: Tensor, hook: Hook) -> Tensor:
        return on.cache[hook.name]

    at = on.length // 2
    changed = on.tokens.clone()
    changed[:, at] = on.other_tokens()[:, at]
    before = on.model.run_with_hooks(on.tokens, fwd_hooks=[(names, held)])
    after = on.model.run_with_hooks(changed, fwd_hooks=[(names, held)])
    elsewhere = torch.arange(on.length, device=before.device) != at
    moved = difference(after[:, at], before[:, at])
    note = f"the logits at the changed position move by {moved:.2g}"
    return within(difference(after[:, elsewhere], before[:, elsewhere]), on.tolerance, note)


@claim(
    "2.2.nonlinear",
    "Remark 2.2",
    "Attention is itself nonlinear through its softmax, and so is LayerNorm.",
    "deviation from F(X + Y) = F(X) + F(Y) − F(0) for random Y, relative: the smaller of the two",
)
def other_nonlinearities(on: Subject) -> Finding:
    """An affine map obeys ``F(X + Y) + F(0) = F(X) + F(Y)``. Attention does not, for its weights depend on X; nor does
    LN, for which ``LN(2u) = LN(u)`` up to ε. The MLP is one nonlinearity of several: the dedicated position-wise one.
    """
    applies(on.length > 1, "a single token: attention to it alone is linear")
    deviations = {"attention": max(_attention_deviation(on, layer) for layer in on.layers)}
    norm = on.model.config.norm
    if norm is not None:
        kind, eps = norm, on.model.config.norm_eps
        deviations["norm"] = _affine_deviation(on, lambda u: normalised(u, kind, eps), on.stream(0))
    note = ", ".join(f"{name} {value:.2g}" for name, value in deviations.items())
    return above(min(deviations.values()), 10 * on.tolerance, note)


def _affine_deviation(on: Subject, F: Callable[[Tensor], Tensor], X: Tensor) -> float:
    Y = X.square().mean().sqrt() * on.noise(*X.shape)
    return difference(F(X + Y) + F(0 * X), F(X) + F(Y))


def _attention_deviation(on: Subject, layer: int) -> float:
    block, run = on.model.blocks[layer], on.start()

    def attention(Y: Tensor) -> Tensor:
        out: Tensor = block.attn((Y, Y, Y), block.names, run)
        return out

    return _affine_deviation(on, attention, block.normalised(on.stream(layer)))


@claim(
    "2.2.hull",
    "Remark 2.2",
    "A head's output lies in the convex hull of the values it sees.",
    "largest negative weight, row sum off 1, or distance of z from the combination of visible values",
)
def convex_hull(on: Subject) -> Finding:
    """``z_t = Σ_{s ≤ t} A[t, s] v_s`` with ``A[t, s] ≥ 0`` and ``Σ_s A[t, s] = 1``: a convex combination of the values
    at the positions that t may see.
    """
    measured = hull_membership(on.model, on.tokens)
    worst = largest(*(float(x.max()) for x in (-measured.negative, measured.row_sum_error, measured.residual)))
    return within(worst, on.tolerance)


@claim(
    "2.2.escape",
    "Remark 2.2",
    "The MLP can move beyond the convex hulls that attention is restricted to.",
    "share of positions at which the MLP's write is proven outside",
)
def escape(on: Subject) -> Finding:
    """What attention can write at t is ``b_O + Σ_h hull{v_s^h W_O^h : s ≤ t}``, a convex set. The MLP's write p lies
    outside if some direction u has ``u · p > u · b_O + Σ_h max_{s ≤ t} u · v_s^h W_O^h``; such directions are sought
    and checked. Holds if there is one at any position: it says what the MLP can do, not that it always does.
    """
    applies(on.model.config.has_mlp, _NONE)
    measured = hull_membership(on.model, on.tokens)
    assert measured.mlp_outside is not None
    assert measured.mlp_distance is not None
    share, distance = float(measured.mlp_outside.mean()), float(measured.mlp_distance.mean())
    return above(share, 1 / on.tokens.numel(), f"by {distance:.2f} of its own length on average")
