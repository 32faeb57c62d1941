"""GPT-Neo: GPT-2 with unscaled scores, no biases on queries, keys and values, and a window in every other layer."""

from __future__ import annotations

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, affine, layernorm, stored
from circuits.pretrained.fields import Fields


def _windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """``[[["global", "local"], 12]]`` is that pair twelve times over."""
    groups = fields.get("attention_types") or [[["global", "local"], 12]]
    kinds = [kind for pattern, times in groups for _ in range(times) for kind in pattern]
    if len(kinds) != n_layers or not set(kinds) <= {"global", "local"}:
        raise fields.unsupported("attention_types", groups, f"'global' or 'local' for each of {n_layers} layers")
    window = fields.size("window_size", 256)
    return tuple(window if kind == "local" else None for kind in kinds)


def _config(fields: Fields) -> GPTConfig:
    n_layers = fields.size("num_layers", 24)
    d_model = fields.size("hidden_size", 2048)
    return GPTConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=fields.size("num_heads", 16),
        n_ctx=fields.size("max_position_embeddings", 2048),
        d_vocab=fields.size("vocab_size", 50257),
        d_mlp=fields.get("intermediate_size") or 4 * d_model,
        act=fields.activation("activation_function", "gelu_new"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        attn_scale=1.0,
        window=_windows(fields, n_layers),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


_BLOCK = "transformer.h.{l}"
_ATTENTION = f"{_BLOCK}.attn.attention"
GPT_NEO = Family(
    model_type="gpt_neo",
    config=_config,
    prefix="transformer.",
    ignored=r"\.attn\.attention\.(masked_)?bias$",
    tensors={
        "embed.weight": stored("transformer.wte.weight"),
        "pos_embed.weight": stored("transformer.wpe.weight"),
        **layernorm("blocks.{l}.ln1", f"{_BLOCK}.ln_1"),
        "blocks.{l}.attn.qkv.weight": stored(*(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv")),
        **affine("blocks.{l}.attn.out", f"{_ATTENTION}.out_proj"),
        **layernorm("blocks.{l}.ln2", f"{_BLOCK}.ln_2"),
        **affine("blocks.{l}.mlp.up", f"{_BLOCK}.mlp.c_fc"),
        **affine("blocks.{l}.mlp.down", f"{_BLOCK}.mlp.c_proj"),
        **layernorm("ln_final", "transformer.ln_f"),
        "unembed.weight": stored("lm_head.weight"),
    },
)
