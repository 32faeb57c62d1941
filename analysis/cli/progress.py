"""Showing what a command is at, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Show the current step where standard error is a terminal.

    Args:
        doing: What is done to each step: ``"measuring"``.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status("…") as status:
        yield lambda step: status.update(f"{doing} {step} …")
