"""Ranks of all heads of a layer together."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ranks.heads import refuse_nonfinite
from analysis.ranks.spectra import numerical_rank, ranks_of
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.factored import FactoredMatrix
from circuits.folded import head_weights
from circuits.model import HookedGPT


@result
class LayerRanks(Result):
    """What the heads of a layer span together.

    Attributes:
        circuits: Labels of the axis `circuit`. ``"QK query"`` and ``"OV read"`` are the heads' matrices side by side,
            ``[M¹ … M^H]``: the directions that any head reads. ``"QK key"`` and ``"OV write"`` are the matrices one
            above the other: the directions that any head attends by, or writes. ``"OV sum"`` is ``Σ_h W_OV^h``, what
            the layer does where all heads attend alike.
        singular_values: Descending.
        numerical_rank: How many singular values are above rounding.
        stable_rank: ``Σ s² / s_1²``.
        effective_rank: ``exp(H(s / Σ s))``.
        participation_ratio: ``(Σ s²)² / Σ s⁴``.
        energy_rank: How many hold 90% of ``Σ s²``.
        separate: The numerical ranks of the heads added up: what the joint rank would be if no two heads shared a
            direction and the stream were wide enough.
        bound: What no rank can exceed, ``min(n_heads · d_head, d_model)``.
        raw: Whether the bare weights were measured.
        note: What was read in.
    """

    table = ("numerical_rank", "separate", "stable_rank", "effective_rank", "participation_ratio", "energy_rank")
    circuits: tuple[str, ...]
    singular_values: Float[Tensor, "layer circuit k"]
    numerical_rank: Int[Tensor, "layer circuit"]
    stable_rank: Float[Tensor, "layer circuit"]
    effective_rank: Float[Tensor, "layer circuit"]
    participation_ratio: Float[Tensor, "layer circuit"]
    energy_rank: Int[Tensor, "layer circuit"]
    separate: Int[Tensor, "layer circuit"]
    bound: int
    raw: bool
    note: str

    def title(self) -> str:
        """What was measured, and the bound."""
        return f"Joint ranks of the heads of each layer ({self.note}); none can exceed {self.bound}"


@torch.no_grad()
def layer_ranks(model: HookedGPT, raw: bool = False, offset: int = 0) -> LayerRanks:
    """Ranks of a layer's heads taken together: H heads of rank d_head can span d_model, or lie in one subspace.

    Args:
        model: A model.
        raw: Measure the bare weights.
        offset: Rotary models: query minus key position at which `W_QK` is taken.

    Raises:
        ValueError: Weights that are NaN or infinite (in which head), or an offset without rotary positions.
    """
    require_model(model)
    weights = head_weights(model, raw, offset)
    refuse_nonfinite(weights, model)
    d_model = model.config.d_model
    QK, OV = weights.QK, weights.OV
    bound = min(model.config.n_heads * model.config.d_head, d_model)
    side_by_side = [_side_by_side(M) for M in (QK, QK.T, OV, OV.T)]
    # Σ_h V_h O_h is one product of the concatenated factors.
    total = FactoredMatrix(OV.A.transpose(1, 2).flatten(2), OV.B.flatten(1, 2))
    s = torch.stack([torch.linalg.svdvals(M)[..., :bound] for M in side_by_side], dim=1)
    s = torch.cat([s, total.singular_values()[:, None, :bound]], dim=1)
    own = [numerical_rank(M.singular_values(), d_model, d_model).sum(-1) for M in (QK, OV)]
    return LayerRanks(
        circuits=("QK query", "QK key", "OV read", "OV write", "OV sum"),
        singular_values=s,
        **ranks_of(s, d_model, d_model),
        separate=torch.stack([own[0], own[0], own[1], own[1], own[1]], dim=1),
        bound=bound,
        raw=raw,
        note=weights.note,
    )


def _side_by_side(M: FactoredMatrix) -> Float[Tensor, "layer d_model n"]:
    """``[A¹ R¹ᵀ … A^H R^Hᵀ]``, with the singular values of ``[M¹ … M^H]``: each M is this times orthonormal rows."""
    reduced = M.A @ torch.linalg.qr(M.B.mT, mode="r").R.mT
    joint: Tensor = reduced.transpose(1, 2).flatten(2)
    return joint
