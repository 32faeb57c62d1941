"""Continuing sequences token by token, each step paying for one position only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.run import make_run, token_positions
from circuits.tokens import check_mask, check_tokens
from circuits.validity import require_whole

if TYPE_CHECKING:
    from circuits.model import HookedGPT


class GrowingKeyValues:
    """Keys and values of every position so far, in buffers sized once."""

    def __init__(self, n_layers: int, length: int) -> None:
        self._length = length
        self._keys: list[Tensor | None] = [None] * n_layers
        self._values: list[Tensor | None] = [None] * n_layers
        self._filled = [0] * n_layers

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions and show all of them."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            shape = (k.shape[0], self._length, *k.shape[2:])
            keys = self._keys[layer] = k.new_empty(shape)
            values = self._values[layer] = v.new_empty(shape)
        start, stop = self._filled[layer], self._filled[layer] + k.shape[1]
        keys[:, start:stop], values[:, start:stop] = k, v
        self._filled[layer] = stop
        return keys[:, :stop], values[:, :stop]


def next_tokens(
    logits: Float[Tensor, "batch d_vocab"], temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Int[Tensor, " batch"]:
    """The likeliest token at temperature 0, else a draw from ``softmax(logits / temperature)`` over the `top_k`."""
    if bool(logits.isnan().any()):
        raise ValueError("the logits hold NaN, so no token can be chosen: the weights are not finite, or overflowed")
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    # Shifted first, so that a temperature near 0 makes no infinity of the largest logit.
    scaled = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None:
        least = scaled.topk(min(top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = scaled.softmax(-1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(logits.device)


@torch.no_grad()
def generate(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_at: int | None = None,
    attention_mask: Tensor | None = None,
) -> Int[Tensor, "batch total"]:
    """Prompts with up to `max_new_tokens` more tokens each.

    Keys and values of earlier positions are kept, so that a step costs one position. Hooks are for analysis passes:
    within a ``with model.hooks(...)`` block, which could not apply here, nothing is generated.

    Args:
        model: The model.
        tokens: The prompts; pad them on the left if their lengths differ.
        max_new_tokens: How many tokens to add.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it before the draw.
        top_k: Draw among this many likeliest tokens only.
        seed: Seed of the draws.
        stop_at: A token after which a sequence is finished; finished sequences repeat it, and generation ends when all
            are finished.
        attention_mask: 1 for tokens, 0 for padding, which must stand on the left.

    Raises:
        TypeError: An option of the wrong type.
        ValueError: More tokens than `n_ctx` holds, padding on the right, an option that cannot mean anything, hooks in
            force, or logits that are NaN.
    """
    if model.in_scope_of_hooks:
        raise ValueError("generate does not apply hooks, and this is within a `with model.hooks(...)` block")
    tokens = check_tokens(tokens, model.config)
    max_new_tokens = require_whole("max_new_tokens", max_new_tokens, least=0)
    seed = require_whole("seed", seed, least=-(2**63))
    top_k = None if top_k is None else require_whole("top_k", top_k)
    _check_options(model, tokens, max_new_tokens, temperature, stop_at)
    mask = check_mask(attention_mask, tokens)
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError("prompts of different lengths must be padded on the left to be continued")
    generator = torch.Generator().manual_seed(seed)
    length = tokens.shape[1] + max_new_tokens
    past = GrowingKeyValues(model.config.n_layers, length)
    out, new = tokens, tokens
    for _ in range(max_new_tokens):
        logits = _step(model, new, mask, out.shape[1] - new.shape[1], past)
        chosen = next_tokens(logits, temperature, top_k, generator)
        if stop_at is not None:
            finished = (out[:, tokens.shape[1] :] == stop_at).any(-1)
            chosen = chosen.where(~finished, stop_at)
        new = chosen[:, None]
        out = torch.cat((out, new), dim=1)
        mask = None if mask is None else torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
        if stop_at is not None and bool((out[:, tokens.shape[1] :] == stop_at).any(-1).all()):
            break
    return out


def _step(model: HookedGPT, new: Tensor, mask: Tensor | None, n_past: int, past: GrowingKeyValues) -> Tensor:
    """Logits after the last of the new tokens."""
    positions = token_positions(new.shape[0], n_past + new.shape[1], mask, new.device)[:, n_past:]
    run = make_run(model.config, positions, model.dtype, key_mask=mask, n_past=n_past, past=past)
    x = model.embedding(new, run)
    for block in model.blocks:
        x = block(x, run)
    return model.unembedding(x[:, -1])


def _check_options(
    model: HookedGPT, tokens: Tensor, max_new_tokens: int, temperature: float, stop_at: int | None
) -> None:
    total = tokens.shape[1] + max_new_tokens
    if total > model.config.n_ctx:
        raise ValueError(
            f"a prompt of {tokens.shape[1]} tokens and {max_new_tokens} more make {total}, "
            f"but n_ctx is {model.config.n_ctx}"
        )
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise TypeError(f"temperature must be a number, not {temperature!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, not {temperature}")
    if stop_at is not None and require_whole("stop_at", stop_at, least=0) >= model.config.d_vocab:
        raise ValueError(f"stop_at {stop_at} is not in a vocabulary of {model.config.d_vocab}")
