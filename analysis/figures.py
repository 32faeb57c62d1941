"""Plotly figures of results: each draws a field as it is and computes nothing.

A result knows the names of its axes, so one function draws any field over two axes, one any field over one axis, and
one a family of lines. `at` fixes the axes that are not drawn::

    heatmap(attention_patterns(model, tokens), "pattern", at={"batch": 0, "layer": 2, "head": 3})
    heatmap(head_scores(model), "induction")
    lines(head_ranks(model), "singular_values", at={"circuit": "OV"})
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from analysis.results import Result, label_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from torch import Tensor

# Attention and other weights from 0 up; effects and scores on both sides of 0.
SEQUENTIAL = "Blues"
DIVERGING = "RdBu_r"
MOST_LINES = 64

At = Mapping[str, int | str]


def heatmap(result: Result, field: str, at: At | None = None, **labels: Sequence[str]) -> go.Figure:
    """A field over two axes as a heat map, the first axis downwards.

    Args:
        result: Any result.
        field: Which tensor field.
        at: For each axis that is not drawn, the place or the label to draw it at.
        labels: Texts along an axis, such as ``query=tokens, key=tokens``.

    Raises:
        KeyError: A field, an axis or a label that the result does not have.
        IndexError: A place beyond the end of an axis.
        ValueError: Not two axes are left; the message names them.
    """
    import plotly.graph_objects as go

    values, axes = _chosen(result, field, at or {})
    if len(axes) != 2:
        raise ValueError(_wrong_axes("a heat map", 2, axes))
    down, across = axes
    signed = bool((values < 0).any())
    trace = go.Heatmap(
        z=values.tolist(),
        colorscale=DIVERGING if signed else SEQUENTIAL,
        zmid=0 if signed else None,
        zmin=None if signed else 0,
        colorbar={"title": {"text": field}},
        hovertemplate=f"{down} %{{y}}, {across} %{{x}}<br>{field} %{{z:.4f}}<extra></extra>",
    )
    figure = go.Figure(trace)
    for axis, update in ((across, figure.update_xaxes), (down, figure.update_yaxes)):
        texts = list(labels.get(axis, map(label_text, result.labels(axis))))
        # Places, not texts, are the coordinates: equal tokens must stay apart.
        every = max(len(texts) // 40, 1)
        places = list(range(0, len(texts), every))
        update(title=axis, tickmode="array", tickvals=places, ticktext=[texts[place] for place in places])
    figure.update_yaxes(autorange="reversed")
    return _titled(figure, result, field, at)


def bars(result: Result, field: str, at: At | None = None) -> go.Figure:
    """A field over one axis as bars from zero.

    Raises:
        KeyError, IndexError, ValueError: As for `heatmap`, with one axis left.
    """
    import plotly.graph_objects as go

    values, axes = _chosen(result, field, at or {})
    if len(axes) != 1:
        raise ValueError(_wrong_axes("a bar chart", 1, axes))
    texts = [label_text(label) for label in result.labels(axes[0])]
    figure = go.Figure(go.Bar(x=texts, y=values.tolist(), hovertemplate="%{x}: %{y:.4f}<extra></extra>"))
    figure.update_xaxes(title=axes[0], type="category")
    figure.update_yaxes(title=field)
    return _titled(figure, result, field, at)


def lines(result: Result, field: str, at: At | None = None) -> go.Figure:
    """A field along its last axis, one line for every place on the others.

    Raises:
        KeyError, IndexError: As for `heatmap`.
        ValueError: No axis is left, or more than 64 lines would be drawn; fix more axes.
    """
    import plotly.graph_objects as go

    values, axes = _chosen(result, field, at or {})
    if not axes:
        raise ValueError(_wrong_axes("a line", 1, axes))
    *others, along = axes
    places = list(itertools.product(*(range(size) for size in values.shape[:-1])))
    if len(places) > MOST_LINES:
        raise ValueError(
            f"{len(places)} lines would hide one another (at most {MOST_LINES}); fix one of {others} with at"
        )
    texts = [label_text(label) for label in result.labels(along)]
    figure = go.Figure()
    for place in places:
        named = (f"{axis} {label_text(result.labels(axis)[i])}" for axis, i in zip(others, place, strict=True))
        figure.add_scatter(x=texts, y=values[place].tolist(), mode="lines", name=", ".join(named) or field)
    figure.update_xaxes(title=along)
    figure.update_yaxes(title=field)
    return _titled(figure, result, field, at)


def _chosen(result: Result, field: str, at: At) -> tuple[Tensor, tuple[str, ...]]:
    """The values of a field with some axes fixed, and the names of the axes that are left."""
    axes = result.axes(field)
    for axis in at:
        if axis not in axes:
            raise KeyError(f"{field} has no axis {axis!r}; it has {', '.join(axes)}")
    index = tuple(_place(result, axis, at[axis]) if axis in at else slice(None) for axis in axes)
    values: Tensor = getattr(result, field)[index].detach().cpu()
    return values.float() if values.is_floating_point() else values, tuple(axis for axis in axes if axis not in at)


def _place(result: Result, axis: str, wanted: int | str) -> int:
    """Where along an axis something lies: a label by its text, anything else by its number."""
    texts = [label_text(label) for label in result.labels(axis)]
    if isinstance(wanted, str):
        if wanted not in texts:
            raise KeyError(f"axis {axis} has no label {wanted!r}; it has {', '.join(texts)}")
        return texts.index(wanted)
    if not -len(texts) <= wanted < len(texts):
        raise IndexError(f"{axis} {wanted} is not on an axis of {len(texts)} (0 to {len(texts) - 1})")
    return wanted


def _wrong_axes(what: str, needed: int, axes: Sequence[str]) -> str:
    listed = ", ".join(axes) or "none"
    return f"{what} draws {needed} {'axis' if needed == 1 else 'axes'}, but these are left: {listed}; fix some with at"


def _titled(figure: go.Figure, result: Result, field: str, at: At | None) -> go.Figure:
    where = ", ".join(f"{axis} {place}" for axis, place in (at or {}).items())
    layout: dict[str, Any] = {"template": "plotly_white", "margin": {"l": 60, "r": 20, "t": 50, "b": 50}}
    figure.update_layout(title=f"{type(result).__name__}: {field}" + (f" at {where}" if where else ""), **layout)
    return figure
