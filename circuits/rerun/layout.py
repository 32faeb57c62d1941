"""Lanes laid end to end: which cell of the flat stream ``[1 cell d_model]`` is which row and position of which lane.

A lane is one what-if: the rows it can change, from the first position it can change on. Lanes that begin at the same
position are stacked into a part, and parts follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from circuits.names import layer_of
from circuits.rerun.edits import is_attention_matrix
from circuits.rerun.intervention import Placed
from circuits.rerun.stages import Entry


@dataclass(frozen=True, eq=False)
class Lane:
    """One set of interventions, and what it can change.

    Attributes:
        number: Which of the sets it is.
        placed: Its changes, in the order in which they apply.
        entry: Where its pass begins.
        start: The first position that can change.
        rows: The rows of the batch that can change.
    """

    number: int
    placed: tuple[Placed, ...]
    entry: Entry
    start: int
    rows: Int[Tensor, " row"]

    @cached_property
    def height(self) -> int:
        """How many rows."""
        return len(self.rows)

    @cached_property
    def edits_attention(self) -> bool:
        """Whether scores or patterns are edited, so that they must be formed."""
        return any(is_attention_matrix(placed.name) for placed in self.placed)

    @cached_property
    def by_layer(self) -> Mapping[int | None, list[Placed]]:
        """Its changes by layer; None for the embeddings and the final norm."""
        found: dict[int | None, list[Placed]] = {}
        for placed in self.placed:
            found.setdefault(layer_of(placed.name), []).append(placed)
        return found


@dataclass(frozen=True, eq=False)
class Part:
    """Lanes that begin at one position, their rows stacked.

    Attributes:
        start: That position.
        stop: One past the last.
        lanes: The lanes and which rows of the stack are theirs.
        rows: Which row of the batch each row of the stack is.
        read: The positions with which each row goes on; None: all from `start` to `stop`.
    """

    start: int
    stop: int
    lanes: tuple[tuple[Lane, slice], ...]
    rows: Int[Tensor, " stack"]
    read: Int[Tensor, "stack slot"] | None = None

    @cached_property
    def columns(self) -> Int[Tensor, "#stack cell"]:
        """Which position each cell is."""
        return torch.arange(self.start, self.stop, device=self.rows.device)[None] if self.read is None else self.read

    def columns_of(self, rows: slice) -> Int[Tensor, "#stack cell"]:
        """The same of some rows of the stack."""
        return self.columns if self.read is None else self.columns[rows]

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows and positions."""
        return len(self.rows), self.stop - self.start if self.read is None else self.read.shape[1]

    @property
    def cells(self) -> int:
        """Rows × positions."""
        return self.shape[0] * self.shape[1]

    def gather(self, clean: Tensor) -> Tensor:
        """The values ``[cell …]`` of the clean run (``[batch pos …]``) at every cell."""
        if self.read is None:
            return clean[:, self.start : self.stop].index_select(0, self.rows).flatten(0, 1)
        return clean[self.rows[:, None], self.read].flatten(0, 1)

    def reading(self, read: Int[Tensor, "batch slot"]) -> Part:
        """The same lanes at the positions that are read, or at the first that can change where those come before it."""
        return replace(self, read=read[self.rows].clamp(min=self.start))


@dataclass(frozen=True, eq=False)
class Layout:
    """Parts end to end."""

    parts: tuple[Part, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each part begins, and where the last one ends."""
        ends = [0]
        for part in self.parts:
            ends.append(ends[-1] + part.cells)
        return ends

    @property
    def cells(self) -> int:
        """Length of the flat axis."""
        return self.offsets[-1]

    @cached_property
    def rows(self) -> Int[Tensor, " cell"]:
        """Row of the batch of each cell."""
        return torch.cat([part.rows.repeat_interleave(part.shape[1]) for part in self.parts])

    @cached_property
    def columns(self) -> Int[Tensor, " cell"]:
        """Position of each cell."""
        return torch.cat([part.columns.expand(part.shape).flatten() for part in self.parts])

    @cached_property
    def lanes(self) -> Int[Tensor, " cell"]:
        """Number of the lane of each cell."""
        numbers = [
            [lane.number for lane, rows in part.lanes for _ in range(rows.start, rows.stop)] for part in self.parts
        ]
        per_part = zip(self.parts, numbers, strict=True)
        return torch.cat([part.rows.new_tensor(n).repeat_interleave(part.shape[1]) for part, n in per_part])

    def gather(self, clean: Tensor) -> Tensor:
        """The values ``[1 cell …]`` of the clean run (``[batch pos …]``) at every cell."""
        pieces = [part.gather(clean) for part in self.parts]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[None]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The cells of each part of a flat activation, ``[stack cell …]``."""
        ends = self.offsets
        return [flat[0, ends[i] : ends[i + 1]].unflatten(0, part.shape) for i, part in enumerate(self.parts)]


@dataclass(frozen=True, eq=False)
class Flat:
    """Activations ``[1 cell …]`` laid out by one layout: what a pass goes on from."""

    layout: Layout
    values: tuple[Tensor, ...]


def lay_out(lanes: Iterable[Lane], stop: int) -> Layout:
    """Lanes as parts, over the positions from where each begins up to `stop`."""
    by_start: dict[int, list[Lane]] = {}
    for lane in lanes:
        by_start.setdefault(lane.start, []).append(lane)
    return Layout(tuple(_stack(start, stacked, stop) for start, stacked in sorted(by_start.items())))


def _stack(start: int, lanes: Sequence[Lane], stop: int) -> Part:
    placed, at = [], 0
    for lane in lanes:
        placed.append((lane, slice(at, at + lane.height)))
        at += lane.height
    rows = torch.cat([lane.rows for lane in lanes])
    return Part(start, stop, tuple(placed), rows)


@dataclass
class _Pile:
    """Parts of several layouts that begin at one position, and the flat activations that hold them, and where."""

    parts: list[Part] = field(default_factory=list)
    places: list[tuple[int, slice]] = field(default_factory=list)

    def add(self, part: Part, place: tuple[int, slice]) -> None:
        self.parts.append(part)
        self.places.append(place)

    def part(self) -> Part:
        first, lanes, height = self.parts[0], [], 0
        for part in self.parts:
            lanes += [(lane, slice(rows.start + height, rows.stop + height)) for lane, rows in part.lanes]
            height += len(part.rows)
        read = None
        if any(part.read is not None for part in self.parts):
            read = torch.cat([part.columns.expand(part.shape) for part in self.parts])
        return Part(first.start, first.stop, tuple(lanes), torch.cat([part.rows for part in self.parts]), read)


def merged(flats: Sequence[Flat]) -> Flat:
    """Several flat activations as one, parts that begin at one position stacked on each other."""
    if len(flats) == 1:
        return flats[0]
    piles: dict[int, _Pile] = {}
    for number, flat in enumerate(flats):
        offsets = flat.layout.offsets
        for i, part in enumerate(flat.layout.parts):
            piles.setdefault(part.start, _Pile()).add(part, (number, slice(offsets[i], offsets[i + 1])))
    ordered = [pile for _, pile in sorted(piles.items())]
    places = [place for pile in ordered for place in pile.places]
    alike = zip(*(flat.values for flat in flats), strict=True)
    values = tuple(torch.cat([each[number][0, cells] for number, cells in places])[None] for each in alike)
    return Flat(Layout(tuple(pile.part() for pile in ordered)), values)
