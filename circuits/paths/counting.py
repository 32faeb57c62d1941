"""How many paths and suffixes there are, without listing them."""

from __future__ import annotations

from dataclasses import dataclass

from circuits.paths.frozen import FrozenRun

EXACT_DIGITS = 12  # beyond these nobody reads the digits of a count
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def counted(n: int) -> str:
    """A count for readers: in full up to twelve digits, beyond them ``1.111·10³⁰``."""
    if n < 10**EXACT_DIGITS:
        return f"{n:,}"
    power = len(str(n)) - 1
    leading = f"{n // 10 ** (power - 3) / 1000:.3f}"  # whole numbers: a float overflows past 10³⁰⁸
    return f"{leading}·10{str(power).translate(_RAISED)}"


@dataclass(frozen=True)
class Counts:
    """Sizes of a full expansion.

    Attributes:
        paths: Paths in all.
        expansions: Suffixes that have heads below them, the empty one included: what a full enumeration has to expand.
    """

    paths: int
    expansions: int


def count(run: FrozenRun, n_constants: int) -> Counts:
    """Count the paths of a frozen run; ``n_constants`` of them touch no stream (the final norm's shift, `b_U`)."""
    paths, suffixes, expansions = len(run.leaves) + n_constants, 1, 1
    for depth in reversed(range(len(run.layers))):
        layer = run.layers[depth]
        through = suffixes * layer.pattern.shape[1]
        paths += through * (layer.n_leaves + len(layer.biases))
        suffixes += through
        expansions += through if depth > 0 else 0
    return Counts(paths, expansions)
