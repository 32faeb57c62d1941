"""What path patching returns: the effect of every edge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.patching.pairs import DIRECTIONS
from analysis.patching.result import LARGEST, largest_first, metric_in_words
from analysis.results import Column, Result, result
from analysis.uncertainty import prompts_and_interval
from circuits.components import Component


@result
class PathPatching(Result):
    """The effect of each sender through the direct edge to each receiver; NaN where there is no such edge.

    Tables have a row for each edge that there is.

    Attributes:
        senders: The components whose write was patched.
        receivers: Where it was read: ``L3H2.q``, ``L3.mlp``, ``logits``.
        raw: Patched minus unpatched, weighted mean over prompts.
        interval: Bootstrap interval of `raw`; NaN for a single prompt.
        values: `raw` over the distance between the two runs; None where that was not asked for.
        values_interval: Bootstrap interval of `values`.
        effect: Patched minus unpatched for each prompt.
        base: The metric of the unpatched run, for each prompt.
        source: The metric of the run patched from.
        direction: ``"denoise"`` or ``"noise"``.
        metric: What was measured.
        level: Level of the intervals.
    """

    table = ("raw", "interval", "values", "values_interval")
    preview = LARGEST
    senders: tuple[Component, ...]
    receivers: tuple[str, ...]
    raw: Float[Tensor, "sender receiver"]
    interval: Float[Tensor, "sender receiver bound"]
    values: Float[Tensor, "sender receiver"] | None
    values_interval: Float[Tensor, "sender receiver bound"] | None
    effect: Float[Tensor, "sender receiver batch"]
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    direction: str
    metric: str
    level: float

    def title(self) -> str:
        """What was patched into what, and what was measured."""
        return (
            f"Writes of senders patched from {DIRECTIONS[self.direction]}, as one receiver alone reads them: change of "
            f"{metric_in_words(self.metric, self.direction)}; {prompts_and_interval(len(self.base), self.level)}"
        )

    def columns(self, *fields: str) -> dict[str, Column]:
        """The columns of `to_frame`: an edge that cannot exist is no row, while the tensors have NaN for it."""
        table = super().columns(*fields)
        chosen = fields or self._table_fields()
        axes = list(dict.fromkeys(axis for field in chosen for axis in self.axes(field) if axis != "bound"))
        if not {"sender", "receiver"} <= set(axes):
            return table
        shape = tuple(len(self.labels(axis)) for axis in axes)
        index = np.indices(shape, sparse=True)
        exists = self._exists.cpu().numpy()[index[axes.index("sender")], index[axes.index("receiver")]]
        rows = np.broadcast_to(exists, shape).ravel()
        return {name: column[rows] for name, column in table.items()}

    @property
    def _exists(self) -> Bool[Tensor, "sender receiver"]:
        return ~self.effect.isnan().all(-1)

    def _previewed(self) -> Sequence[int]:
        return largest_first(self.raw[self._exists])
