"""A head's attribution split by the position it reads: ``Σ_s A[t, s] (v_s · W_O u)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.attention import per_query_head
from circuits.cache import ActivationCache
from circuits.components import Attn, AttnBias, Component, Head, NormBias
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Positions
from circuits.residual.readout import Readout
from circuits.residual.writes import Mapped, Write


def by_source_position(
    model: HookedGPT,
    cache: ActivationCache,
    rows: Sequence[Write],
    values: Float[Tensor, "component batch chosen"],
    readout: Readout,
    at: Positions,
) -> Float[Tensor, "component batch chosen source"]:
    """Every row split by source position; what is not a head reads the position that it writes to."""
    sources = values.new_zeros(*values.shape, at.n_pos)
    own = at.own().expand(values.shape[1:])
    sources.scatter_(-1, own.expand(values.shape)[..., None], values[..., None])
    start = 0
    for row in rows:
        stop = start + len(row.components)
        first = row.components[0]
        if isinstance(row, Mapped) and isinstance(first, Head):
            split = _split(row, first.layer, model, cache, readout, at)
            sources[start:stop] = split
        start = stop
    return sources


def _split(
    heads: Mapped, layer: int, model: HookedGPT, cache: ActivationCache, readout: Readout, at: Positions
) -> Float[Tensor, "head batch chosen source"]:
    n = block_names(layer)
    v = per_query_head(at.whole(cache[n.v]), model.config.group_size)
    pattern = at.select(cache[n.pattern].transpose(1, 2))
    carried = torch.einsum("bshe,bphe->bphs", v, heads.coefficients(readout.direction).expand(v.shape[0], -1, -1, -1))
    split = (pattern * carried).permute(2, 0, 1, 3)
    divisor = torch.ones_like(readout.total) if readout.scale is None else readout.scale
    if heads.branch.scale is not None:
        divisor = divisor * heads.branch.scale[..., 0]
    return split / divisor[..., None]


def by_layer(components: Sequence[Component], values: Tensor) -> tuple[tuple[Component, ...], Tensor]:
    """Heads, output bias and branch shift of each layer summed into its `Attn`; the first axis is the components'."""
    summed: dict[Component, Tensor] = {}
    for component, value in zip(components, values, strict=True):
        owner = component
        if isinstance(component, Head | AttnBias) or (isinstance(component, NormBias) and component.norm == "ln1_post"):
            assert component.layer is not None
            owner = Attn(component.layer)
        summed[owner] = summed[owner] + value if owner in summed else value
    return tuple(summed), torch.stack(list(summed.values()))
