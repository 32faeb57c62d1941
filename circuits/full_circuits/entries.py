"""The largest entries of a factored matrix that is too large to multiply out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.factored import FactoredMatrix
from circuits.validity import require_whole

# Entries of a block: on a CPU it should stay in the cache between the product and the search, but threads that meet
# after every block should not meet too often either.
_BLOCK_ON_CPU, _BLOCK_ELSEWHERE = 2**20, 2**25
_ROWS = 256
ORDERS = ("value", "magnitude", "lowest")


@dataclass(frozen=True, eq=False)
class TopEntries:
    """Entries of a matrix, the first in order first.

    Attributes:
        rows: Row of each entry.
        columns: Column of each entry.
        values: The entries themselves.
        by: What they are the first by: ``"value"``, ``"magnitude"`` or ``"lowest"``.
    """

    rows: Int[Tensor, " entry"]
    columns: Int[Tensor, " entry"]
    values: Float[Tensor, " entry"]
    by: str

    def __len__(self) -> int:
        return len(self.values)


@torch.no_grad()
def top_entries(matrix: FactoredMatrix, k: int = 20, by: str = "value") -> TopEntries:
    """The k largest entries of ``A @ B``, never holding more than a block of it.

    With the factors balanced (``U √S`` and ``√S Vᵀ``) and their rows and columns in descending order of length, no
    entry exceeds the product of the two lengths: once k entries are known, what cannot exceed the least of them is not
    computed. The search is exhaustive otherwise, so that the result is exact up to rounding.

    Args:
        matrix: One matrix ``[m n]``, without leading axes.
        k: How many entries; all of them where there are fewer.
        by: ``"value"`` for the largest, ``"lowest"`` for the smallest, ``"magnitude"`` for the largest ``|entry|``.

    Raises:
        ValueError: Leading axes, k below 1, an unknown order, or entries that are not finite.
    """
    if not isinstance(matrix, FactoredMatrix):
        raise TypeError(f"expected a FactoredMatrix, not {type(matrix).__name__}")
    if matrix.ndim != 2:
        raise ValueError(f"expected one matrix [m n] to search, got shape {list(matrix.shape)}; index a head first")
    k = require_whole("k", k)
    if by not in ORDERS:
        raise ValueError(f"by {by!r} is not one of {', '.join(map(repr, ORDERS))}")
    U, S, Vh = matrix.detach().svd()
    left, right = U * S.sqrt() * (-1.0 if by == "lowest" else 1.0), Vh * S.sqrt()[:, None]
    row_order, row_lengths = _by_length(left)
    column_order, column_lengths = _by_length(right.mT)
    search = _Search(min(k, matrix.ldim * matrix.rdim), by == "magnitude", left.new_empty(0))
    _scan(left[row_order], right[:, column_order].contiguous(), row_lengths, column_lengths, search)
    rows, columns = row_order[search.rows], column_order[search.columns]
    A, B = matrix.A.detach().to(S.dtype), matrix.B.detach().to(S.dtype)
    values = (A[rows] * B[:, columns].mT).sum(-1)
    key = {"value": values, "lowest": -values, "magnitude": values.abs()}[by]
    order = key.argsort(descending=True, stable=True)
    return TopEntries(rows[order], columns[order], values[order], by)


def _by_length(rows: Float[Tensor, "n r"]) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    lengths, order = torch.linalg.vector_norm(rows, dim=-1).sort(descending=True)
    return order, lengths


class _Search:
    """The k best entries so far, and the least of them."""

    def __init__(self, k: int, magnitude: bool, like: Tensor) -> None:
        self.k, self.magnitude = k, magnitude
        self.values = like
        self.rows = self.columns = like.new_empty(0, dtype=torch.long)
        self.least = float("-inf")

    def offer(self, block: Tensor, first_row: int, first_column: int) -> None:
        """Keep what belongs to the best; the block is overwritten."""
        if self.magnitude:
            block.abs_()
        # NaN compares as false, and a matrix with NaN has been refused by its SVD.
        if float(block.max()) <= self.least:
            return
        flat = block.flatten()
        if len(self.values) < self.k:
            values, places = flat.topk(min(self.k, len(flat)))
        else:
            places = (flat > self.least).nonzero().flatten()
            values = flat[places]
        width = block.shape[1]
        rows = torch.cat([self.rows, first_row + places // width])
        columns = torch.cat([self.columns, first_column + places % width])
        self.values, best = torch.cat([self.values, values]).topk(min(self.k, len(rows)))
        self.rows, self.columns = rows[best], columns[best]
        if len(self.values) == self.k:
            self.least = float(self.values[-1])


def _scan(left: Tensor, right: Tensor, row_lengths: Tensor, column_lengths: Tensor, search: _Search) -> None:
    """Offer every block whose entries could be among the best; rows and columns come longest first."""
    entries = _BLOCK_ON_CPU if left.device.type == "cpu" else _BLOCK_ELSEWHERE
    ascending = column_lengths.flip(0)
    width = max(1, entries // min(_ROWS, len(left)))
    for first_row in range(0, len(left), _ROWS):
        rows = left[first_row : first_row + _ROWS]
        longest = float(row_lengths[first_row])
        reachable = right.shape[1]
        if search.least > 0:
            # A little below the bound, which is rounded as the entries are.
            bound = search.least * (1 - 1e-5) / longest if longest else float("inf")
            reachable -= int(torch.searchsorted(ascending, ascending.new_tensor(bound)))
        if not reachable:
            return
        for first_column in range(0, reachable, width):
            block = rows @ right[:, first_column : min(first_column + width, reachable)]
            search.offer(block, first_row, first_column)
