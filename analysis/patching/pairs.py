"""Two runs of one model, prompt by prompt: which position of one stands for which of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from circuits.config import GPTConfig
from circuits.tokens import check_mask, check_tokens, token_span

DIRECTIONS = {"denoise": "clean into corrupt", "noise": "corrupt into clean"}


@dataclass(frozen=True, eq=False)
class Prompted:
    """One side of a pair: tokens and their padding."""

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """Real tokens of each row."""
        first, last = token_span(self.tokens, self.mask)
        return last - first + 1


@dataclass(frozen=True, eq=False)
class Pair:
    """The run that is patched, the run whose activations are put into it, and how their positions correspond.

    Attributes:
        base: What is patched.
        source: Where the values come from.
        column: For each cell of the base, the column of the source that stands for it.
        patched: The cells whose activations may differ: they have a counterpart, and something before or at them
            differs (with equal tokens up to a position, both runs are the same there).
        there: The cells that have a counterpart.
        direction: ``"denoise"`` where the clean run is the source, ``"noise"`` where it is the base.
    """

    base: Prompted
    source: Prompted
    column: Int[Tensor, "batch pos"]
    patched: Bool[Tensor, "batch pos"]
    there: Bool[Tensor, "batch pos"]
    direction: str

    @property
    def clean(self) -> Prompted:
        """The clean prompts' side, whichever of the two is patched."""
        return self.base if self.direction == "noise" else self.source

    def aligned(self, value: Tensor) -> Tensor:
        """The source's activation ``[batch pos …]`` at the columns of the base."""
        rows = torch.arange(len(value), device=value.device)[:, None]
        return value[rows, self.column]

    def at_position(self, position: int) -> Bool[Tensor, "batch pos"]:
        """The cells of one position, counted over each row's real tokens, that may differ."""
        return self.cells_of(position) & self.patched

    def cells_of(self, position: int) -> Bool[Tensor, "batch pos"]:
        """The cells of one position, counted over each row's real tokens (a negative one from the last).

        None in a row that is shorter.
        """
        first, last = token_span(self.base.tokens, self.base.mask)
        columns = torch.arange(self.base.tokens.shape[1], device=first.device)
        column = (first if position >= 0 else last + 1) + position
        return (columns == column[:, None]) & (columns >= first[:, None]) & (columns <= last[:, None])


def paired(
    config: GPTConfig,
    clean: Tensor,
    corrupt: Tensor,
    direction: str,
    clean_mask: Tensor | None = None,
    corrupt_mask: Tensor | None = None,
    alignment: Sequence[int] | Int[Tensor, "batch pos"] | None = None,
) -> Pair:
    """Settle which run is patched and how positions correspond.

    Args:
        config: The architecture.
        clean: The clean prompts.
        corrupt: The corrupted prompts, row by row.
        direction: ``"denoise"`` puts clean activations into the corrupt run, ``"noise"`` corrupt ones into the clean
            run.
        clean_mask: 1 for tokens, 0 for padding.
        corrupt_mask: Likewise.
        alignment: For each column of `clean` (or each cell ``[batch pos]``) the column of `corrupt` that stands for it,
            −1 for none. By default the n-th token of one stands for the n-th of the other.

    Raises:
        TypeError: An alignment of something else than whole numbers.
        ValueError: A direction that there is not, different numbers of prompts, prompts of different lengths without an
            alignment, or an alignment that is none.
    """
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r} is not one of {', '.join(map(repr, DIRECTIONS))}")
    sides = []
    for tokens, mask in ((clean, clean_mask), (corrupt, corrupt_mask)):
        checked = check_tokens(tokens, config)
        sides.append(Prompted(checked, check_mask(mask, checked)))
    if len(sides[0].tokens) != len(sides[1].tokens):
        raise ValueError(f"there are {len(sides[0].tokens)} clean and {len(sides[1].tokens)} corrupt prompts")
    forward = _by_count(sides[0], sides[1]) if alignment is None else _given(sides[0], sides[1], alignment)
    base, source = sides if direction == "noise" else sides[::-1]
    column = forward if direction == "noise" else _inverse(forward, base.tokens.shape[1])
    there = column >= 0
    column = column.clamp(min=0)
    return Pair(base, source, column, there & _may_differ(base, source, column), there, direction)


def _by_count(clean: Prompted, corrupt: Prompted) -> Int[Tensor, "batch pos"]:
    """The n-th real token of one for the n-th of the other; −1 for padding."""
    unequal = (clean.lengths != corrupt.lengths).nonzero()
    if len(unequal):
        row = int(unequal[0])
        raise ValueError(
            f"prompt {row} has {int(clean.lengths[row])} tokens clean and {int(corrupt.lengths[row])} corrupt; "
            "give an alignment that says which position of one stands for which of the other"
        )
    first, last = token_span(clean.tokens, clean.mask)
    other, _ = token_span(corrupt.tokens, corrupt.mask)
    columns = torch.arange(clean.tokens.shape[1], device=first.device)
    real = (columns >= first[:, None]) & (columns <= last[:, None])
    return torch.where(real, columns - first[:, None] + other[:, None], -1)


def _given(clean: Prompted, corrupt: Prompted, alignment: Sequence[int] | Tensor) -> Int[Tensor, "batch pos"]:
    try:
        given = torch.as_tensor(alignment, device=clean.tokens.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"alignment must hold columns of corrupt, not {alignment!r}") from None
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"alignment must hold columns of corrupt, which are whole numbers, not {alignment!r}")
    shape = clean.tokens.shape
    if given.shape not in (shape, shape[1:]):
        raise ValueError(f"alignment has shape {list(given.shape)}, expected {list(shape[1:])} or {list(shape)}")
    columns = given.expand(shape).clone()
    if bool(((columns < -1) | (columns >= corrupt.tokens.shape[1])).any()):
        raise ValueError(f"alignment must hold columns 0 to {corrupt.tokens.shape[1] - 1} of corrupt, or -1 for none")
    ordered = columns.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("alignment names one column of corrupt twice")
    return columns


def _inverse(forward: Int[Tensor, "batch pos"], width: int) -> Int[Tensor, "batch width"]:
    rows, columns = (forward >= 0).nonzero(as_tuple=True)
    inverse = forward.new_full((len(forward), width), -1)
    inverse[rows, forward[rows, columns]] = columns
    return inverse


def _may_differ(base: Prompted, source: Prompted, column: Tensor) -> Bool[Tensor, "batch pos"]:
    """Cells that something different stands at or before; all of them where the two are laid out differently."""
    everywhere = torch.ones_like(base.tokens, dtype=torch.bool)
    if base.tokens.shape != source.tokens.shape:
        return everywhere
    same_mask = base.mask is source.mask or (
        base.mask is not None and source.mask is not None and bool((base.mask == source.mask).all())
    )
    real = everywhere if base.mask is None else base.mask
    columns = torch.arange(column.shape[1], device=column.device)
    if not same_mask or not bool(((column == columns) | ~real).all()):
        return everywhere
    return (base.tokens != source.tokens).cumsum(1) > 0
