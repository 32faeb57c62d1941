"""The one list of architectures that every suite is parametrised over, and models of them with nothing left at 0 or 1.

``ARCHITECTURES`` maps a name to a tiny `GPTConfig`; ``NAMES`` is for ``pytest.mark.parametrize``; `make` builds a
model; `configs` is a hypothesis strategy for the combinations that nobody listed. Sizes that stand in one tensor are
all different, so that a transposed axis cannot pass.

Nothing here imports the package at the top: ``conftest.py`` may read the names before jaxtyping's hook is installed.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

if TYPE_CHECKING:
    from circuits import GPTConfig, HookedGPT

# With batch 4 and pos 13 (tests/batches.py). d_head is not d_model / n_heads, so neither can stand in for the other.
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 7,
    "n_heads": 3,
    "n_ctx": 19,
    "d_vocab": 17,
    "d_head": 5,
    "d_mlp": 11,
}
_NO_BIASES = {"bias_qkv": False, "bias_out": False, "bias_mlp": False}
_ALL_BIASES = {"bias_qkv": True, "bias_out": True, "bias_mlp": True, "bias_unembed": True}
_ATTN_ONLY = {"attn_only": True, "d_mlp": 0}
_ROTARY = {"positions": "rotary", "d_head": 10}
_GROUPED = {"n_heads": 6, "n_kv_heads": 3}
# Wavelengths of a base of 10,000 over ten coordinates: 6, 40 | 250 | 1577, 9950: kept, blended, divided.
_LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_n_ctx": 256}

SPECS: dict[str, dict[str, Any]] = {
    # What the lecture builds, and its variations.
    "course": {"d_model": 15, "d_head": None, "d_mlp": None},
    "no_norm": {"norm": None},
    "attn_only": _ATTN_ONLY,
    "attn_only_no_norm": {"norm": None, **_ATTN_ONLY},
    "tied": {"tie_embeddings": True, "bias_unembed": True},
    "all_biases": _ALL_BIASES,
    "no_biases": _NO_BIASES,
    "one_layer": {"n_layers": 1},
    # Positions.
    "rotary": _ROTARY,
    "rotary_partial": {**_ROTARY, "rotary_dim": 6},
    "rotary_interleaved": {**_ROTARY, "rotary_layout": "interleaved"},
    "rotary_interleaved_partial": {**_ROTARY, "rotary_layout": "interleaved", "rotary_dim": 6, "bias_qkv": True},
    "rotary_base": {**_ROTARY, "rotary_base": 37.0},
    "rotary_linear": {**_ROTARY, "rotary_scaling": {"kind": "linear", "factor": 3.0}},
    "rotary_llama3": {**_ROTARY, "rotary_scaling": _LLAMA3},
    "no_positions": {"positions": None},
    # Norms.
    "rmsnorm": {"norm": "rmsnorm"},
    "large_eps": {"norm_eps": 0.3},
    "post_norm": {"norm_placement": "post"},
    "post_norm_final": {"norm_placement": "post", "norm": "rmsnorm", "final_norm": True},
    "post_norm_attn_only": {"norm_placement": "post", **_ATTN_ONLY},
    "no_final_norm": {"final_norm": False},
    "branch_norm": {"branch_norm": True, "bias_qkv": True},
    "branch_norm_attn_only": {"branch_norm": True, "norm": "rmsnorm", **_ATTN_ONLY},
    # MLPs.
    "gelu_new": {"act": "gelu_new"},
    "relu": {"act": "relu"},
    "gated_silu": {"act": "silu", "gated_mlp": True},
    "gated_no_bias": {"act": "gelu", "gated_mlp": True, "bias_mlp": False},
    # Attention.
    "grouped_query": {**_GROUPED, "bias_qkv": True},
    "multi_query": {"n_kv_heads": 1},
    "qk_norm": {"qk_norm": True, "bias_qkv": True},
    "soft_caps": {"attn_softcap": 1.3, "logit_softcap": 1.7},
    "windows": {"window": (5, None)},
    "window": {"window": 3, **_ROTARY},
    "attn_scale": {"attn_scale": 0.9},
    "embed_scale": {"embed_scale": 2.3, "tie_embeddings": True},
    # Parallel blocks.
    "parallel_shared_norm": {"parallel_blocks": "shared_norm"},
    "parallel_two_norms": {"parallel_blocks": "two_norms"},
    "parallel_no_norm": {"parallel_blocks": "shared_norm", "norm": None},
    "parallel_branch_norm": {"parallel_blocks": "two_norms", "norm": "rmsnorm", "branch_norm": True},
    # The conventions of published families.
    "like_gpt2": {"act": "gelu_new", "bias_qkv": True, "tie_embeddings": True},
    "like_gptj": {
        **_ROTARY,
        "rotary_dim": 6,
        "rotary_layout": "interleaved",
        "act": "gelu_new",
        "parallel_blocks": "shared_norm",
        "bias_out": False,
        "bias_unembed": True,
    },
    "like_neox": {**_ROTARY, "rotary_dim": 4, "parallel_blocks": "two_norms", "bias_qkv": True},
    "like_llama": {
        **_ROTARY,
        **_GROUPED,
        **_NO_BIASES,
        "norm": "rmsnorm",
        "act": "silu",
        "gated_mlp": True,
        "rotary_base": 500.0,
        "rotary_scaling": _LLAMA3,
    },
    "like_qwen3": {
        **_ROTARY,
        **_GROUPED,
        **_NO_BIASES,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "act": "silu",
        "gated_mlp": True,
        "qk_norm": True,
        "rotary_base": 1e6,
        "tie_embeddings": True,
    },
    "like_gemma2": {
        **_ROTARY,
        **_GROUPED,
        **_NO_BIASES,
        "norm": "rmsnorm",
        "branch_norm": True,
        "act": "gelu_new",
        "gated_mlp": True,
        "tie_embeddings": True,
        "embed_scale": math.sqrt(7),
        "attn_scale": 0.4,
        "attn_softcap": 1.9,
        "logit_softcap": 2.1,
        "window": (4, None),
    },
    "like_phi": {
        **_ROTARY,
        **_ALL_BIASES,
        "rotary_dim": 4,
        "act": "gelu_new",
        "parallel_blocks": "shared_norm",
    },
}

NAMES = tuple(SPECS)


def config(name: str) -> GPTConfig:
    """The configuration of one architecture of the list."""
    from circuits.config import GPTConfig

    return GPTConfig.from_dict({**SIZES, **SPECS[name]})


def __getattr__(name: str) -> Any:
    if name != "ARCHITECTURES":
        raise AttributeError(name)
    return {name: config(name) for name in NAMES}


def make(architecture: str | GPTConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> HookedGPT:
    """A model of a listed architecture, or of any config, with every parameter random.

    Gains of norms are away from 1, shifts and biases away from 0, weights large enough that attention is uneven,
    activations leave their linear part and soft caps bite.
    """
    from circuits.model import HookedGPT

    if isinstance(architecture, str):
        architecture = config(architecture)
    model = HookedGPT(architecture, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(_nontrivial(name, noise))
    return model


def _nontrivial(name: str, noise: torch.Tensor) -> torch.Tensor:
    if name.endswith(".w"):
        return 1.4 + 0.3 * noise
    if noise.ndim == 1:
        return 0.4 * noise
    if name.startswith(("embed", "pos_embed")):
        return 0.9 * noise
    return 1.3 * noise / math.sqrt(noise.shape[-1])


@st.composite
def configs(draw: st.DrawFn) -> GPTConfig:
    """Valid configs over every field of `GPTConfig`, in combinations that nobody listed."""
    from circuits.config import GPTConfig

    n_layers, n_kv_heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3]))
    fields: dict[str, Any] = {
        "n_layers": n_layers,
        "n_kv_heads": n_kv_heads,
        "n_heads": n_kv_heads * draw(st.integers(1, 2)),
        "d_model": draw(st.sampled_from([7, 8, 9])),
        "d_head": draw(st.sampled_from([4, 5, 10])),
        "n_ctx": 19,
        "d_vocab": 17,
        "act": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        "bias_qkv": draw(st.booleans()),
        "bias_out": draw(st.booleans()),
        "bias_mlp": draw(st.booleans()),
        "bias_unembed": draw(st.booleans()),
        "tie_embeddings": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "attn_scale": draw(st.sampled_from([None, 0.7])),
        "attn_softcap": draw(st.sampled_from([None, 1.6])),
        "logit_softcap": draw(st.sampled_from([None, 2.2])),
        "window": draw(st.lists(st.sampled_from([None, 1, 4]), min_size=n_layers, max_size=n_layers)),
        "embed_scale": draw(st.sampled_from([1.0, 2.6])),
    }
    fields |= _draw_mlp(draw)
    fields |= _draw_norms(draw, attn_only=fields["attn_only"])
    fields |= _draw_positions(draw, fields["d_head"])
    # The run-time type checks pick an element of a tuple at random; a strategy may not draw on that generator.
    state = random.getstate()
    config = GPTConfig.from_dict(fields)
    random.setstate(state)
    return config


def _draw_mlp(draw: st.DrawFn) -> dict[str, Any]:
    attn_only = draw(st.sampled_from([False, False, True]))
    if attn_only:
        return {"attn_only": True}
    return {"attn_only": False, "d_mlp": draw(st.sampled_from([11, 12])), "gated_mlp": draw(st.booleans())}


def _draw_norms(draw: st.DrawFn, attn_only: bool) -> dict[str, Any]:
    norm = draw(st.sampled_from(["layernorm", "rmsnorm", None]))
    placement = draw(st.sampled_from(["pre", "pre", "post"])) if norm else "pre"
    parallel = placement == "pre" and not attn_only
    return {
        "norm": norm,
        "norm_placement": placement,
        "norm_eps": draw(st.sampled_from([1e-5, 0.2])),
        "final_norm": draw(st.sampled_from([None, True, False])) if norm else None,
        "branch_norm": bool(norm) and placement == "pre" and draw(st.booleans()),
        "parallel_blocks": draw(st.sampled_from([False, "shared_norm", "two_norms"])) if parallel else False,
    }


def _draw_positions(draw: st.DrawFn, d_head: int) -> dict[str, Any]:
    positions = draw(st.sampled_from(["learned", "rotary", None]))
    if positions != "rotary":
        return {"positions": positions}
    return {
        "positions": "rotary",
        "rotary_dim": draw(st.sampled_from(range(2, d_head + 1, 2))),
        "rotary_base": draw(st.sampled_from([10_000.0, 31.0])),
        "rotary_layout": draw(st.sampled_from(["half", "interleaved"])),
        "rotary_scaling": draw(st.sampled_from([None, {"kind": "linear", "factor": 2.5}, _LLAMA3])),
    }
