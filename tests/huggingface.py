"""Tiny Hugging Face models of every supported family, randomly filled, as an oracle for ours.

Nothing here imports transformers or the package at the top: it takes seconds, and the shape checks hook the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

VOCAB, N_CTX = 37, 29
_OLD = {"vocab_size": VOCAB, "n_positions": N_CTX, "n_embd": 30, "n_layer": 3, "n_head": 3}
_NEW: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": N_CTX,
    "hidden_size": 24,
    "intermediate_size": 34,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": None,
}
_SAME_HEADS = {**_NEW, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
_NEOX = {k: v for k, v in _NEW.items() if k not in ("num_key_value_heads", "head_dim")} | {"num_attention_heads": 3}
_PHI = {**_NEOX, "num_attention_heads": 6, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

# name -> (class stem, fields of its config)
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _OLD),
    "gpt2_untied": ("GPT2", {**_OLD, "tie_word_embeddings": False, "n_inner": 41, "activation_function": "relu"}),
    "gpt_neo": (
        "GPTNeo",
        {
            "vocab_size": VOCAB,
            "max_position_embeddings": N_CTX,
            "hidden_size": 30,
            "num_layers": 3,
            "num_heads": 3,
            "window_size": 4,
            "attention_types": [[["global"], 1], [["local", "global"], 1]],
        },
    ),
    "gpt_neox": ("GPTNeoX", _NEOX),
    "gpt_neox_sequential": (
        "GPTNeoX",
        {
            **_NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 37.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gptj": ("GPTJ", {**_OLD, "rotary_dim": 6}),
    "llama": ("Llama", {**_NEW, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "llama_tied_biases": ("Llama", {**_SAME_HEADS, "tie_word_embeddings": True, "attention_bias": True}),
    "llama_stretched": ("Llama", {**_NEW, "rope_parameters": _LLAMA3}),
    "llama_linear": ("Llama", {**_NEW, "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}}),
    "mistral": ("Mistral", {**_NEW, "sliding_window": 5}),
    "mistral_unbounded": ("Mistral", {**_NEW, "sliding_window": None}),
    "qwen2": ("Qwen2", {k: v for k, v in _NEW.items() if k != "head_dim"}),
    "qwen2_windowed": ("Qwen2", {k: v for k, v in _NEW.items() if k != "head_dim"} | _SLIDING),
    "qwen3": ("Qwen3", _NEW),
    "qwen3_biases": ("Qwen3", {**_NEW, **_SLIDING, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **_NEW,
            "query_pre_attn_scalar": 7,
            "sliding_window": 5,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.5,
        },
    ),
    "gemma2_untied": (
        "Gemma2",
        {**_NEW, "tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi": ("Phi", _PHI),
}
NAMES = tuple(SPECS)


class _InFloat64(TorchFunctionMode):
    """Gives float64 wherever float32 is asked for.

    Transformers computes norms, rotary tables and some softmaxes in float32 whatever the model's type is; agreement at
    1e-9 can only be asked of an oracle that does not round there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def swapped(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(swapped, args), **{k: swapped(v) for k, v in (kwargs or {}).items()})


@contextmanager
def in_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Models made, and passes run, in this block use `dtype` throughout."""
    if dtype == torch.float32:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _InFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A transformers model in which no parameter is left at 0 or 1."""
    import transformers

    stem, fields = SPECS[name]
    config = getattr(transformers, f"{stem}Config")(**fields)
    config._attn_implementation = "eager"
    with in_dtype(dtype), torch.no_grad():
        model = getattr(transformers, f"{stem}ForCausalLM" if stem != "GPT2" else "GPT2LMHeadModel")(config)
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Such a model, and its folder."""
    model = make(name, dtype)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Its logits, with positions counted over real tokens as its own generation does."""
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    with in_dtype(next(model.parameters()).dtype):
        result: torch.Tensor = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    return result
