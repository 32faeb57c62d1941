"""What a batch of tokens must be, and the loss of predicting it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from circuits.config import GPTConfig


def check_tokens(tokens: object, config: GPTConfig) -> Tensor:
    """Token ids ``[batch pos]`` as int64, or an error that says what came instead.

    Raises:
        TypeError: Not a tensor of whole numbers.
        ValueError: Not two axes, an empty axis, or longer than `n_ctx`.
        IndexError: An id outside the vocabulary, with the first place where it stands.
    """
    if isinstance(tokens, str):
        raise TypeError("expected token ids [batch pos], not text; model.to_tokens(text) makes them")
    if not isinstance(tokens, Tensor):
        raise TypeError(f"expected a tensor of token ids [batch pos], not {type(tokens).__name__}")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"token ids must be whole numbers, not {tokens.dtype}")
    if tokens.layout != torch.strided:
        raise TypeError(f"token ids must be a dense tensor, not {tokens.layout}")
    if tokens.ndim != 2:
        hint = "; for one sequence write tokens[None]" if tokens.ndim == 1 else ""
        raise ValueError(f"expected token ids of shape [batch pos], not {list(tokens.shape)}{hint}")
    if tokens.numel() == 0:
        raise ValueError(f"expected at least one token, but the shape is {list(tokens.shape)}")
    if tokens.shape[1] > config.n_ctx:
        raise ValueError(f"the sequence is {tokens.shape[1]} tokens long, but n_ctx is {config.n_ctx}")
    tokens = tokens.long()
    low, high = tokens.aminmax()
    if low < 0 or high >= config.d_vocab:
        row, pos = ((tokens < 0) | (tokens >= config.d_vocab)).nonzero()[0].tolist()
        raise IndexError(
            f"token id {int(tokens[row, pos])} at batch {row}, position {pos} is not in a vocabulary of "
            f"{config.d_vocab} (0 to {config.d_vocab - 1})"
        )
    return tokens


def check_mask(attention_mask: Tensor | None, tokens: Tensor) -> Bool[Tensor, "batch pos"] | None:
    """The padding mask as booleans, True for tokens; None where nothing is padding.

    Raises:
        TypeError: Not a tensor of 0 and 1.
        ValueError: Another shape than the tokens', or a row with no token at all.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor of 0 and 1, not {type(attention_mask).__name__}")
    if attention_mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected that of the tokens, {list(tokens.shape)}"
        )
    mask = attention_mask.to(device=tokens.device, dtype=torch.bool)
    if attention_mask.dtype != torch.bool and not bool((mask == attention_mask.to(tokens.device)).all()):
        raise TypeError("attention_mask must hold only 0 (padding) and 1 (token)")
    if bool(mask.all()):
        return None
    empty = (~mask.any(-1)).nonzero()
    if len(empty):
        raise ValueError(f"row {int(empty[0])} of attention_mask is all padding")
    return mask


def pad_rows(
    rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "left", fill: int = 0
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Sequences of different lengths as one batch of tokens, and its mask, True for tokens.

    Raises:
        ValueError: No sequence, an empty one, or an unknown side.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', not {side!r}")
    if not rows or not all(rows):
        raise ValueError("expected at least one sequence, and at least one token in each")
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), fill)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        tokens[index, start : start + len(row)] = torch.tensor(row)
        mask[index, start : start + len(row)] = True
    return tokens, mask


def last_positions(tokens: Tensor, attention_mask: Bool[Tensor, "batch pos"] | None) -> Tensor:
    """Index of the last real token of each row, ``[batch]``."""
    batch, pos = tokens.shape[:2]
    if attention_mask is None:
        return torch.full((batch,), pos - 1, device=tokens.device)
    index = torch.arange(pos, device=tokens.device)
    return torch.where(attention_mask, index, -1).amax(-1)


def token_span(tokens: Tensor, attention_mask: Bool[Tensor, "batch pos"] | None) -> tuple[Tensor, Tensor]:
    """Index of the first and of the last real token of each row, ``[batch]`` both."""
    last = last_positions(tokens, attention_mask)
    return torch.zeros_like(last) if attention_mask is None else attention_mask.long().argmax(-1), last


def columns_of(
    position: int, first: Int[Tensor, " batch"], last: Int[Tensor, " batch"], rows: Int[Tensor, " batch"] | None = None
) -> Int[Tensor, " batch"]:
    """The index of one position in each row, counted over its real tokens: −1 is the last of them.

    Args:
        position: The position.
        first: Index of the first real token of each row.
        last: Index of the last.
        rows: Which rows these are, for the message.

    Raises:
        IndexError: A position that some row does not have.
    """
    at = last + 1 + position if position < 0 else first + position
    outside = ((at < first) | (at > last)).nonzero()
    if len(outside):
        row = int(outside[0])
        name = row if rows is None else int(rows[row])
        raise IndexError(
            f"position {position} is not in row {name}, which has {int(last[row] - first[row]) + 1} tokens"
        )
    return at


def real_positions(
    position: int, tokens: Tensor, attention_mask: Bool[Tensor, "batch pos"] | None
) -> Int[Tensor, " batch"]:
    """The index of one position in each row of a batch (see `columns_of`)."""
    return columns_of(position, *token_span(tokens, attention_mask))


def next_token_losses(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Tensor, attention_mask: Bool[Tensor, "batch pos"] | None = None
) -> Float[Tensor, "batch pos-1"]:
    """``−log p(x_{t+1} | x_{≤t})`` in nats; 0 where the token or its successor is padding.

    In float32 at least: in half precision the logarithms would have two or three digits.

    Raises:
        ValueError: A single position, which has no next token.
    """
    if tokens.shape[1] < 2:
        raise ValueError("a loss needs at least 2 positions; got 1")
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    losses: Tensor = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(tokens.shape[0], -1)
    if attention_mask is None:
        return losses
    return losses.masked_fill(~predicted(attention_mask), 0.0)


def mean_over_predicted(
    losses: Float[Tensor, "batch predicted"], attention_mask: Bool[Tensor, "batch pos"] | None
) -> Float[Tensor, ""]:
    """The mean over the tokens that are predicted, padding left out.

    Raises:
        ValueError: No token is: each row has a single one, or they are all apart.
    """
    if attention_mask is None:
        return losses.mean()
    count = predicted(attention_mask).sum()
    if not bool(count):
        raise ValueError("a loss needs a token that follows another; under this attention_mask no two stand together")
    return losses.sum() / count


def predicted(attention_mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos-1"]:
    """Where a real token predicts a real token."""
    return attention_mask[:, :-1] & attention_mask[:, 1:]
