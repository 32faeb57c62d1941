"""What every result shares: named axes, a tidy table, JSON, and a repr that can be read.

A result is a frozen dataclass whose tensor fields are annotated with jaxtyping. The annotation is the only place where
an axis is named::

    @result
    class CompositionScores(Result):
        score: Float[Tensor, "layer head layer2 head2"]
        kind: str

    scores.to_frame()          # columns layer, head, layer2, head2, score: one row per cell

An axis is numbered from 0, unless the result has a field of labels for it: a field ``components`` labels the axis
``component`` (and ``component2``), a field ``circuits`` the axis ``circuit``. Labels that are components also give the
table their ``layer``, ``head`` and ``neuron`` columns. The axis ``bound`` (the two ends of an interval) is laid out as
columns instead of rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import AbstractArray
from torch import Tensor

from circuits.components import Component

if TYPE_CHECKING:
    import pandas as pd

BOUNDS = ("low", "high")
# Column of a table -> attribute of a component that fills it.
_PARTS = {"layer": "layer", "head": "head", "neuron": "index"}
_ROWS_IN_REPR = 6
_ROWS_IN_HTML = 20

# What an axis may be labelled with; a tuple of components is a set that was treated together.
Label = Component | tuple[Component, ...] | str | int | float
Column = npt.NDArray[Any]
R = TypeVar("R", bound="Result")


@typing.dataclass_transform(frozen_default=True, eq_default=False, kw_only_default=True)
def result(cls: type[R]) -> type[R]:
    """Make a subclass of `Result` a frozen, keyword-only dataclass with identity comparison and the shared repr."""
    made = dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)(cls)
    made._axes = _annotated_axes(made)
    return made


class Result:
    """Base of every result; use with the `result` decorator.

    Raises:
        ValueError: Two fields give one axis different lengths, or an axis has another number of labels than cells.
    """

    # Fields of the default table; empty: those over the axes of the first tensor field, or some of them.
    table: ClassVar[tuple[str, ...]] = ()
    # What rows a repr shows, said where there is no room for all.
    preview: ClassVar[str] = ""
    # Axis -> field of its labels, where that is not the axis with an "s".
    label_fields: ClassVar[Mapping[str, str]] = {}
    _axes: ClassVar[dict[str, tuple[str, ...]]]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # the decorator makes every subclass one

    def __post_init__(self) -> None:
        sizes: dict[str, tuple[int, str]] = {}
        for field, axes in self._tensors().items():
            tensor = getattr(self, field)
            if tensor.ndim != len(axes):
                shape = list(tensor.shape)
                raise ValueError(f"{type(self).__name__}.{field} has axes [{' '.join(axes)}], but its shape is {shape}")
            for axis, size in zip(axes, tensor.shape, strict=True):
                known, where = sizes.setdefault(axis, (size, field))
                if known != size:
                    raise ValueError(f"axis {axis} has length {known} in {where}, but {size} in {field}")
        for axis, (size, _) in sizes.items():
            labels = self._given_labels(axis)
            if labels is not None and len(labels) != size:
                raise ValueError(f"axis {axis} has length {size}, but {len(labels)} labels")

    def axes(self, field: str) -> tuple[str, ...]:
        """The axis names of a tensor field.

        Raises:
            KeyError: No such tensor field; the message lists those there are.
        """
        tensors = self._tensors()
        if field not in tensors:
            raise KeyError(f"{type(self).__name__} has no tensor field {field!r}; it has {', '.join(tensors)}")
        return tensors[field]

    def labels(self, axis: str) -> Sequence[Label]:
        """The labels along an axis: those the result was given, else the numbers from 0.

        Raises:
            KeyError: No field has this axis.
        """
        given = self._given_labels(axis)
        if given is not None:
            return given
        if axis == "bound":
            return BOUNDS
        for field, axes in self._tensors().items():
            if axis in axes:
                return range(getattr(self, field).shape[axes.index(axis)])
        known = sorted({axis for axes in self._tensors().values() for axis in axes})
        raise KeyError(f"{type(self).__name__} has no axis {axis!r}; it has {', '.join(known)}")

    def to_frame(self, *fields: str) -> pd.DataFrame:
        """A tidy table: one row per cell, the axes first.

        Args:
            fields: The tensor fields to show, over the axes that they have between them; a field that lacks an axis is
                repeated along it. By default the fields of the main table.
        """
        import pandas as pd

        columns = self.columns(*fields)
        # Components of one result may differ in kind: an MLP has no head, and pandas' own integers can say so.
        gaps = {name: "Int64" for name in columns if name.startswith(tuple(_PARTS)) and columns[name].dtype == object}
        return pd.DataFrame(columns).astype(gaps)

    def columns(self, *fields: str) -> dict[str, Column]:
        """The columns of `to_frame`, as arrays of one length."""
        chosen = fields or self._table_fields()
        axes = self._row_axes(*chosen)
        shape = tuple(len(self.labels(axis)) for axis in axes)
        table: dict[str, Column] = {}
        for place, axis in enumerate(axes):
            index = np.indices(shape, sparse=True)[place]
            for name, values in _label_columns(axis, self.labels(axis)).items():
                table[name] = np.broadcast_to(values[index], shape).ravel()
        for field in chosen:
            for name, values, own in _value_columns(field, getattr(self, field), self.axes(field)):
                table[name] = _spread_out(values, own, axes, shape)
        return table

    def rows(self, *fields: str) -> Iterator[dict[str, Any]]:
        """The rows of `to_frame` as plain dictionaries."""
        table = self.columns(*fields)
        for cells in zip(*(column.tolist() for column in table.values()), strict=True):
            yield dict(zip(table, cells, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """The whole result as JSON data: every field, the axes of the tensors, NaN and infinities as null."""
        data: dict[str, Any] = {"type": type(self).__name__}
        for field in dataclasses.fields(self):
            data[field.name] = jsonable(getattr(self, field.name))
        data["axes"] = {field: list(axes) for field, axes in self._tensors().items()}
        return data

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def title(self) -> str:
        """One line that says what this is; shown first by the repr."""
        plain = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), bool | int | float | str)
        }
        settings = ", ".join(f"{name} {_cell(value)}" for name, value in plain.items())
        return f"{type(self).__name__}: {settings}" if settings else type(self).__name__

    def __repr__(self) -> str:
        shapes: dict[str, list[str]] = {}
        for field, axes in self._tensors().items():
            sizes = zip(axes, getattr(self, field).shape, strict=True)
            shapes.setdefault(" × ".join(f"{axis} {size}" for axis, size in sizes), []).append(field)
        lines = [f"  {', '.join(fields)} [{shape}]" for shape, fields in shapes.items()]
        rows = _text_table(self.columns(), self._previewed()[:_ROWS_IN_REPR], self.preview)
        return "\n".join([self.title(), *lines, *rows])

    def _repr_html_(self) -> str:
        import html

        frame = self.to_frame()
        shown = frame.iloc[[row for row in self._previewed()[:_ROWS_IN_HTML] if row < len(frame)]]
        more = f"<p>… {len(frame)} rows in all{self.preview}</p>" if len(frame) > len(shown) else ""
        return f"<p>{html.escape(self.title())}</p>{shown.to_html(index=False, na_rep='–')}{more}"

    def _previewed(self) -> Sequence[int]:
        """Which rows of the main table the repr shows, as far as it has room: the first ones, unless a result says."""
        return range(_ROWS_IN_HTML)

    def _tensors(self) -> dict[str, tuple[str, ...]]:
        """Tensor fields that are not None, with their axes."""
        return {name: axes for name, axes in self._axes.items() if getattr(self, name) is not None}

    def _table_fields(self) -> tuple[str, ...]:
        tensors = self._tensors()
        if self.table:
            return tuple(field for field in self.table if field in tensors)
        widest = set(next(iter(tensors.values())))
        return tuple(field for field, axes in tensors.items() if set(axes) <= widest)

    def _row_axes(self, *fields: str) -> tuple[str, ...]:
        """The axes whose cells are the rows of a table of these fields."""
        chosen = fields or self._table_fields()
        return tuple(dict.fromkeys(axis for field in chosen for axis in self.axes(field) if axis != "bound"))

    def _given_labels(self, axis: str) -> Sequence[Label] | None:
        stem = re.sub(r"\d+$", "", axis)
        for name in (self.label_fields.get(axis), f"{axis}s", f"{stem}s"):
            if name is not None and name not in self._tensors():
                labels: Sequence[Label] | None = getattr(self, name, None)
                if labels is not None and not callable(labels):
                    return labels
        return None


def _annotated_axes(cls: type[Result]) -> dict[str, tuple[str, ...]]:
    """From each tensor field of a result class to its axis names, read from the jaxtyping annotation."""
    hints = typing.get_type_hints(cls)
    found: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        for option in typing.get_args(hint) or (hint,):
            if isinstance(option, type) and issubclass(option, AbstractArray):
                found[field.name] = tuple(option.dim_str.split())
    return found


def label_text(label: Label) -> str:
    """``L2H3`` for a component, ``L2H3+L4H0`` for components that were treated together, else the label's own text."""
    return "+".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _label_columns(axis: str, labels: Sequence[Label]) -> dict[str, Column]:
    """The columns that an axis gives a table, as arrays along that axis."""
    if not any(isinstance(label, Component | tuple) for label in labels):
        plain = list(labels)
        dtype = object if any(isinstance(label, str) for label in plain) else None
        return {axis: np.array(plain, dtype=dtype)}
    columns = {axis: np.array([label_text(label) for label in labels], dtype=object)}
    suffix = axis.removeprefix("component") if axis.startswith("component") else f"_{axis}"
    for part, attribute in _PARTS.items():
        values = [getattr(label, attribute, None) if isinstance(label, Component) else None for label in labels]
        if any(value is not None for value in values):
            whole = all(value is not None for value in values)
            columns[f"{part}{suffix}"] = np.array(values, dtype=int if whole else object)
    return columns


