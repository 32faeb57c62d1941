"""The two shapes that most is measured on, and their TransformerLens counterparts."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from circuits import GPTConfig, HookedGPT

BATCH, POS = 8, 64


@lru_cache(maxsize=1)
def course() -> HookedGPT:
    """The lecture's course configuration."""
    return HookedGPT(GPTConfig.course())


@lru_cache(maxsize=1)
def gpt2_small() -> HookedGPT:
    """The shape of GPT-2 small, randomly initialised."""
    return HookedGPT(GPTConfig.gpt2_small())


def tokens(model: HookedGPT, batch: int = BATCH, pos: int = POS) -> Tensor:
    """Random tokens, the same at every call."""
    return torch.randint(model.config.d_vocab, (batch, pos), generator=torch.Generator().manual_seed(0))


def has_transformer_lens() -> bool:
    """Whether TransformerLens is installed."""
    return importlib.util.find_spec("transformer_lens") is not None


@lru_cache(maxsize=2)
def transformer_lens(shape: str) -> Any:
    """A native TransformerLens 4 model of the same shape (``"course"`` or ``"gpt2"``), weights of its own."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    ours = GPTConfig.course() if shape == "course" else GPTConfig.gpt2_small()
    config = TransformerBridgeConfig(
        n_layers=ours.n_layers,
        d_model=ours.d_model,
        n_heads=ours.n_heads,
        d_head=ours.d_head,
        d_mlp=ours.d_mlp,
        n_ctx=ours.n_ctx,
        d_vocab=ours.d_vocab,
        act_fn=ours.act,
        normalization_type="LN",
        architecture="TransformerLensNative",
    )
    return TransformerBridge.boot_native(config, dtype=torch.float32)
