"""How many paths and suffixes there are, without listing them."""

from __future__ import annotations

from dataclasses import dataclass

from circuits.paths.frozen import FrozenRun


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
