"""Recompute the cone of a set of interventions, many sets at once, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits import names as vocabulary
from circuits.block import TransformerBlock
from circuits.config import GPTConfig
from circuits.hooks import NO_TAP
from circuits.rerun import one_query
from circuits.rerun.clean import Clean, Prefix, SpreadOut
from circuits.rerun.layout import Flat, Lane, Layout, lay_out, merged
from circuits.rerun.stages import Stage, entries
from circuits.rerun.taps import LaneTap
from circuits.run import Run, make_run

# Stages of a block in which a lane joins behind the attention, each run by itself up to the end of the block.
_INSIDE = (Stage.HEADS, Stage.MID, Stage.POST, Stage.OUT, Stage.END)


# Up to this many positions, parts that begin at different ones share one attention over all of them.
_FEW_POSITIONS = 128

# The clean activation of a name at the cells of a layout.
At = Callable[[str], Tensor]


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
    stop = clean.tokens.shape[1] if narrow is None else int(narrow.max()) + 1
    numbered = [replace(lane, number=i) for i, lane in enumerate(lanes) if lane.start < stop]
    if not numbered:
        nowhere = clean.tokens.new_zeros(0)
        return Changed(clean.final.new_zeros(0, clean.final.shape[-1]), nowhere, nowhere, nowhere)
    by_entry: dict[tuple[int, Stage], list[Lane]] = {}
    for lane in numbered:
        by_entry.setdefault(lane.entry, []).append(lane)
    pass_ = _Pass(clean, by_entry, stop, narrow)
    stream = None
    for layer in range(min(by_entry)[0], len(clean.model.blocks)):
        stream = pass_.through(layer, stream)
    assert stream is not None
    return _read_out(clean, stream, read)


@dataclass(frozen=True, eq=False)
class _Pass:
    clean: Clean
    by_entry: dict[tuple[int, Stage], list[Lane]]
    stop: int
    read: Tensor | None

    def through(self, layer: int, stream: Flat | None) -> Flat | None:
        """The stream after a block: the lanes that were under way, and those that begin here."""
        block = self.clean.model.blocks[layer]
        flats = [stream] if stream is not None else []
        for stage in (Stage.EMBED, Stage.START):
            if (layer, stage) in self.by_entry:
                flats.append(self._before_block(block, stage, self.by_entry[layer, stage]))
        if flats:
            flats = [self._whole_block(block, merged(flats))]
        for stage in _INSIDE:
            if (layer, stage) in self.by_entry:
                flats.append(self._from_inside(block, stage, self.by_entry[layer, stage]))
        return merged(flats) if flats else None

    def _before_block(self, block: TransformerBlock, stage: Stage, lanes: list[Lane]) -> Flat:
        layout = lay_out(lanes, self.stop)
        if stage is Stage.START:
            return Flat(layout, layout.gather(self.clean.captured[block.names.resid_pre]))
        tap = LaneTap([layout], None, self.clean.captured)
        run = make_run(self.clean.model.config, layout.gather(self.clean.positions), self.clean.model.dtype, tap=tap)
        return Flat(layout, self.clean.model.embedding(layout.gather(self.clean.tokens), run))

    def _whole_block(self, block: TransformerBlock, stream: Flat) -> Flat:
        before = stream.layout
        after = self._after_attention(block, before)
        tap = LaneTap([before, after] if after is not before else [before], block.names.layer, self.clean.captured)
        run = self._run(before, after, tap)
        if after is not before and one_query.applies(self.clean.model.config, block, before, after, run):
            spread = run.spread or spread_out(self.clean, before, after, self.stop)
            assert isinstance(spread, SpreadOut)
            return Flat(after, one_query.through(block, stream.x, run, self.clean, spread))
        return Flat(after, block(stream.x, run))

    def _after_attention(self, block: TransformerBlock, layout: Layout) -> Layout:
        """In the last block only the positions that are read go on, where they are fewer."""
        if self.read is None or block.names.layer < len(self.clean.model.blocks) - 1:
            return layout
        width = self.read.shape[1]
        fewer = [width < part.shape[1] for part in layout.parts]
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

    def _from_inside(self, block: TransformerBlock, stage: Stage, lanes: list[Lane]) -> Flat:
        """The rest of a block, for lanes in which everything before this stage is clean."""
        layout = self._after_attention(block, lay_out(lanes, self.stop))
        tap = LaneTap([layout], block.names.layer, self.clean.captured)
        n = block.names

        def at(name: str) -> Tensor:
            return layout.gather(self.clean.captured[name])

        if any(placed.whole_block for lane in lanes for placed in lane.placed):
            tap.before_block = at(n.resid_pre)
        run = Run(layout.columns[None], None, tap=tap)
        enter = _enter_parallel if block.parallel else _enter_sequential
        edits_mlp = any(_edits_mlp(lane, n.layer, self.clean.model.config) for lane in lanes)
        return Flat(layout, enter(block, stage, at, run, edits_mlp))


def _edits_mlp(lane: Lane, layer: int, config: GPTConfig) -> bool:
    stages = entries(config)
    return any(Stage.MID <= stages[placed.name][1] < Stage.END for placed in lane.by_layer.get(layer, ()))


def _enter_sequential(block: TransformerBlock, stage: Stage, at: At, run: Run, _: bool) -> Tensor:
    """The stream after a sequential block, from clean values up to the stage."""
    n = block.names
    if stage is Stage.END:
        return run.tap(n.resid_post, at(n.resid_post))
    if stage is Stage.HEADS:
        return block.from_attn_out(at(n.resid_pre), _attn_out(block, at, run), run)
    mid = at(n.resid_mid)
    if stage is Stage.MID:
        return block.from_resid_mid(mid, run)
    return block.from_mlp_out(mid, _mlp_out(block, stage, at, run), run)


def _enter_parallel(block: TransformerBlock, stage: Stage, at: At, run: Run, edits_mlp: bool) -> Tensor:
    """The same of a block whose two branches read the same stream, so that one may stay clean."""
    n = block.names
    if stage is Stage.END:
        return run.tap(n.resid_post, at(n.resid_post))
    x = at(n.resid_pre)
    attn_out = _attn_out(block, at, run) if stage is Stage.HEADS else at(n.attn_out)
    if stage is Stage.MID or (stage is Stage.HEADS and edits_mlp):
        mlp_out = block.mlp_branch(x, run, block.normalised(x) if block.ln2 is None else None)
    elif stage is Stage.HEADS:
        mlp_out = at(n.mlp_out)
    else:
        mlp_out = _mlp_out(block, stage, at, run)
    return run.tap(n.resid_post, x + attn_out + mlp_out)


def _attn_out(block: TransformerBlock, at: At, run: Run) -> Tensor:
    z = run.tap(block.names.z, at(block.names.z))
    return block.attention_write(block.attn.combine(z, block.names, run), run)


def _mlp_out(block: TransformerBlock, stage: Stage, at: At, run: Run) -> Tensor:
    n = block.names
    if stage is Stage.OUT:
        return run.tap(n.mlp_out, at(n.mlp_out))
    assert block.mlp is not None
    return block.mlp_write(block.mlp.write(at(n.post), n, run.tap), run)


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


def _read_out(clean: Clean, stream: Flat, read: Tensor | None) -> Changed:
    layout, norm = stream.layout, clean.model.ln_final
    tap = LaneTap([layout], None, clean.captured)
    final = stream.x
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
