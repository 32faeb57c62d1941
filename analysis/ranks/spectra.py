"""Ranks as functions of the singular values s of a matrix; the zero matrix has rank 0 in every one of them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

Spectrum = Float[Tensor, "*batch k"]


def ranks_of(s: Spectrum, rows: int, columns: int) -> dict[str, Tensor]:
    """Every rank of an m × n matrix with these singular values, by the name of the field that holds it."""
    return {
        "numerical_rank": numerical_rank(s, rows, columns),
        "stable_rank": stable_rank(s),
        "effective_rank": effective_rank(s),
        "participation_ratio": participation_ratio(s),
        "energy_rank": energy_rank(s),
    }


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