def _value_columns(field: str, tensor: Tensor, axes: tuple[str, ...]) -> list[tuple[str, Column, tuple[str, ...]]]:
    """(name, values, axes) of each column of a field: one, or one for each end where it has the axis ``bound``."""
    values = tensor.detach().cpu()
    values = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).resolve_conj()
    if "bound" not in axes:
        return [(field, values.numpy(), axes)]
    place = axes.index("bound")
    rest = tuple(axis for axis in axes if axis != "bound")
    return [(f"{field}_{end}", values.select(place, i).numpy(), rest) for i, end in enumerate(BOUNDS)]


def _spread_out(values: Column, own: tuple[str, ...], axes: tuple[str, ...], shape: tuple[int, ...]) -> Column:
    """Values over their own axes, repeated over all axes of the table, as one column."""
    ordered = values.transpose([own.index(axis) for axis in axes if axis in own])
    aligned = ordered.reshape([size if axis in own else 1 for axis, size in zip(axes, shape, strict=True)])
    return np.broadcast_to(aligned, shape).ravel()


def _cell(value: object) -> str:
    if value is None or value != value:  # NaN is the one number that is not itself
        return "–"
    return f"{value:.4g}" if isinstance(value, float | complex) else str(value)


def _text_table(columns: Mapping[str, Column], rows: Sequence[int], which: str = "") -> list[str]:
    """Some rows of a table as aligned text, and how many there are where some are left out."""
    total = len(next(iter(columns.values())))
    chosen = [row for row in rows if row < total]
    body = [[_cell(value) for value in column[chosen].tolist()] for column in columns.values()]
    widths = [max(map(len, [name, *cells])) for name, cells in zip(columns, body, strict=True)]
    lines = ["  ".join(name.rjust(width) for name, width in zip(columns, widths, strict=True))]
    for row in zip(*body, strict=True):
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if total > len(chosen):
        lines.append(f"… {total} rows in all{which}")
    return [f"  {line}" for line in lines]


def jsonable(value: Any) -> Any:
    """A value as JSON data: tensors as nested lists, complex numbers as pairs, NaN and infinities as None."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return jsonable(value.tolist())
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, complex):
        return [jsonable(value.real), jsonable(value.imag)]
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, Component):
        return str(value)
    if isinstance(value, tuple | list | range):
        return [jsonable(item) for item in value]
    converter: Callable[[], Any] | None = getattr(value, "to_dict", None)
    return jsonable(converter()) if converter is not None else str(value)
