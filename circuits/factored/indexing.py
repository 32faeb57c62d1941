"""Indexing a product of two factors exactly as PyTorch indexes the dense matrix.

Every entry of `M = A @ B` is an inner product of a row of `A` and a column of `B`, so any index of `M`
splits into an index of the rows of `A` and one of the columns of `B`. PyTorch's own indexing is applied
to both, so the order of axes under advanced indexing is the dense tensor's by construction.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# One entry of a written-out index. None and bool make a new axis; the others consume one axis each.
Entry = None | bool | int | slice | Tensor

_ALL = slice(None)


def index_factors(A: Tensor, B: Tensor, index: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`(A @ B)[index]`, computed from the factors.

    Args:
        A: left factor, `[*batch m r]`.
        B: right factor, `[*batch r n]`, with the same leading axes as `A`.
        index: anything a tensor can be indexed with.

    Returns:
        The two factors of the result where its last two axes are still rows and columns of the matrix
        (sliced, or gathered by a one-dimensional index on one of the two); otherwise the dense result.

    Raises:
        IndexError: an index out of range, too many indices, or an index of a kind no tensor accepts.
    """
    shape = (*A.shape[:-1], B.shape[-1])
    entries = _write_out(index, shape)
    row, column = [i for i, entry in enumerate(entries) if not _is_new_axis(entry)][-2:]
    if _stays_a_matrix(entries, row, column):
        return A[(*entries[:column], _ALL)], B[(*entries[:row], _ALL, entries[column])]
    rows = A.unsqueeze(-2)[(*_without(entries, column), _ALL)]
    columns = B.mT.unsqueeze(-3)[(*_without(entries, row), _ALL)]
    # einsum treats axes of size 1 as belonging to the other operand alone, so this is one matrix product
    # and never holds an array of the result's size times r.
    return torch.einsum("...r,...r->...", rows, columns)


def _stays_a_matrix(entries: list[Entry], row: int, column: int) -> bool:
    on_axes = [entries[row], entries[column]]
    if [row, column] != [len(entries) - 2, len(entries) - 1] or any(isinstance(entry, int) for entry in on_axes):
        return False
    gathered = [entry for entry in entries if isinstance(entry, Tensor | bool)]
    gathered_on_axes = [entry for entry in on_axes if isinstance(entry, Tensor)]
    return not gathered_on_axes or (len(gathered) == 1 and gathered_on_axes[0].ndim == 1)


def _without(entries: list[Entry], position: int) -> list[Entry]:
    """The index for the factor that lacks the axis at `position` (there it has size 1)."""
    entry = entries[position]
    neutral: Entry = _ALL
    if isinstance(entry, Tensor):
        neutral = entry.new_zeros((1,) * entry.ndim)
    elif isinstance(entry, int):
        neutral = 0
    return [*entries[:position], neutral, *entries[position + 1 :]]


def _is_new_axis(entry: Entry) -> bool:
    return entry is None or isinstance(entry, bool)


def _write_out(index: Any, shape: tuple[int, ...]) -> list[Entry]:
    """The index with one entry per axis: ellipsis and missing axes filled in, masks turned into positions."""
    raw = [_parse(item) for item in (index if isinstance(index, tuple) else (index,))]
    used = sum(_axes_used(item) for item in raw)
    if used > len(shape):
        raise IndexError(f"too many indices for a FactoredMatrix of shape {list(shape)}: {used} for {len(shape)} axes")
    if sum(item is Ellipsis for item in raw) > 1:
        raise IndexError("an index can hold only one ellipsis ('...')")
    if not any(item is Ellipsis for item in raw):
        raw.append(Ellipsis)
    entries: list[Entry] = []
    axis = 0
    for item in raw:
        if item is Ellipsis:
            fill = len(shape) - used
            entries.extend([_ALL] * fill)
            axis += fill
        else:
            entries.extend(_checked(item, axis, shape))
            axis += _axes_used(item)
    _check_broadcast(entries)
    return entries


def _parse(item: Any) -> Any:
    """A plain int, bool, slice, None, Ellipsis or index tensor for whatever was written."""
    if item is None or item is Ellipsis or isinstance(item, bool | slice):
        return item
    if not isinstance(item, Tensor):
        try:
            return operator.index(item)
        except TypeError:
            item = _tensor_from(item)
    if item.dtype not in (torch.int64, torch.int32, torch.bool):
        raise IndexError(f"expected index tensors of dtype int64, int32 or bool, got {item.dtype}")
    if item.ndim == 0:
        return item.item()
    return item


def _tensor_from(item: Any) -> Tensor:
    if isinstance(item, str):
        raise IndexError(f"expected ints, slices, None, '...', lists or tensors as indices, got {item!r}")
    try:
        tensor = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise IndexError(
            f"expected ints, slices, None, '...', lists or tensors as indices, got {type(item).__name__}"
        ) from error
    return tensor.long() if tensor.numel() == 0 and isinstance(item, Sequence) else tensor


def _axes_used(item: Any) -> int:
    if item is Ellipsis or _is_new_axis(item):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _checked(item: Any, axis: int, shape: tuple[int, ...]) -> list[Entry]:
    """The entries that `item` stands for at `axis`, refused where they point outside the matrix."""
    if not isinstance(item, Tensor):
        if isinstance(item, int) and not isinstance(item, bool):
            _check_range(item, item, axis, shape)
        return [item]
    if item.dtype == torch.bool:
        if tuple(item.shape) != shape[axis : axis + item.ndim]:
            raise IndexError(
                f"expected a mask of shape {list(shape[axis : axis + item.ndim])} for axis {axis} of a FactoredMatrix "
                f"of shape {list(shape)}, got {list(item.shape)}"
            )
        return list(item.nonzero(as_tuple=True))
    if item.numel():
        low, high = item.aminmax()
        _check_range(int(low), int(high), axis, shape)
    return [item.long()]


def _check_range(low: int, high: int, axis: int, shape: tuple[int, ...]) -> None:
    size = shape[axis]
    if low < -size or high >= size:
        name = {len(shape) - 2: " (rows)", len(shape) - 1: " (columns)"}.get(axis, "")
        raise IndexError(
            f"index {low if low < -size else high} is out of range for axis {axis}{name} of a FactoredMatrix of shape "
            f"{list(shape)}: expected {-size} to {size - 1}"
        )


def _check_broadcast(entries: list[Entry]) -> None:
    shapes = [tuple(entry.shape) for entry in entries if isinstance(entry, Tensor)]
    try:
        torch.broadcast_shapes(*shapes, *((int(entry),) for entry in entries if isinstance(entry, bool)))
    except RuntimeError as error:
        raise IndexError(
            f"expected index tensors that broadcast together, got shapes {[list(s) for s in shapes]}"
        ) from error
