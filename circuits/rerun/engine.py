"""Recompute the cone of a set of interventions, many sets at once, and nothing else."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits import names as vocabulary
from circuits.hooks import NO_TAP
from circuits.model import HookedGPT
from circuits.rerun import parallel, sequential
from circuits.rerun.clean import Clean
from circuits.rerun.layout import Lane, Layout
from circuits.rerun.passing import Passing, whole_tiles
from circuits.rerun.stages import Entry, Stage
from circuits.rerun.taps import LaneTap
from circuits.run import token_positions

# Share of the positions from which on reading them is like reading all.
_NEARLY_ALL = 0.75


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
    numbered = [_numbered(lane, i) for i, lane in enumerate(lanes) if lane.start < stop]
    if not numbered:
        nowhere = clean.tokens.new_zeros(0)
        return Changed(clean.final.new_zeros(0, clean.final.shape[-1]), nowhere, nowhere, nowhere)
    layout, final = _run(Passing(clean, _by_entry(numbered), stop, narrow))
    return _changed(layout, final, _slots(clean.tokens, read))


def run_along(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "batch pos"] | None,
    lanes: Sequence[Lane],
    read: Int[Tensor, "batch slot"] | None,
    names: Container[str],
) -> tuple[Clean, Changed]:
    """The clean run and the lanes in one pass: the clean run goes along as one more lane, which nothing changes.

    Args:
        model: The model.
        tokens: The batch.
        mask: True for tokens, False for padding.
        lanes: Lanes that may do so, as `may_run_along` says.
        read: The positions that are read, for each row; None: all.
        names: The activations of the clean run that the lanes go on from.
    """
    batch, pos = tokens.shape
    positions = token_positions(batch, pos, mask, tokens.device).expand(batch, pos)
    unknown = model.embed.weight.new_full((), torch.nan).expand(batch, pos, model.config.d_model)
    clean = Clean(model, tokens, mask, positions, {}, [], unknown)
    unchanged = Lane(len(lanes), (), (0, Stage.EMBED), 0, torch.arange(batch, device=tokens.device))
    numbered = [unchanged, *(_numbered(lane, i) for i, lane in enumerate(lanes))]
    layout, final = _run(Passing(clean, _by_entry(numbered), pos, None, names))
    own = slice(0, batch * pos)  # the lane that came first
    changed = _changed(layout, final, _slots(tokens, read), after=own.stop)
    return replace(clean, final=final[own].unflatten(0, (batch, pos))), changed


def may_run_along(model: HookedGPT, lanes: Sequence[Lane], read: Int[Tensor, "batch slot"] | None, n_pos: int) -> bool:
    """Whether these lanes need nothing of the clean run but what it has at the stage where they begin.

    Lanes that begin at a later position need its keys and values, frozen ones what they are held at; and where only a
    part of the positions is read, the last block had better go on with these alone.
    """
    whole = read is None or read.shape[1] >= _NEARLY_ALL * n_pos
    ready = all(lane.start == 0 and all(placed.edit.acts for placed in lane.placed) for lane in lanes)
    return bool(lanes) and whole and ready and not model.config.parallel_blocks


def _numbered(lane: Lane, number: int) -> Lane:
    return lane if lane.number == number else replace(lane, number=number)


def _by_entry(lanes: Sequence[Lane]) -> dict[Entry, list[Lane]]:
    by_entry: dict[Entry, list[Lane]] = {}
    for lane in lanes:
        by_entry.setdefault(lane.entry, []).append(lane)
    return by_entry


def _run(passing: Passing) -> tuple[Layout, Float[Tensor, "cell d_model"]]:
    """Every lane through the blocks and the final norm."""
    stream, model = None, passing.clean.model
    for block in list(model.blocks)[min(passing.by_entry)[0] :]:
        through = parallel.through if block.parallel else sequential.through
        stream = through(passing, block, passing.begun(block, stream))
    assert stream is not None
    layout, final = stream.layout, stream.values[0]
    if model.ln_final is not None:
        tap = LaneTap([layout], None, passing.clean.captured)
        seen = tap if tap.active else NO_TAP
        final = model.ln_final.tapped(final, seen, vocabulary.FINAL_SCALE, vocabulary.FINAL_NORMALIZED)
    return layout, final[0]


def _slots(tokens: Int[Tensor, "batch pos"], read: Int[Tensor, "batch slot"] | None) -> Int[Tensor, "batch pos"] | None:
    """Which of the positions that are read each position is, −1 for the others; None where all are read, in order."""
    if read is None:
        return None
    slots = torch.full(tokens.shape, -1, device=read.device)
    return slots.scatter_(1, read, torch.arange(read.shape[1], device=read.device).expand_as(read))


def _changed(layout: Layout, final: Tensor, slots: Tensor | None, after: int = 0) -> Changed:
    """The cells that are read, of those behind the first few."""
    lane, row, column = layout.lanes[after:], layout.rows[after:], layout.columns[after:]
    slot, final = column if slots is None else slots[row, column], final[after:]
    kept = slot >= 0
    if bool(kept.all()):
        return Changed(final, lane, row, slot)
    return Changed(final[kept], lane[kept], row[kept], slot[kept])
