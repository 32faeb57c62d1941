"""What the blocks of one recomputation share: which lanes begin where, how far they reach, and their attention."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.block import TransformerBlock
from circuits.hooks import NO_TAP
from circuits.rerun import one_query
from circuits.rerun.clean import Clean, Prefix, SpreadOut
from circuits.rerun.layout import Flat, Lane, Layout, lay_out, merged
from circuits.rerun.stages import Entry, Stage
from circuits.rerun.taps import LaneTap
from circuits.run import Run, make_run

# Stages of a block in which a lane begins behind the attention.
INSIDE = (Stage.HEADS, Stage.MID, Stage.POST, Stage.OUT, Stage.END)

# Up to this many positions, parts that begin at different ones share one attention over all of them.
_FEW_POSITIONS = 128
# Positions that an attention kernel takes at a time.
_TILE = 16


@dataclass(frozen=True, eq=False)
class Attended:
    """Lanes under way, behind the attention of a block.

    Attributes:
        layout: At the positions that go on.
        x: The stream before the block there.
        normed: What the heads read there.
        z: What the heads made of it.
        run: The pass.
    """

    layout: Layout
    x: Float[Tensor, "1 cell d_model"]
    normed: Float[Tensor, "1 cell d_model"]
    z: Float[Tensor, "1 cell head d_head"]
    run: Run


@dataclass(frozen=True, eq=False)
class Passing:
    """One recomputation.

    Attributes:
        clean: The clean run.
        by_entry: The lanes that begin at each point.
        stop: One past the last position that matters.
        read: The positions that are read at the end, for each row; None: all.
        keep: The activations that are taken over from the first lane into the clean run, where that goes along.
    """

    clean: Clean
    by_entry: Mapping[Entry, Sequence[Lane]]
    stop: int
    read: Int[Tensor, "batch slot"] | None
    keep: Container[str] = ()

    @cached_property
    def whole_blocks(self) -> frozenset[int]:
        """The layers of which some lane edits all that the block adds."""
        lanes = [lane for lanes in self.by_entry.values() for lane in lanes]
        return frozenset(placed.entry[0] for lane in lanes for placed in lane.placed if placed.whole_block)

    def kept(self, names: Sequence[str], flat: Flat) -> None:
        """Take over what is wanted of activations that the lanes are about to go on from."""
        shape = self.clean.tokens.shape
        for name, value in zip(names, flat.values, strict=False):
            if name in self.keep:
                self.clean.captured[name] = value[0, : shape.numel()].unflatten(0, shape).clone()

    def begun(self, block: TransformerBlock, stream: Flat | None) -> Flat | None:
        """The stream before a block: that of the lanes under way, and of those that begin there."""
        flats = [] if stream is None else [stream]
        for stage in (Stage.EMBED, Stage.START):
            if stage is Stage.START and flats:
                self.kept([block.names.resid_pre], flats[0])
            lanes = self.by_entry.get((block.names.layer, stage))
            if lanes:
                flats.append(self._before_block(block, stage, lanes))
        return merged(flats) if flats else None

    def _before_block(self, block: TransformerBlock, stage: Stage, lanes: Sequence[Lane]) -> Flat:
        layout = lay_out(lanes, self.stop)
        if stage is Stage.START:
            return Flat(layout, (layout.gather(self.clean.captured[block.names.resid_pre]),))
        tap = LaneTap([layout], None, self.clean.captured)
        run = make_run(self.clean.model.config, layout.gather(self.clean.positions), self.clean.model.dtype, tap=tap)
        return Flat(layout, (self.clean.model.embedding(layout.gather(self.clean.tokens), run),))

    def beginning(self, block: TransformerBlock, stage: Stage, names: Sequence[str]) -> Flat | None:
        """Clean activations for the lanes that begin at a stage behind the attention; None where none does."""
        lanes = self.by_entry.get((block.names.layer, stage))
        if not lanes:
            return None
        layout = self._after_attention(block, lay_out(lanes, self.stop))
        return Flat(layout, tuple(layout.gather(self.clean.captured[name]) for name in names))

    def tap(self, block: TransformerBlock, *layouts: Layout) -> LaneTap:
        """The edits of a layout's lanes in a block."""
        n = block.names
        return LaneTap(layouts, n.layer, self.clean.captured, own=(n.z, n.post))  # made for these lanes, read once

    def attended(self, block: TransformerBlock, stream: Flat) -> Attended:
        """A stream through the attention of a block."""
        before = stream.layout
        after = self._after_attention(block, before)
        tap = self.tap(block, before, after) if after is not before else self.tap(block, before)
        run = self._run(before, after, tap)
        x = tap(block.names.resid_pre, stream.values[0])
        normed = block.attention_read(x, run)
        if after is not before and one_query.applies(self.clean.model.config, block, before, after, run):
            spread = run.spread or spread_out(self.clean, before, after, self.stop)
            assert isinstance(spread, SpreadOut)
            z = one_query.heads(block, normed, run, self.clean, spread)
        else:
            z = block.heads(x, normed, run)
        return Attended(after, run.wanted(x), run.wanted(normed), z, run)

    def _after_attention(self, block: TransformerBlock, layout: Layout) -> Layout:
        """In the last block only the positions that are read go on, where they are fewer."""
        if self.read is None or block.names.layer < len(self.clean.model.blocks) - 1:
            return layout
        width = self.read.shape[1]
        fewer = [whole_tiles(width, part.shape[1]) < part.shape[1] for part in layout.parts]
        if not any(fewer):
            return layout
        pairs = zip(layout.parts, fewer, strict=True)
        return Layout(tuple(part.reading(self.read) if less else part for part, less in pairs))

    def _run(self, before: Layout, after: Layout, tap: LaneTap) -> Run:
        """The pass of a flat stream: one row, in which the parts attend to themselves and their clean past."""
        clean, taps = self.clean, [tap.of_part(part, i) for i, part in enumerate(after.parts)]
        flat = make_run(clean.model.config, before.gather(clean.positions), clean.model.dtype)
        read = None if after is before else _places(before, after)
        flat = replace(flat, tap=tap if tap.active else NO_TAP, read=read)
        if self.stop <= _FEW_POSITIONS and len(before.parts) > 1 and not any(taps):
            spread = spread_out(clean, before, after, self.stop)
            if spread is not None:
                return replace(flat, spread=spread)
        parts = []
        for part, narrowed, own in zip(before.parts, after.parts, taps, strict=True):
            mask = None if clean.mask is None else clean.mask[part.rows, : self.stop]
            past = Prefix(clean, part.rows, part.start) if part.start else None
            queries = None if narrowed is part else narrowed.columns
            positions = part.columns.expand(part.shape)
            parts.append(Run(positions, None, mask, n_past=part.start, tap=own or NO_TAP, past=past, queries=queries))
        return replace(flat, parts=tuple(parts))


