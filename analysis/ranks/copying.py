"""Copying scores: how far a head raises the logit of the token it attends to."""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from analysis.ranks.heads import refuse_nonfinite
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.finite import check_result, finite_matrix
from circuits.folded import embedding, head_weights, unembedding
from circuits.model import HookedGPT


@result
class CopyingScores(Result):
    """How far each head raises the logit of the token it attends to.

    Attributes:
        score: ``Σ Re λ / Σ |λ|`` between −1 and 1; NaN where no eigenvalue exceeds what rounding makes of
            the product of the factors.
        eigenvalues: λ of ``W_E W_OV W_U``, as many as can differ from 0, in no order.
        raw: Whether the bare weights were measured.
        note: What was read in.
    """

    table = ("score",)
    score: Float[Tensor, "layer head"]
    eigenvalues: Complex[Tensor, "layer head k"]
    raw: bool
    note: str

    def title(self) -> str:
        """What was measured."""
        return f"Copying scores Σ Re λ / Σ |λ| of W_E W_OV W_U ({self.note})"


@torch.no_grad()
def copying_scores(model: HookedGPT, raw: bool = False) -> CopyingScores:
    """``Σ Re λ / Σ |λ|`` over the eigenvalues of ``W_E W_OV W_U`` (Elhage et al. 2021).

    The eigenvalues are those of the d_head × d_head matrix ``W_O (W_U W_E) W_V``, up to zeros. ``W_U W_E``, which all
    heads share, is formed once: going through the vocabulary for each head would cost a hundred times as much. By
    default the norms are read in and `W_U` is centred over the vocabulary, for softmax does not see a shift.

    Args:
        model: A model.
        raw: Measure the bare weights.

    Raises:
        ValueError: Weights that are NaN or infinite (where first).
    """
    require_model(model)
    weights = head_weights(model, raw)
    refuse_nonfinite(weights, model)
    W_E, W_U = embedding(model, raw), unembedding(model, raw)
    check_result("the map from tokens to logits", model, W_E, W_U)
    shared = W_U @ W_E
    eigenvalues = torch.linalg.eigvals(finite_matrix(weights.W_O @ shared @ weights.W_V))
    sizes = eigenvalues.abs()
    score = eigenvalues.real.sum(-1) / sizes.sum(-1)
    score = torch.where(sizes.amax(-1) > _rounding(weights.W_O, shared, weights.W_V), score, float("nan"))
    note = weights.note if raw else f"{weights.note}, W_U centred over the vocabulary"
    return CopyingScores(score=score, eigenvalues=eigenvalues, raw=raw, note=note)


def _rounding(*factors: Tensor) -> Float[Tensor, "*batch"]:
    """What rounding alone can make of a product: a few eps of the product of the Frobenius norms."""
    norms = [torch.linalg.matrix_norm(factor) for factor in factors]
    bound: Tensor = 4 * torch.finfo(factors[0].dtype).eps * math.prod(norms[1:], start=norms[0])
    return bound
