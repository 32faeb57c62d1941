"""Applying each lane's edits to its own cells of a flat activation."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from circuits.hooks import Tap
from circuits.rerun.edits import is_attention_matrix, part_of
from circuits.rerun.intervention import Placed
from circuits.rerun.layout import Layout, Part

# What the attention makes of a changed value, so that no edit can leak the future.
Settle = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Grid:
    """Rows × positions, every cell of them.

    Attributes:
        name: The hook name.
        captured: The clean run.
        index: The head or neuron that is edited, or None.
        rows: Row of the batch, ``[row]``.
        columns: Position, ``[1 pos]`` or ``[row pos]``.
        ndim: Axes of the activation (of the head's part).
        n_keys: Keys that this pass reaches, for attention matrices.
    """

    name: str
    captured: Mapping[str, Tensor]
    index: int | None
    rows: Tensor
    columns: Tensor
    ndim: int
    n_keys: int

    def select(self, value: Tensor) -> Tensor:
        """The part of a broadcastable tensor at these cells."""
        value = self._cells_first(value)
        rows = self.rows if len(value) > 1 else self.rows.new_zeros(1)
        columns = self.columns if value.shape[1] > 1 else self.columns.new_zeros(1, 1)
        return value[rows[:, None], columns]

    def clean(self) -> Tensor:
        """The clean run's activation at these cells."""
        return self.select(part_of(self.captured[self.name], self.name, self.index))

    def _cells_first(self, value: Tensor) -> Tensor:
        value = value.to(self.rows.device)
        value = value[(None,) * (self.ndim - value.ndim)]
        if not is_attention_matrix(self.name):
            return value
        if value.shape[-1] > 1:
            value = value[..., : self.n_keys]
        return value if self.index is not None else value.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Scattered(Grid):
    """Single cells: `rows` and `columns` are both ``[cell]``."""

    def select(self, value: Tensor) -> Tensor:
        """The part of a broadcastable tensor at these cells."""
        value = self._cells_first(value)
        shape = (self.rows if len(value) > 1 else 0, self.columns if value.shape[1] > 1 else 0)
        selected = value[shape]
        return selected if selected.ndim == value.ndim - 1 else selected[None]


class LaneTap(Tap):
    """The tap of a flat pass: every lane's edits, on its own cells.

    Args:
        layouts: The layout of the pass; in the last block also that of the positions which are read.
        layer: The block, or None for the embeddings and the final norm.
        captured: The clean run.
        own: Names whose activation nobody else holds, so that it can be edited where it stands.
    """

    __slots__ = ("_by_name", "_captured", "_layouts", "_own", "before_block")

    in_place: ClassVar[bool] = True

    def __init__(
        self,
        layouts: Sequence[Layout],
        layer: int | None,
        captured: Mapping[str, Tensor],
        own: Container[str] = (),
    ) -> None:
        super().__init__()
        self._layouts = {layout.cells: layout for layout in layouts}
        self._captured, self._own = captured, own
        self._by_name: dict[str, list[tuple[int, slice, Placed]]] = {}
        # The stream before the block, for lanes that edit what the whole block adds.
        self.before_block: Tensor | None = None
        for i, part in enumerate(layouts[0].parts):
            for lane, rows in part.lanes:
                for placed in lane.by_layer.get(layer, ()):
                    self._by_name.setdefault(placed.name, []).append((i, rows, placed))

    def __call__(self, name: str, activation: Tensor, settle: Settle | None = None) -> Tensor:
        """The activation with the edits of every lane made."""
        if name.endswith("hook_resid_pre") and name not in self._by_name:
            self.before_block = activation
        if name not in self._by_name:
            return activation
        layout = self._layouts[activation.shape[1]]
        new = activation if name in self._own else activation.clone(memory_format=torch.contiguous_format)
        views = layout.views(new)
        for i, rows, placed in self._by_name[name]:
            part, edited = layout.parts[i], views[i][rows]
            before = self._before(layout, i, rows) if placed.whole_block else None
            apply(edited, placed, part.rows[rows], part.columns_of(rows), self._captured, before)
        if name.endswith("hook_resid_pre"):
            self.before_block = new
        return new if settle is None else settle(new)

    def _before(self, layout: Layout, part: int, rows: slice) -> Tensor:
        assert self.before_block is not None
        flat = self.before_block
        own = self._layouts[flat.shape[1]]
        before = own.views(flat)[part][rows]
        if own is layout or layout.parts[part].read is None:
            return before
        places = layout.parts[part].columns_of(rows) - layout.parts[part].start
        return before[torch.arange(len(places), device=flat.device)[:, None], places]

    @property
    def active(self) -> bool:
        """Whether any lane edits anything here."""
        return bool(self._by_name)

    def touches(self, *names: str) -> bool:
        """Whether any lane edits any of these."""
        return any(name in self._by_name for name in names)

    def edits(self, *names: str) -> bool:
        """Whether any lane edits any of these."""
        return self.touches(*names)

    def of_part(self, part: Part, i: int) -> PartTap | None:
        """The tap inside the attention of one part, where any of its lanes edits there."""
        found: dict[str, list[tuple[slice, Placed]]] = {}
        for name, entries in self._by_name.items():
            if is_attention_matrix(name):
                own = [(rows, placed) for number, rows, placed in entries if number == i]
                if own:
                    found[name] = own
        return PartTap(part, found, self._captured) if found else None


class PartTap(Tap):
    """The tap of one part's scores and pattern, ``[stack head query key]``."""

    __slots__ = ("_by_name", "_captured", "_part")

    def __init__(
        self, part: Part, by_name: Mapping[str, list[tuple[slice, Placed]]], captured: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self._part, self._by_name, self._captured = part, by_name, captured

    def __call__(self, name: str, activation: Tensor, settle: Settle | None = None) -> Tensor:
        """The activation with the edits of every lane made."""
        if name not in self._by_name:
            return activation
        new = activation.clone(memory_format=torch.contiguous_format)
        for rows, placed in self._by_name[name]:
            part, view = self._part, new[rows].transpose(1, 2)
            apply(view, placed, part.rows[rows], part.columns_of(rows), self._captured)
        return new if settle is None else settle(new)

    def touches(self, *names: str) -> bool:
        """Whether any lane edits any of these."""
        return any(name in self._by_name for name in names)

    def edits(self, *names: str) -> bool:
        """Whether any lane edits any of these."""
        return self.touches(*names)


def apply(
    activation: Tensor,
    placed: Placed,
    rows: Tensor,
    columns: Tensor,
    captured: Mapping[str, Tensor],
    before: Tensor | None = None,
) -> None:
    """Make an edit in place.

    Args:
        activation: One lane's part of a flat activation, ``[row pos …]``, cells first for attention matrices too.
        placed: The edit.
        rows: Row of the batch, ``[row]``.
        columns: Position, ``[1 pos]`` or ``[row pos]``.
        captured: The clean run.
        before: The stream before the block, where what is edited is all that the block adds to it.
    """
    view = activation if placed.index is None else activation.select(2, placed.index)
    if placed.edit.constant is not None and placed.where is None and before is None:
        view.fill_(placed.edit.constant)
        return
    if before is not None:
        view.sub_(before)
    _edit_view(view, placed, rows, columns, captured)
    if before is not None:
        view.add_(before)


def _edit_view(view: Tensor, placed: Placed, rows: Tensor, columns: Tensor, captured: Mapping[str, Tensor]) -> None:
    index, edit = placed.index, placed.edit
    grid = Grid(placed.name, captured, index, rows, columns, view.ndim, view.shape[-1])
    hit = None if placed.where is None else placed.where[rows[:, None], columns]
    if hit is None or bool(hit.all()):
        view.copy_(_checked(edit.new(view, grid), view, grid))
    elif edit.pointwise:
        i, j = hit.nonzero(as_tuple=True)
        old = view[i, j]
        own = columns[0, j] if len(columns) == 1 else columns[i, j]
        cells = Scattered(placed.name, captured, index, rows[i], own, view.ndim, view.shape[-1])
        view[i, j] = _checked(edit.new(old, cells), old, cells).expand_as(old).to(old)
    else:
        i = hit.any(1).nonzero()[:, 0]
        if not len(i):
            return
        counts = hit[i].sum(1)
        if bool((counts != counts[0]).any()):
            raise ValueError(
                f"the function on {placed.name} is given [row position …], so it needs as many positions in every row; "
                f"the intervention names {counts.tolist()}"
            )
        j = torch.stack([hit[row].nonzero()[:, 0] for row in i])
        old = view[i[:, None], j]
        own = (columns.expand(hit.shape))[i[:, None], j]
        piece = Grid(placed.name, captured, index, rows[i], own, view.ndim, view.shape[-1])
        view[i[:, None], j] = _checked(edit.new(old, piece), old, piece)


def _checked(new: Tensor, old: Tensor, cells: Grid) -> Tensor:
    """The new value, if it can stand in place of the old one."""
    if not (new.ndim == 0 or new.shape == old.shape or _broadcasts(new.shape, old.shape)):
        raise ValueError(
            f"the value put at {cells.name} has shape {list(new.shape)} at the cells to change, "
            f"expected {list(old.shape)}"
        )
    return new


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    try:
        return bool(torch.broadcast_shapes(shape, to) == to)
    except RuntimeError:
        return False
