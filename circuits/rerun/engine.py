"""Recompute the cone of a set of interventions, many sets at once, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits import names as vocabulary
from circuits.hooks import NO_TAP
from circuits.rerun import parallel, sequential
from circuits.rerun.clean import Clean
from circuits.rerun.layout import Flat, Lane
from circuits.rerun.passing import Passing, whole_tiles
from circuits.rerun.stages import Entry
from circuits.rerun.taps import LaneTap


@dataclass(frozen=True, eq=False)
class Changed:
    """What the unembedding reads where it differs from the clean run.

    Attributes:
        final: The normalised final stream at each changed cell.
        lane: Index of the lane among those given.
        row: Row of the batch.
        slot: Index of the position among those read.
    """

    final: Float[Tensor, "cell d_model"]
    lane: Int[Tensor, " cell"]
    row: Int[Tensor, " cell"]
    slot: Int[Tensor, " cell"]


def recompute(clean: Clean, lanes: Sequence[Lane], read: Int[Tensor, "batch slot"] | None = None) -> Changed:
    """The final stream of every lane at the positions that are read.

    Args:
        clean: The clean run, with what `needs` lists.
        lanes: What to recompute.
        read: The positions that are read, for each row; None: all.
    """
    pointwise = all(placed.edit.pointwise for lane in lanes for placed in lane.placed)
    # A function that sees several positions at once must see all of those it was promised.
    narrow = read if pointwise else None
    n_pos = clean.tokens.shape[1]
    stop = n_pos if narrow is None else whole_tiles(int(narrow.max()) + 1, n_pos)
    numbered = [
        lane if lane.number == i else replace(lane, number=i) for i, lane in enumerate(lanes) if lane.start < stop
    ]
    if not numbered:
        nowhere = clean.tokens.new_zeros(0)
        return Changed(clean.final.new_zeros(0, clean.final.shape[-1]), nowhere, nowhere, nowhere)
    by_entry: dict[Entry, list[Lane]] = {}
    for lane in numbered:
        by_entry.setdefault(lane.entry, []).append(lane)
    passing, stream = Passing(clean, by_entry, stop, narrow), None
    for block in list(clean.model.blocks)[min(by_entry)[0] :]:
        through = parallel.through if block.parallel else sequential.through
        stream = through(passing, block, passing.begun(block, stream))
    assert stream is not None
    return _read_out(clean, stream, read)


def _read_out(clean: Clean, stream: Flat, read: Tensor | None) -> Changed:
    layout, norm = stream.layout, clean.model.ln_final
    tap = LaneTap([layout], None, clean.captured)
    final = stream.values[0]
    if norm is not None:
        final = norm.tapped(final, tap if tap.active else NO_TAP, vocabulary.FINAL_SCALE, vocabulary.FINAL_NORMALIZED)
    slots = layout.columns
    if read is not None:
        slot_of = torch.full(clean.tokens.shape, -1, device=read.device)
        slot_of.scatter_(1, read, torch.arange(read.shape[1], device=read.device).expand_as(read))
        slots = slot_of[layout.rows, layout.columns]
    kept = slots >= 0
    if bool(kept.all()):
        return Changed(final[0], layout.lanes, layout.rows, slots)
    return Changed(final[0, kept], layout.lanes[kept], layout.rows[kept], slots[kept])
