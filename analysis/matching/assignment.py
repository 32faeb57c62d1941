"""The best one-to-one assignment between two sets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def best_assignment(gain: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The column of each row such that no column is used twice and the sum of the gains is the largest.

    The Hungarian method with potentials, by shortest augmenting paths: O(rows² · columns) (Kuhn 1955; Jonker and
    Volgenant 1987).

    Args:
        gain: ``[rows columns]``, finite, with at most as many rows as columns.

    Raises:
        ValueError: More rows than columns, or entries that are not finite.
    """
    rows, columns = gain.shape
    if rows > columns:
        raise ValueError(f"expected at most as many rows as columns, got {rows} × {columns}")
    if not np.isfinite(gain).all():
        raise ValueError("expected finite gains")
    # Row and column 0 are a sentinel: `row_of[0]` is the row being placed.
    cost = np.zeros((rows + 1, columns + 1))
    cost[1:, 1:] = -gain
    u, v = np.zeros(rows + 1), np.zeros(columns + 1)
    row_of = np.zeros(columns + 1, dtype=np.int64)
    for row in range(1, rows + 1):
        row_of[0] = row
        _augment(cost, u, v, row_of)
    assigned = np.empty(rows, dtype=np.int64)
    used = np.flatnonzero(row_of[1:])
    assigned[row_of[1:][used] - 1] = used
    return assigned


def _augment(
    cost: npt.NDArray[np.float64],
    u: npt.NDArray[np.float64],
    v: npt.NDArray[np.float64],
    row_of: npt.NDArray[np.int64],
) -> None:
    """Place the row in `row_of[0]` along a shortest alternating path; updates the potentials and `row_of` in place."""
    distance = np.full(len(v), np.inf)
    before = np.zeros(len(v), dtype=np.int64)
    done = np.zeros(len(v), dtype=bool)
    column = 0
    while True:
        done[column] = True
        row = row_of[column]
        reduced = cost[row] - u[row] - v
        closer = ~done & (reduced < distance)
        distance[closer], before[closer] = reduced[closer], column
        nearest = int(np.where(done, np.inf, distance).argmin())
        step = distance[nearest]
        u[row_of[done]] += step
        v[done] -= step
        distance[~done] -= step
        column = nearest
        if row_of[column] == 0:
            break
    while column:
        row_of[column] = row_of[before[column]]
        column = int(before[column])
