"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 10_000
WIDE = 180  # columns where the output is no terminal, so that nothing is cut off in a file
MISSING = "–"


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON document. A number that is not finite, which JSON lacks, is printed as null."""
    from analysis.results import jsonable

    unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    print(json.dumps(jsonable(data), indent=2, ensure_ascii=not unicode, allow_nan=False))


def print_table(title: str, rows: Iterable[Mapping[str, Any]], formats: Mapping[str, str] | None = None) -> None:
    """Print rows: text to the left, numbers to the right.

    Args:
        title: What the table shows, with units.
        rows: Column to value, the same columns in every row; a result's ``rows()`` are such.
        formats: From a column to a format specification such as ``".2%"``; other floats get three decimals.
    """
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table(header_style="dim", box=None, pad_edge=False)
    for name in rows[0] if rows else ():
        numeric = all(isinstance(row[name], int | float) or row[name] is None for row in rows)
        table.add_column(str(name), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell(value, (formats or {}).get(name))) for name, value in row.items()))
    show = console()
    # Never narrower than its columns: a terminal folds a long line, while a number that is cut short is lost.
    show.width = max(show.width, Measurement.get(show, show.options.update(max_width=WIDEST), table).maximum)
    # In a file a title is one line, however long: whoever reads it there cannot unfold it.
    show.print(Text(title, style="bold"), soft_wrap=not show.is_terminal)
    show.print(table)
    show.print()


def console() -> Console:
    """A console on standard output, wide enough for every column where that is not a terminal."""
    from rich.console import Console

    terminal = sys.stdout is not None and sys.stdout.isatty()
    return Console(file=sys.stdout or io.StringIO(), width=None if terminal else WIDE, highlight=False)


def cell(value: Any, specification: str | None = None) -> str:
    """A value as a table shows it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return MISSING
    if specification is not None:
        return format(value, specification)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
