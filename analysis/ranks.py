"""How much of their width heads use: spectra and ranks of `W_QK` and `W_OV`, and copying scores.

All ranks are functions of the singular values s, which come from the factors at the size of d_head.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.folded import HeadWeights, embedding, head_weights, unembedding
from circuits.model import HookedGPT

Spectrum = Float[Tensor, "*batch k"]


# --- ranks of a spectrum --------------------------------------------------------------------------------------------


def numerical_rank(s: Spectrum, rows: int, columns: int) -> Int[Tensor, "*batch"]:
    """``#{s > max(m, n) · eps · s_1}`` for an m × n matrix, eps that of the singular values' own type."""
    tolerance = max(rows, columns) * torch.finfo(s.dtype).eps
    return (s > tolerance * _largest(s)).sum(-1)


def stable_rank(s: Spectrum) -> Float[Tensor, "*batch"]:
    """``Σ s² / s_1²``; 0 for the zero matrix."""
    return _or_zero(_scaled(s).square().sum(-1), s)


def effective_rank(s: Spectrum) -> Float[Tensor, "*batch"]:
    """``exp(H(s / Σ s))``, H the entropy in nats (Roy and Vetterli 2007); 0 for the zero matrix."""
    scaled = _scaled(s)
    shares = scaled / scaled.sum(-1, keepdim=True)
    return _or_zero(torch.special.entr(shares).sum(-1).exp(), s)


def participation_ratio(s: Spectrum) -> Float[Tensor, "*batch"]:
    """``(Σ s²)² / Σ s⁴``; 0 for the zero matrix."""
    energy = _scaled(s).square()
    return _or_zero(energy.sum(-1).square() / energy.square().sum(-1), s)


def energy_rank(s: Spectrum, share: float = 0.9) -> Int[Tensor, "*batch"]:
    """The least k with ``Σ_{i ≤ k} s² ≥ share · Σ s²``; 0 for the zero matrix."""
    energy = _scaled(s).double().square().cumsum(-1)
    below = (energy < share * energy[..., -1:]).sum(-1)
    return torch.where(_largest(s)[..., 0] > 0, below + 1, 0)


def _largest(s: Spectrum) -> Float[Tensor, "*batch 1"]:
    return s.amax(-1, keepdim=True)


def _scaled(s: Spectrum) -> Spectrum:
    """``s / s_1``, so that no square overflows or vanishes."""
    return s / _largest(s)


def _or_zero(rank: Float[Tensor, "*batch"], s: Spectrum) -> Float[Tensor, "*batch"]:
    return torch.where(_largest(s)[..., 0] > 0, rank, 0.0)


# --- of heads -------------------------------------------------------------------------------------------------------


@result
class HeadRanks(Result):
    """Spectra and ranks of every head's circuits.

    Attributes:
        circuits: ``("QK", "OV")``, the labels of the axis `circuit`.
        singular_values: Descending, k = min(d_head, d_model) of them.
        numerical_rank: How many singular values are above rounding.
        stable_rank: ``Σ s² / s_1²``.
        effective_rank: ``exp(H(s / Σ s))``.
        participation_ratio: ``(Σ s²)² / Σ s⁴``.
        energy_rank: How many hold 90% of ``Σ s²``.
        bound: What no rank can exceed, ``min(d_head, d_model)`` (lecture, proposition 1.2).
        raw: Whether the bare weights were measured.
        note: What was read in.
    """

    table = ("numerical_rank", "stable_rank", "effective_rank", "participation_ratio", "energy_rank")
    circuits: tuple[str, ...] = ("QK", "OV")
    singular_values: Float[Tensor, "layer head circuit k"]
    numerical_rank: Int[Tensor, "layer head circuit"]
    stable_rank: Float[Tensor, "layer head circuit"]
    effective_rank: Float[Tensor, "layer head circuit"]
    participation_ratio: Float[Tensor, "layer head circuit"]
    energy_rank: Int[Tensor, "layer head circuit"]
    bound: int
    raw: bool
    note: str

    def title(self) -> str:
        """What was measured, and the bound."""
        return f"Ranks of W_QK and W_OV ({self.note}); none can exceed {self.bound}"


@torch.no_grad()
def head_ranks(model: HookedGPT, raw: bool = False, offset: int = 0) -> HeadRanks:
    """The singular values of every `W_QK` and `W_OV`, and five ranks made of them.

    The gain and the centring of the norm that a head reads through belong to its circuits and are read in; see
    `circuits.folded.head_weights`.

    Args:
        model: A model.
        raw: Measure the bare weights.
        offset: Rotary models: query minus key position at which `W_QK` is taken.

    Raises:
        ValueError: Weights that are NaN or infinite (in which head), or an offset without rotary positions.
    """
    weights = head_weights(model, raw, offset)
    _refuse_nonfinite(weights)
    s = torch.stack([weights.QK.singular_values(), weights.OV.singular_values()], dim=2)
    d_model = model.config.d_model
    return HeadRanks(
        singular_values=s,
        numerical_rank=numerical_rank(s, d_model, d_model),
        stable_rank=stable_rank(s),
        effective_rank=effective_rank(s),
        participation_ratio=participation_ratio(s),
        energy_rank=energy_rank(s),
        bound=s.shape[-1],
        raw=raw,
        note=weights.note,
    )


def _refuse_nonfinite(weights: HeadWeights) -> None:
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        bad = (~getattr(weights, name).isfinite()).nonzero()
        if len(bad):
            layer, head = bad[0, :2].tolist()
            raise ValueError(f"{name} of L{layer}H{head} holds NaN or infinity")


# --- copying --------------------------------------------------------------------------------------------------------


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
    """
    weights = head_weights(model, raw)
    _refuse_nonfinite(weights)
    W_E, W_U = embedding(model, raw), unembedding(model, raw)
    shared = W_U @ W_E
    eigenvalues = torch.linalg.eigvals(weights.W_O @ shared @ weights.W_V)
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
