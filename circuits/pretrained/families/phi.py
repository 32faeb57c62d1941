"""Phi (1, 1.5 and 2): parallel blocks behind one LayerNorm, rotary positions on part of a head, biases everywhere."""

from __future__ import annotations

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, affine, layernorm, stored
from circuits.pretrained.fields import Fields


def _config(fields: Fields) -> GPTConfig:
    fields.only("qk_layernorm", False)
    d_model, n_heads = fields.size("hidden_size", 2048), fields.size("num_attention_heads", 32)
    n_ctx = fields.size("max_position_embeddings", 2048)
    return GPTConfig(
        n_layers=fields.size("num_hidden_layers", 24),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=fields.get("num_key_value_heads") or n_heads,
        n_ctx=n_ctx,
        d_vocab=fields.size("vocab_size", 51200),
        d_mlp=fields.size("intermediate_size", 8192),
        act=fields.activation("hidden_act", "gelu_new"),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        parallel_blocks="shared_norm",
        bias_qkv=True,
        bias_unembed=True,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        **fields.rotary(d_model // n_heads, n_ctx, fraction=0.5),
    )


_BLOCK = "model.layers.{l}"
PHI = Family(
    model_type="phi",
    config=_config,
    prefix="model.",
    tensors={
        "embed.weight": stored("model.embed_tokens.weight"),
        **layernorm("blocks.{l}.ln1", f"{_BLOCK}.input_layernorm"),
        **{
            f"blocks.{{l}}.attn.qkv.{part}": stored(*(f"{_BLOCK}.self_attn.{x}_proj.{part}" for x in "qkv"))
            for part in ("weight", "bias")
        },
        **affine("blocks.{l}.attn.out", f"{_BLOCK}.self_attn.dense"),
        **affine("blocks.{l}.mlp.up", f"{_BLOCK}.mlp.fc1"),
        **affine("blocks.{l}.mlp.down", f"{_BLOCK}.mlp.fc2"),
        **layernorm("ln_final", "model.final_layernorm"),
        **affine("unembed", "lm_head"),
    },
)
