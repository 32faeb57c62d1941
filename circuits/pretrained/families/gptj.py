"""GPT-J: interleaved rotary positions on part of a head, parallel blocks behind one norm, a bias on the logits."""

from __future__ import annotations

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, affine, layernorm, stored
from circuits.pretrained.fields import Fields


def _config(fields: Fields) -> GPTConfig:
    d_model = fields.size("n_embd", 4096)
    return GPTConfig(
        n_layers=fields.size("n_layer", 28),
        d_model=d_model,
        n_heads=fields.size("n_head", 16),
        n_ctx=fields.size("n_positions", 2048),
        d_vocab=fields.size("vocab_size", 50400),
        d_mlp=fields.get("n_inner") or 4 * d_model,
        act=fields.activation("activation_function", "gelu_new"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        positions="rotary",
        rotary_dim=fields.size("rotary_dim", 64),
        rotary_layout="interleaved",
        parallel_blocks="shared_norm",
        bias_out=False,
        bias_unembed=True,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
    )


_BLOCK = "transformer.h.{l}"
GPTJ = Family(
    model_type="gptj",
    config=_config,
    prefix="transformer.",
    ignored=r"\.attn\.((masked_)?bias|embed_positions)$",
    tensors={
        "embed.weight": stored("transformer.wte.weight"),
        **layernorm("blocks.{l}.ln1", f"{_BLOCK}.ln_1"),
        "blocks.{l}.attn.qkv.weight": stored(*(f"{_BLOCK}.attn.{x}_proj.weight" for x in "qkv")),
        "blocks.{l}.attn.out.weight": stored(f"{_BLOCK}.attn.out_proj.weight"),
        **affine("blocks.{l}.mlp.up", f"{_BLOCK}.mlp.fc_in"),
        **affine("blocks.{l}.mlp.down", f"{_BLOCK}.mlp.fc_out"),
        **layernorm("ln_final", "transformer.ln_f"),
        **affine("unembed", "lm_head"),
    },
)
