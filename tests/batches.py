"""Token batches for tests: random ones, and prompts of different lengths padded on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from circuits import GPTConfig

BATCH, POS = 4, 13
LENGTHS = (13, 9, 2, 6)
SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")


def random_tokens(config: GPTConfig, batch: int = BATCH, pos: int = POS, seed: int = 0) -> torch.Tensor:
    """[batch pos] token numbers, uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.d_vocab, (batch, pos), generator=generator)


def random_prompts(config: GPTConfig, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    """One [pos] row of tokens for each length."""
    tokens = random_tokens(config, len(lengths), max(lengths), seed)
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def pad(prompts: list[torch.Tensor], side: Literal["left", "right"]) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts as one batch, and its mask (1 = real). What stands under the padding is an ordinary token."""
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), 3)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt) if side == "left" else 0
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = 1
    return tokens, mask


def real_part(name: str, value: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """What a hook shows at the real positions of one prompt (``value`` without its batch axis)."""
    if name.endswith(("hook_attn_scores", "hook_pattern")):
        return value[:, real][:, :, real]
    return value[real]
