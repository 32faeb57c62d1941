"""Which positions of a batch a question is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.cache import ActivationCache
from circuits.tokens import last_positions

Position = int | Sequence[int] | Int[Tensor, " batch"] | None


@dataclass(frozen=True)
class Positions:
    """One position of each prompt, or all of them.

    Attributes:
        index: The position of each prompt; None for all positions.
        n_pos: Length of the padded prompts.
        dtype: What activations are computed with: their own type, at least float32.
        device: Where they are computed with.
    """

    index: Int[Tensor, " batch"] | None
    n_pos: int
    dtype: torch.dtype
    device: torch.device

    @property
    def one(self) -> bool:
        """Whether each prompt has one position."""
        return self.index is not None

    def select(self, x: Float[Tensor, "batch pos *rest"]) -> Float[Tensor, "batch chosen *rest"]:
        """The activations at these positions, the position axis kept (of length 1 for one position)."""
        if self.index is not None:
            index = self.index.to(x.device)
            first = int(index[0])
            # One shared position is a slice, which copies nothing.
            same = bool((index == first).all())
            x = x[:, first : first + 1] if same else x[torch.arange(len(index), device=x.device), index][:, None]
        return x.to(self.device, self.dtype)

    def whole(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """The activations at every position, on the same device and of the same type."""
        return x.to(self.device, self.dtype)

    def squeeze(self, x: Float[Tensor, "*axes"], axis: int) -> Float[Tensor, "*rest"]:
        """Without the position axis where each prompt has one position."""
        return x.squeeze(axis) if self.one else x

    def own(self) -> Int[Tensor, "#batch chosen"]:
        """The chosen positions themselves."""
        if self.index is None:
            return torch.arange(self.n_pos, device=self.device)[None]
        return self.index.to(self.device)[:, None]


def resolve_positions(position: Position, cache: ActivationCache, shape: torch.Size, like: Tensor) -> Positions:
    """Positions as a user writes them: −1 is the last real token of each prompt, −2 the one before it, and so on.

    Args:
        position: One for all prompts, one for each, or None for every position. Counted from 0, it is a place in the
            padded batch; counted from the end, padding is not counted.
        cache: Knows the padding.
        shape: ``[batch pos …]`` of the activations.
        like: A weight: its device, and its type where that is at least float32, are what is computed with.

    Raises:
        IndexError: A position outside a prompt, or on its padding.
        ValueError: Another number of positions than prompts.
    """
    batch, n_pos = shape[:2]
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    if position is None:
        return Positions(None, n_pos, dtype, like.device)
    asked = asked_positions(position, batch)
    mask = cache.attention_mask
    mask = torch.ones(batch, n_pos, dtype=torch.bool) if mask is None else mask.cpu()
    index = torch.where(asked < 0, last_positions(mask, mask) + 1 + asked, asked)
    _check_real(index, asked, mask)
    return Positions(index.long(), n_pos, dtype, like.device)


def asked_positions(position: int | Sequence[int] | Tensor, batch: int) -> Int[Tensor, " batch"]:
    """One position for all prompts, or one for each, as one for each, on the CPU.

    Raises:
        TypeError: No whole numbers.
        ValueError: Another number of positions than prompts.
    """
    try:
        asked = torch.as_tensor(position, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"a position must be a whole number, not {position!r}") from None
    if asked.is_floating_point() or asked.dtype == torch.bool:
        raise TypeError(f"a position must be a whole number, not {position!r}")
    if asked.ndim > 1 or (asked.ndim == 1 and len(asked) != batch):
        raise ValueError(f"expected one position, or one for each of {batch} prompts, not shape {list(asked.shape)}")
    return asked.long().expand(batch)


def _check_real(index: Tensor, asked: Tensor, mask: Bool[Tensor, "batch pos"]) -> None:
    n_pos = mask.shape[1]
    for row, (place, wish) in enumerate(zip(index.tolist(), asked.tolist(), strict=True)):
        if not 0 <= place < n_pos:
            raise IndexError(f"position {wish} is not in prompt {row}, which has {int(mask[row].sum())} tokens")
        if not mask[row, place]:
            raise IndexError(f"position {wish} of prompt {row} is padding: its tokens are {_span(mask[row])}")


def _span(row: Tensor) -> str:
    real = row.nonzero().flatten().tolist()
    return f"{real[0]} to {real[-1]}"
