"""The tables of the report: cells with numbers, shaded cells, and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from analysis.report.markup import Html, el, join

MINUS, MISSING = "−", "–"
LONG = 100  # rows beyond which a table scrolls by itself, under its heads
THINNEST = 1 / 500  # of the axis: what is thinner than half a pixel has no bar


def number(value: float, specification: str) -> str:
    """A number as people write it: a real minus sign, and a dash where there is none."""
    if math.isnan(value):
        return MISSING
    text = format(value, specification).replace("-", MINUS)
    # What rounds to zero has no sign.
    return text if any(digit in text for digit in "123456789") else text.removeprefix(MINUS).removeprefix("+")


def numeric(value: float, specification: str) -> Html:
    """A cell with a number."""
    return el("td", number(value, specification), class_="num", data_value=_sortable(value))


def shaded(value: float, specification: str, *, full: float, title: str | None = None) -> Html:
    """A cell whose shade grows with a number: none at 0, full at ±`full`; negative ones in another colour."""
    part = 0.0 if math.isnan(value) or not full else min(abs(value) / full, 1.0)
    sign = "neg" if value < 0 else "pos"
    return el(
        "td",
        number(value, specification),
        class_=f"num heat {sign}",
        style=f"--v:{part:.3f}",
        data_value=_sortable(value),
        title=title,
    )


def bar(value: float, *, least: float, most: float) -> Html:
    """A cell with a bar from 0 to a number, on an axis from `least` (at most 0) to `most` (at least 0)."""
    span = (most - least) or 1.0
    if abs(value) < THINNEST * span:
        return el("td", class_="bars", aria_hidden="true")
    start = (min(value, 0.0) - least) / span
    sign = "neg" if value < 0 else "pos"
    style = f"--from:{start:.4f};--size:{abs(value) / span:.4f};--zero:{-least / span:.4f}"
    return el("td", el("span", class_=f"bar {sign}", style=style), class_="bars", aria_hidden="true")


def legend(low: str, high: str, color: str) -> Html:
    """What a shade stands for, from none to full."""
    return el("p", low, el("i", style=f"--ramp:{color}"), high, class_="legend")


def header(text: str, *, title: str | None = None, numbers: bool = True, sort: bool = False, span: int = 1) -> Html:
    """A column's head; with `sort`, the page lets readers order the rows by it."""
    shown = el("button", text, type="button") if sort else text
    span_ = span if span > 1 else None
    scope = "colgroup" if span > 1 else "col"
    return el("th", shown, scope=scope, class_="num" if numbers else None, title=title, colspan=span_)


def row_header(text: str) -> Html:
    """A row's head."""
    return el("th", text, scope="row")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    groups: Sequence[str] = (),
    footer: Sequence[str] = (),
    class_: str | None = None,
) -> Html:
    """A table of ready cells.

    Args:
        columns: The heads of the columns (`header`).
        rows: The cells of each row.
        caption: What the table shows, for readers who come to it by itself.
        groups: Heads that span several columns, above the others.
        footer: The cells of a last row that sums up.
        class_: A class for its style.
    """
    heads = [el("tr", *groups)] if groups else []
    body = [el("tr", *row) for row in rows]
    whole = el(
        "table",
        el("caption", caption),
        el("thead", *heads, el("tr", *columns)),
        el("tbody", join(body)),
        *([el("tfoot", el("tr", *footer))] if footer else []),
        class_=class_,
    )
    scroll = "scroll long" if len(body) > LONG else "scroll"
    return el("div", whole, class_=scroll, tabindex=0, role="region", aria_label=caption)


def _sortable(value: float) -> str | None:
    return None if math.isnan(value) else f"{value:.9g}"
