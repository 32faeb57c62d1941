"""Llama (SmolLM, TinyLlama), Mistral, Qwen 2 and Qwen 3: RMSNorm, rotary positions, gated MLP, grouped queries.

They share their tensor names. What differs is told by their configs: a window (Mistral; some layers of Qwen), biases on
queries, keys and values (Qwen 2), norms on queries and keys (Qwen 3).
"""

from __future__ import annotations

from typing import Any

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, Stored, stored
from circuits.pretrained.fields import Fields


def sizes_and_rotary(
    fields: Fields, *, d_model: int, d_mlp: int, n_layers: int, n_heads: int, n_ctx: int, d_vocab: int
) -> dict[str, Any]:
    """What these families say in the same words; the arguments are a family's defaults."""
    d_model, n_heads = fields.size("hidden_size", d_model), fields.size("num_attention_heads", n_heads)
    n_ctx = fields.size("max_position_embeddings", n_ctx)
    d_head = fields.get("head_dim") or d_model // n_heads
    return {
        "n_layers": fields.size("num_hidden_layers", n_layers),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_ctx": n_ctx,
        "d_vocab": fields.size("vocab_size", d_vocab),
        "d_head": d_head,
        "d_mlp": fields.size("intermediate_size", d_mlp),
        "gated_mlp": True,
        "norm": "rmsnorm",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "bias_mlp": False,
        **fields.rotary(d_head, n_ctx),
    }


def llama_config(fields: Fields) -> GPTConfig:
    """Llama."""
    fields.only("mlp_bias", False)
    shared = sizes_and_rotary(fields, d_model=4096, d_mlp=11008, n_layers=32, n_heads=32, n_ctx=2048, d_vocab=32000)
    biases = fields.flag("attention_bias", False)
    return GPTConfig(
        **shared,
        n_kv_heads=fields.get("num_key_value_heads") or shared["n_heads"],
        act=fields.activation("hidden_act", "silu"),
        bias_qkv=biases,
        bias_out=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _mistral_config(fields: Fields) -> GPTConfig:
    shared = sizes_and_rotary(
        fields, d_model=4096, d_mlp=14336, n_layers=32, n_heads=32, n_ctx=4096 * 32, d_vocab=32000
    )
    return GPTConfig(
        **shared,
        n_kv_heads=fields.get("num_key_value_heads", 8) or shared["n_heads"],
        act=fields.activation("hidden_act", "silu"),
        window=(fields.get("sliding_window", 4096),) * shared["n_layers"],
        bias_out=False,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _qwen_config(fields: Fields, *, bias_qkv: bool, bias_out: bool, qk_norm: bool) -> GPTConfig:
    shared = sizes_and_rotary(fields, d_model=4096, d_mlp=22016, n_layers=32, n_heads=32, n_ctx=32768, d_vocab=151936)
    n_layers, first = shared["n_layers"], fields.size("max_window_layers", 28)
    windowed = fields.flag("use_sliding_window", False)
    kinds = ["sliding_attention" if windowed and layer >= first else "full_attention" for layer in range(n_layers)]
    return GPTConfig(
        **shared,
        n_kv_heads=fields.get("num_key_value_heads", 32) or shared["n_heads"],
        act=fields.activation("hidden_act", "silu"),
        window=fields.windows(n_layers, kinds, 4096) if windowed else (None,) * n_layers,
        bias_qkv=bias_qkv,
        bias_out=bias_out,
        qk_norm=qk_norm,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


def _qwen2_config(fields: Fields) -> GPTConfig:
    return _qwen_config(fields, bias_qkv=True, bias_out=False, qk_norm=False)


def _qwen3_config(fields: Fields) -> GPTConfig:
    biases = fields.flag("attention_bias", False)
    with_width = Fields({"head_dim": 128, **fields.data})
    return _qwen_config(with_width, bias_qkv=biases, bias_out=biases, qk_norm=True)


BLOCK = "model.layers.{l}"
ATTENTION_AND_MLP: dict[str, Stored] = {
    **{
        f"blocks.{{l}}.attn.qkv.{part}": stored(*(f"{BLOCK}.self_attn.{x}_proj.{part}" for x in "qkv"))
        for part in ("weight", "bias")
    },
    **{f"blocks.{{l}}.attn.out.{part}": stored(f"{BLOCK}.self_attn.o_proj.{part}") for part in ("weight", "bias")},
    **{f"blocks.{{l}}.mlp.{x}.weight": stored(f"{BLOCK}.mlp.{x}_proj.weight") for x in ("up", "gate", "down")},
}
TENSORS: dict[str, Stored] = {
    "embed.weight": stored("model.embed_tokens.weight"),
    "blocks.{l}.ln1.w": stored(f"{BLOCK}.input_layernorm.weight"),
    "blocks.{l}.attn.q_norm.w": stored(f"{BLOCK}.self_attn.q_norm.weight"),
    "blocks.{l}.attn.k_norm.w": stored(f"{BLOCK}.self_attn.k_norm.weight"),
    "blocks.{l}.ln2.w": stored(f"{BLOCK}.post_attention_layernorm.weight"),
    **ATTENTION_AND_MLP,
    "ln_final.w": stored("model.norm.weight"),
    "unembed.weight": stored("lm_head.weight"),
}

LLAMA = Family("llama", llama_config, TENSORS, "model.")
MISTRAL = Family("mistral", _mistral_config, TENSORS, "model.")
QWEN2 = Family("qwen2", _qwen2_config, TENSORS, "model.")
QWEN3 = Family("qwen3", _qwen3_config, TENSORS, "model.")
