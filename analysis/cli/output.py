"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

WIDE = 160  # columns where the output is no terminal, so that nothing is cut off in a file


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON document. A number that is not finite, which JSON lacks, is printed as null."""
    print(json.dumps(_plain(data), indent=2, ensure_ascii=False, allow_nan=False))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as plain values, for `print_json`."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def print_table(title: str, frame: pd.DataFrame, formats: Mapping[str, str] | None = None) -> None:
    """Print a frame: text to the left, numbers to the right.

    Args:
        title: What the table shows, with units.
        frame: The rows.
        formats: From a column to a format specification such as ``".2f"``; other floats get three decimals.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    numeric = {name: frame[name].dtype.kind in "iufb" for name in frame.columns}
    for name in frame.columns:
        table.add_column(str(name), justify="right" if numeric[name] else "left")
    for row in frame.itertuples(index=False):
        cells = zip(frame.columns, row, strict=True)
        table.add_row(*(Text(_cell(value, (formats or {}).get(name))) for name, value in cells))
    console().print(table)


def console() -> Console:
    """A console on standard output, wide enough for every column where that is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)


def _cell(value: Any, specification: str | None) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if specification is not None:
        return format(value, specification)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Built-in types only: numpy scalars unwrapped, what is not finite as None."""
    if hasattr(value, "item") and not isinstance(value, Mapping | Sequence):
        value = value.item() if getattr(value, "ndim", 0) == 0 else value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
