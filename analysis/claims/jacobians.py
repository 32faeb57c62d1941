"""Section 3 of the lecture, continued: Jacobians and the gradient path."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from analysis.claims.claim import Finding, applies, claim, measurement, within
from analysis.claims.residual import update
from analysis.claims.subject import Subject, difference, largest
from analysis.geometry import gradient_path, pullbacks, sequence_jacobian
from analysis.geometry.jacobians import Step

_POST = "norms stand after the additions (post-norm): there is no identity term"
_POSITIONS, _DIRECTIONS, _PROBES = 4, 8, 16


@claim(
    "3.1.jacobian",
    "Definition 3.1",
    "The Jacobian of a residual block is I + DF.",
    "largest relative difference of uᵀJ from uᵀ(I + DF), for random u",
)
def jacobian(on: Subject) -> Finding:
    """``∂X⁽ˡ⁺¹⁾ / ∂X⁽ˡ⁾ = I + DF_l(X⁽ˡ⁾)`` for ``X⁽ˡ⁺¹⁾ = X⁽ˡ⁾ + F_l(X⁽ˡ⁾)``.

    Both sides are differentiated exactly, the block and its branches by themselves, and applied to random directions u
    of the output at one position: for almost every u, agreement there is agreement everywhere. Between different
    positions the identity has no entry, and J is DF alone.
    """
    applies(on.model.config.norm_placement == "pre", _POST)
    width = min(_POSITIONS, on.length)
    run = on.model.start(on.tokens[:1, :width])
    directions = on.noise(_DIRECTIONS, on.model.config.d_model)
    worst = 0.0
    for layer in on.layers:
        block, x = on.model.blocks[layer], on.stream(layer)[0, :width]
        whole = pullbacks(_at_last(partial(block, run=run)), x, directions)
        branches = pullbacks(_at_last(partial(update, block, run=run)), x, directions)
        branches[:, -1] += directions
        worst = largest(worst, difference(whole, branches))
    return within(worst, on.tolerance, f"{_DIRECTIONS} directions of the output at position {width - 1}")


def _at_last(step: Step) -> Step:
    """The same step, read at the last position."""
    return lambda X: step(X)[:, -1]


@claim(
    "3.3.product",
    "Remark 3.3",
    "The Jacobian through several blocks is the product of theirs.",
    "relative difference of the product from the Jacobian of the composition",
)
def product(on: Subject) -> Finding:
    """``∂X⁽ᵏ⁾ / ∂X⁽⁰⁾ = Π_l (I + DF_l)``, the chain rule: a product of perturbations of the identity.

    Full Jacobians of a short sequence, all positions and coordinates, in float arithmetic of the check's precision.
    """
    jacobians, x = on.short_jacobians
    run = on.model.start(on.tokens[:1, : len(x)])

    def composition(X: Tensor) -> Tensor:
        for block in list(on.model.blocks)[: len(jacobians)]:
            X = block(X, run)
        return X

    through = _product(jacobians)
    note = f"{len(jacobians)} blocks, {len(x)} token{'s' if len(x) > 1 else ''}"
    return within(difference(sequence_jacobian(composition, x), through), 10 * on.tolerance, note)


def _product(jacobians: list[Tensor]) -> Tensor:
    """Of Jacobians in the row convention, ``dx' = dx J``: the first block's stands on the left."""
    through = jacobians[0]
    for one in jacobians[1:]:
        through = through @ one
    return through


@claim(
    "3.3.bound",
    "Remark 3.3",
    "If the residual derivatives are controlled, so is the product.",
    "how far a singular value of the product leaves [Π(1 − δ_l)₊, Π(1 + δ_l)], relative",
)
def controlled_product(on: Subject) -> Finding:
    """With ``δ_l = ‖DF_l‖₂``, Weyl's inequality puts every singular value of ``I + DF_l`` between ``(1 − δ_l)₊`` and
    ``1 + δ_l``; those of a product lie between the products of the least and of the greatest. So small δ_l keep a
    gradient from vanishing and exploding; the formula alone does not make them small.
    """
    applies(on.model.config.norm_placement == "pre", _POST)
    jacobians, _ = on.short_jacobians
    eye = torch.eye(len(jacobians[0]), dtype=jacobians[0].dtype, device=jacobians[0].device)
    deltas = [float(torch.linalg.matrix_norm(J - eye, 2)) for J in jacobians]
    low, high = math.prod(max(1 - x, 0) for x in deltas), math.prod(1 + x for x in deltas)
    s = torch.linalg.svdvals(_product(jacobians))
    worst = largest(float(s[0]) / high - 1, low - float(s[-1]), 0.0)
    note = f"singular values {float(s[-1]):.2g} to {float(s[0]):.2g}, bounds {low:.2g} to {high:.2g}"
    return within(worst, 10 * on.tolerance, note)


@claim(
    "3.3.size",
    "Remark 3.3",
    "The residual formula alone does not guarantee that every DF is small.",
    "largest ‖DF‖₂ of a block",
)
def residual_derivatives(on: Subject) -> Finding:
    """``δ_l = ‖J_l − I‖₂`` of each block on a short sequence. Below 1 the block can be inverted near its input; above 1
    the bound of 3.3.bound says nothing about vanishing. For a post-norm block it is the distance from the identity too.
    """
    jacobians, x = on.short_jacobians
    eye = torch.eye(len(jacobians[0]), dtype=jacobians[0].dtype, device=jacobians[0].device)
    deltas = [float(torch.linalg.matrix_norm(J - eye, 2)) for J in jacobians]
    shown = ", ".join(f"{delta:.2f}" for delta in deltas[:8]) + (", …" if len(deltas) > 8 else "")
    return measurement(largest(*deltas), f"by block {shown}; on {len(x)} token{'s' if len(x) > 1 else ''}")


@claim(
    "3.3.path",
    "Remark 3.3",
    "This architecture mitigates vanishing and exploding gradients.",
    "gain of a gradient from the last stream to the first, at one position",
)
def path(on: Subject) -> Finding:
    """``‖∂X⁽ᴸ⁾_t / ∂X⁽⁰⁾_t‖_F / √d``: by what factor a random gradient at position t of the last stream has grown when
    it arrives at the same position of the first; 1 for the identity. Through L arbitrary matrices of gain g it would be
    gᴸ.
    """
    exact = not on.large
    tokens = on.tokens[:1, : 16 if exact else 8]
    probes = min(_PROBES, on.model.config.d_model)
    found = gradient_path(on.model, tokens, probes=None if exact else probes, seed=on.seed)
    smallest, largest = (float(x) for x in found.gain.aminmax())
    how = "exact" if exact else f"estimated from {probes} directions"
    return measurement(float(found.gain[0]), f"from any depth between {smallest:.2g} and {largest:.2g}; {how}")
