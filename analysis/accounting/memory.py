"""The memory of an activation cache in closed form."""

from __future__ import annotations

import math

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.accounting.parameters import HasConfig, config_of
from analysis.results import Result, result
from circuits import names as hook
from circuits.config import GPTConfig


@result
class CacheMemory(Result):
    """What an activation cache holds.

    Attributes:
        names: Hook names.
        bytes: Size of each activation.
        total: All of them, in bytes.
    """

    names: tuple[str, ...]
    bytes: Int[Tensor, " name"]
    total: int

    def title(self) -> str:
        """The total in mebibytes."""
        return f"{self.total / 2**20:,.1f} MiB in {len(self.names)} activations"


def cache_memory(
    subject: GPTConfig | HasConfig,
    tokens: int | None = None,
    batch: int = 1,
    names_filter: hook.NamesFilter = None,
    dtype: torch.dtype = torch.float32,
) -> CacheMemory:
    """The size of the cache that ``model.run_with_cache`` would return.

    Args:
        subject: A configuration or a model.
        tokens: Length of each sequence; by default n_ctx.
        batch: Sequences.
        names_filter: As in ``run_with_cache``.
        dtype: What the activations are held in.

    Raises:
        KeyError: A hook name that the model does not have.
    """
    config = config_of(subject)
    length = config.n_ctx if tokens is None else tokens
    every = hook.hook_names(config)
    wanted = hook.resolve(names_filter, every)
    kept = tuple(name for name in every if name in wanted)
    sizes = [math.prod(activation_shape(config, name, batch, length)) * dtype.itemsize for name in kept]
    return CacheMemory(names=kept, bytes=torch.tensor(sizes, dtype=torch.int64), total=sum(sizes))


def activation_shape(config: GPTConfig, name: str, batch: int, tokens: int) -> tuple[int, ...]:
    """The shape of the activation that a hook name stands for."""
    stem = name.rsplit(".", 1)[-1].removeprefix("hook_")
    heads, kv_heads = (batch, tokens, config.n_heads), (batch, tokens, config.n_kv_heads)
    queries, keys = (*heads, config.d_head), (*kv_heads, config.d_head)
    module = name.split(".")[-2] if "." in name else ""
    if module in ("q_norm", "k_norm"):
        own = queries if module == "q_norm" else keys
        return own if stem == "normalized" else (*own[:-1], 1)
    square = (batch, config.n_heads, tokens, tokens)
    special = {
        "scale": (batch, tokens, 1),
        "q": queries,
        "rot_q": queries,
        "z": queries,
        "k": keys,
        "rot_k": keys,
        "v": keys,
        "attn_scores": square,
        "pattern": square,
        "result": (*heads, config.d_model),
        "q_input": (*heads, config.d_model),
        "k_input": (*kv_heads, config.d_model),
        "v_input": (*kv_heads, config.d_model),
        "pre": (batch, tokens, config.d_mlp),
        "pre_linear": (batch, tokens, config.d_mlp),
        "post": (batch, tokens, config.d_mlp),
    }
    return special.get(stem, (batch, tokens, config.d_model))