def whole_tiles(n: int, most: int) -> int:
    """The number of positions that an attention over `n` of them had better take: it works through them in tiles.

    A little more than `n` where that fills the last tile, at most `most`.
    """
    filled = -(-n // _TILE) * _TILE
    return filled if filled <= min(most, n + n // _TILE) else n


def _places(before: Layout, after: Layout) -> Int[Tensor, " cell"]:
    """Where in one layout the cells of a narrower one stand."""
    places = []
    for offset, whole, narrow in zip(before.offsets, before.parts, after.parts, strict=False):
        rows, width = whole.shape
        first = offset + width * torch.arange(rows, device=narrow.columns.device)[:, None]
        places.append((first + narrow.columns.expand(narrow.shape) - whole.start).flatten())
    return torch.cat(places)


def spread_out(clean: Clean, before: Layout, after: Layout, stop: int) -> SpreadOut | None:
    """All parts as one batch for their attention; None where some go on with more positions than others."""
    rows = torch.cat([part.rows for part in before.parts])
    device, narrowed = rows.device, after is not before
    widths = {part.shape[1] for part in after.parts}
    if narrowed and len(widths) > 1:
        return None
    lengths = torch.tensor([part.shape[1] for part in before.parts for _ in range(part.shape[0])], device=device)
    keys = torch.arange(len(rows), device=device).repeat_interleave(lengths) * stop + before.columns
    mask = None if clean.mask is None else clean.mask[rows, :stop]
    positions = torch.arange(stop, device=device).expand(len(rows), -1)
    if not narrowed:
        return SpreadOut(clean, rows, Run(positions, None, mask), keys, keys, (len(rows), stop))
    width = widths.pop()
    columns = torch.cat([part.columns.expand(part.shape) for part in after.parts])
    run = Run(positions, None, mask, queries=columns)
    return SpreadOut(clean, rows, run, keys, torch.arange(len(rows) * width, device=device), (len(rows), width))
