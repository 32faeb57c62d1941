"""The families of GGUF files: what their metadata means, and where their tensors stand."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from circuits.config import GPTConfig, RotaryScaling
from circuits.pretrained.family import Family, Stored, affine, layernorm, stored
from circuits.pretrained.fields import Fields


def _exact(value: float) -> float:
    """A float32 as the decimal that it was written as: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _llama_config(fields: Fields) -> GPTConfig:
    fields.only("expert_count", 0)
    d_model, n_heads = fields.size("embedding_length", 0), fields.size("attention.head_count", 0)
    d_head = fields.size("attention.key_length", fields.get("rope.dimension_count", d_model // max(n_heads, 1)))
    n_layers = fields.size("block_count", 0)
    scaling = fields.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise fields.unsupported("rope.scaling.type", scaling, "'none', 'linear'")
    linear = RotaryScaling(kind="linear", factor=fields.number("rope.scaling.factor", 1.0))
    return GPTConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.size("attention.head_count_kv", n_heads),
        d_head=d_head,
        d_mlp=fields.size("feed_forward_length", 0),
        n_ctx=fields.size("context_length", 0),
        d_vocab=fields.size("d_vocab", 0),
        act="silu",
        gated_mlp=True,
        norm="rmsnorm",
        norm_eps=_exact(fields.number("attention.layer_norm_rms_epsilon", 1e-5)),
        positions="rotary",
        rotary_base=_exact(fields.number("rope.freq_base", 10_000.0)),
        rotary_dim=fields.size("rope.dimension_count", d_head),
        rotary_scaling=linear if scaling == "linear" else None,
        window=(fields.get("attention.sliding_window"),) * n_layers,
        bias_qkv=fields.flag("bias_qkv", False),
        bias_out=fields.flag("bias_out", False),
        bias_mlp=False,
        qk_norm=fields.flag("qk_norm", False),
        tie_embeddings=fields.flag("tied", False),
    )


def _gpt2_config(fields: Fields) -> GPTConfig:
    return GPTConfig(
        n_layers=fields.size("block_count", 0),
        d_model=fields.size("embedding_length", 0),
        n_heads=fields.size("attention.head_count", 0),
        n_ctx=fields.size("context_length", 0),
        d_vocab=fields.size("d_vocab", 0),
        d_mlp=fields.size("feed_forward_length", 0),
        act="gelu_new",
        norm_eps=_exact(fields.number("attention.layer_norm_epsilon", 1e-5)),
        bias_qkv=True,
        tie_embeddings=fields.flag("tied", False),
    )


def _planes_apart(tensor: Tensor, config: GPTConfig) -> Tensor:
    """Undo llama.cpp's order of a head's query and key rows: a plane's two rows stand together, ours half a head apart.

    Source: `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    planes = tensor.view(-1, config.d_head // 2, 2, *tensor.shape[1:])
    return planes.transpose(1, 2)


_BLOCK = "blk.{l}"
_SHARED: dict[str, Stored] = {
    "embed.weight": stored("token_embd.weight"),
    "unembed.weight": stored("output.weight"),
    **affine("blocks.{l}.attn.out", f"{_BLOCK}.attn_output"),
    **affine("blocks.{l}.mlp.up", f"{_BLOCK}.ffn_up"),
    **affine("blocks.{l}.mlp.down", f"{_BLOCK}.ffn_down"),
    **layernorm("blocks.{l}.ln1", f"{_BLOCK}.attn_norm"),
    **layernorm("blocks.{l}.ln2", f"{_BLOCK}.ffn_norm"),
    **layernorm("ln_final", "output_norm"),
}
_SEPARATE: dict[str, Stored] = {
    **_SHARED,
    "blocks.{l}.mlp.gate.weight": stored(f"{_BLOCK}.ffn_gate.weight"),
    "blocks.{l}.attn.q_norm.w": stored(f"{_BLOCK}.attn_q_norm.weight"),
    "blocks.{l}.attn.k_norm.w": stored(f"{_BLOCK}.attn_k_norm.weight"),
    **{
        f"blocks.{{l}}.attn.qkv.{part}": stored(*(f"{_BLOCK}.attn_{x}.{part}" for x in "qkv"))
        for part in ("weight", "bias")
    },
}
_FUSED: dict[str, Stored] = {
    **_SHARED,
    "pos_embed.weight": stored("position_embd.weight"),
    **affine("blocks.{l}.attn.qkv", f"{_BLOCK}.attn_qkv"),
}
_LLAMA: dict[str, Stored] = {
    **_SEPARATE,
    **{
        f"blocks.{{l}}.attn.qkv.{part}": (
            stored(f"{_BLOCK}.attn_q.{part}", f"{_BLOCK}.attn_k.{part}", view=_planes_apart)
            + stored(f"{_BLOCK}.attn_v.{part}")
        )
        for part in ("weight", "bias")
    },
}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", _llama_config, _LLAMA, "", r"^rope_freqs\.weight$"),
    "qwen2": Family("qwen2", _llama_config, _SEPARATE, ""),
    "qwen3": Family("qwen3", _llama_config, _SEPARATE, ""),
    "gpt2": Family("gpt2", _gpt2_config, _FUSED, ""),
}
