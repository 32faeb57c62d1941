"""GPT-2: learned positions, pre-norm LayerNorm, tied embeddings; weights stored as ``[in, out]``."""

from __future__ import annotations

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, affine, layernorm, stored, transposed
from circuits.pretrained.fields import Fields


def _config(fields: Fields) -> GPTConfig:
    fields.only("scale_attn_weights", True)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    fields.only("add_cross_attention", False)
    d_model = fields.size("n_embd", 768)
    return GPTConfig(
        n_layers=fields.size("n_layer", 12),
        d_model=d_model,
        n_heads=fields.size("n_head", 12),
        n_ctx=fields.size("n_positions", 1024),
        d_vocab=fields.size("vocab_size", 50257),
        d_mlp=fields.get("n_inner") or 4 * d_model,
        act=fields.activation("activation_function", "gelu_new"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        bias_qkv=True,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


_BLOCK = "transformer.h.{l}"
GPT2 = Family(
    model_type="gpt2",
    config=_config,
    prefix="transformer.",
    ignored=r"\.attn\.(masked_)?bias$",
    tensors={
        "embed.weight": stored("transformer.wte.weight"),
        "pos_embed.weight": stored("transformer.wpe.weight"),
        **layernorm("blocks.{l}.ln1", f"{_BLOCK}.ln_1"),
        **affine("blocks.{l}.attn.qkv", f"{_BLOCK}.attn.c_attn", view=transposed),
        **affine("blocks.{l}.attn.out", f"{_BLOCK}.attn.c_proj", view=transposed),
        **layernorm("blocks.{l}.ln2", f"{_BLOCK}.ln_2"),
        **affine("blocks.{l}.mlp.up", f"{_BLOCK}.mlp.c_fc", view=transposed),
        **affine("blocks.{l}.mlp.down", f"{_BLOCK}.mlp.c_proj", view=transposed),
        **layernorm("ln_final", "transformer.ln_f"),
        "unembed.weight": stored("lm_head.weight"),
    },
)
