"""What an ablation does, in words: for titles and plans."""

from __future__ import annotations

from collections.abc import Sequence

KNOCK_OUT = "knock-out"
# Positions that a sentence lists one by one.
_LISTED = 8


def when(method: str, replacement: str, what: str = "a component") -> str:
    """What is done, as the clause behind "when"."""
    return f"a head {replacement}" if method == KNOCK_OUT else f"{what} is replaced by {replacement}"


def replacement_in_words(method: str, per_position: bool, with_reference: bool) -> str:
    """What stands in place of a write."""
    if method == "mean":
        return f"its mean over the reference, {'per position' if per_position else 'over all positions'}"
    if method == "resample":
        return f"its write on another prompt of the {'reference' if with_reference else 'batch'}"
    return "nothing"


def cut_in_words(keys: Sequence[int], queries: Sequence[int] | None) -> str:
    """Between which positions attention is cut: ``may not look from position −1 at position 4``."""
    if queries is None:
        return f"may not look at {_positions(keys)}"
    return f"may not look from {_positions(queries)} at {_positions(keys)}"


def _positions(at: Sequence[int]) -> str:
    named = [str(position).replace("-", "−") for position in at]
    if len(named) == 1:
        return f"position {named[0]}"
    if len(named) > _LISTED:
        return f"{len(named)} positions ({named[0]}, {named[1]}, … {named[-1]})"
    return f"positions {', '.join(named[:-1])} and {named[-1]}"


def counted(count: int, thing: str) -> str:
    """``1 pair``, ``2 pairs``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
