"""The residual stream as a sum of labelled writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.components import Component, component_row, few_components
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Position, resolve_positions
from circuits.residual.requirements import (
    Unit,
    check_linear,
    check_unit,
    require_finite,
    stop_layer,
    stream_names,
    write_names,
)
from circuits.residual.table import value_frame
from circuits.residual.writes import stream_writes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition:
    """Writes that sum to the stream.

    Attributes:
        components: Who wrote each row, in the order in which they wrote.
        writes: ``[component batch pos d_model]``; without `pos` where one position was asked for.
        stream: What they sum to, ``[batch pos d_model]``.
        error: The largest ``|Σ writes − stream|``.
    """

    components: tuple[Component, ...]
    writes: Float[Tensor, "component batch *pos d_model"]
    stream: Float[Tensor, "batch *pos d_model"]
    error: float

    def __getitem__(self, component: Component | str) -> Float[Tensor, "batch *pos d_model"]:
        """The write of one component, given as ``Head(0, 1)`` or ``"L0H1"``.

        Raises:
            KeyError: A component that is no row.
        """
        return self.writes[component_row(component, self.components, "decomposition")]

    def to_frame(self) -> pd.DataFrame:
        """The norm of every write, and its share of the stream: ``write · stream / ‖stream‖²`` (shares sum to 1)."""
        norm = self.writes.norm(dim=-1)
        share = (self.writes * self.stream).sum(-1) / self.stream.square().sum(-1)
        axes = dict(zip(("batch", "pos"), norm.shape[1:], strict=False))
        return value_frame(self.components, axes, {"norm": norm, "share": share})

    def __repr__(self) -> str:
        shape = list(self.writes.shape)
        return (
            f"Decomposition: {len(self.components)} writes {shape} that sum to the stream, error {self.error:.1e}\n"
            f"  {few_components(self.components)}"
        )


@torch.no_grad()
def decompose(
    model: HookedGPT,
    cache: ActivationCache,
    layer: int | None = None,
    unit: Unit = "head",
    *,
    mid: bool = False,
    position: Position = None,
) -> Decomposition:
    """The stream as a sum of writes, ``resid = Σ_c write_c`` (Elhage et al. 2021; lecture, Remark 3.4).

    Args:
        model: A pre-norm model, or one without norms.
        cache: Of the run in question, with the activations that `needed_names` lists.
        layer: The stream before this block; None for the stream after the last.
        unit: ``"layer"`` (attention and MLP of each layer), ``"head"`` (heads and their biases apart) or ``"neuron"``
            (heads and neurons). Neurons at many positions are many vectors: say which `position`.
        mid: The stream between attention and MLP of block `layer`.
        position: All positions, or one: −1 is the last real token of each prompt.

    Raises:
        KeyError: The cache lacks activations; the message says which, and how to capture them.
        ValueError: A post-norm model; a cache of another architecture; NaN or infinities, with the first place.
        IndexError: A layer or position that does not exist.
    """
    check_unit(unit)
    check_linear(model, cache)
    stop = stop_layer(model.config, layer)
    if mid and (layer is None or not model.config.has_resid_mid):
        raise ValueError("mid=True needs a layer, of a model whose blocks are sequential and have MLPs")
    stream_name = block_names(stop).resid_mid if mid else stream_names(model.config, stop)[0]
    used = [*write_names(model.config, unit, stop, mid=mid), stream_name]
    cache.require(*used)
    at = resolve_positions(position, cache, cache[names.EMBED].shape, model.W_E)
    stream = at.select(cache[stream_name])
    rows = stream_writes(model, cache, unit, stop, at, mid=mid)
    components = tuple(component for row in rows for component in row.components)
    # Filled in place: the parts and their concatenation would be held twice.
    writes = stream.new_empty(len(components), *stream.shape)
    start = 0
    for row in rows:
        writes[start : start + len(row.components)] = row.vectors()
        start += len(row.components)
    total = writes.sum(0)
    require_finite("the decomposition", total, model, cache, used)
    error = float((total - stream).abs().max())
    return Decomposition(components, at.squeeze(writes, 2), at.squeeze(stream, 1), error)
