"""Spectra and ranks of every head's circuits."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ranks.spectra import Spectrum, ranks_of
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.factored import FactoredMatrix
from circuits.finite import check_finite, check_result
from circuits.folded import HeadWeights, embedding, head_weights, unembedding
from circuits.model import HookedGPT


@result
class HeadRanks(Result):
    """Spectra and ranks of every head's circuits.

    Attributes:
        circuits: The labels of the axis `circuit`: ``"QK"``, ``"OV"``, and on request ``"full QK"``, ``"full OV"``.
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
def head_ranks(model: HookedGPT, raw: bool = False, offset: int = 0, *, full: bool = False) -> HeadRanks:
    """The singular values of every `W_QK` and `W_OV`, and five ranks made of them.

    The gain and the centring of the norm that a head reads through belong to its circuits and are read in; see
    `circuits.folded.head_weights`.

    Args:
        model: A model.
        raw: Measure the bare weights.
        offset: Rotary models: query minus key position at which `W_QK` is taken.
        full: Also the full circuits ``W_E W_QK W_Eᵀ`` and ``W_E W_OV W_U``, through QR decompositions of `W_E` and
            `W_U`.

    Raises:
        ValueError: Weights that are NaN or infinite (in which head), or an offset without rotary positions.
    """
    require_model(model)
    weights = head_weights(model, raw, offset)
    refuse_nonfinite(weights, model)
    config = model.config
    circuits = {"QK": (weights.QK, config.d_model), "OV": (weights.OV, config.d_model)}
    if full:
        check_result("the full circuits", model, embedding(model, raw), unembedding(model, raw))
        circuits |= {name: (matrix, config.d_vocab) for name, matrix in _full(model, weights, raw).items()}
    bound = min(config.d_head, config.d_model)
    spectra = [_padded(matrix.singular_values(), bound) for matrix, _ in circuits.values()]
    ranks = [ranks_of(s, size, size) for s, (_, size) in zip(spectra, circuits.values(), strict=True)]
    return HeadRanks(
        circuits=tuple(circuits),
        singular_values=torch.stack(spectra, dim=2),
        **{name: torch.stack([r[name] for r in ranks], dim=2) for name in ranks[0]},
        bound=bound,
        raw=raw,
        note=weights.note,
    )


def _full(model: HookedGPT, weights: HeadWeights, raw: bool) -> dict[str, FactoredMatrix]:
    """Matrices with the singular values of the full circuits: the embeddings' orthonormal part left out."""
    R_E = _triangle(embedding(model, raw))
    R_U = _triangle(unembedding(model, raw).mT)
    queries, keys, values = (R_E @ W for W in (weights.W_Q, weights.W_K, weights.W_V))
    return {"full QK": FactoredMatrix(queries, keys.mT), "full OV": FactoredMatrix(values, weights.W_O @ R_U.mT)}


def _triangle(tall: Float[Tensor, "m n"]) -> Float[Tensor, "k n"]:
    R: Tensor = torch.linalg.qr(tall, mode="r").R
    return R


def _padded(s: Spectrum, length: int) -> Float[Tensor, "*batch {length}"]:
    """With zeros, where a small vocabulary leaves fewer singular values."""
    return torch.nn.functional.pad(s[..., :length], (0, max(0, length - s.shape[-1])))


def refuse_nonfinite(weights: HeadWeights, model: HookedGPT) -> None:
    """Refuse maps with NaN or infinities, by the first head that has them and the weight they come from."""
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        bad = (~getattr(weights, name).isfinite()).nonzero()
        if len(bad):
            layer, head = bad[0, :2].tolist()
            what = f"{name} of L{layer}H{head} holds NaN or infinity"
            try:
                check_finite(dict(model.named_parameters()))
            except ValueError as cause:
                raise ValueError(f"{what}: {cause}") from None
            raise ValueError(what)
