"""GPT-NeoX and Pythia: rotary positions on part of a head, parallel blocks with two norms, q, k, v fused by head."""

from __future__ import annotations

from torch import Tensor

from circuits.config import GPTConfig
from circuits.pretrained.family import Family, affine, layernorm, stored
from circuits.pretrained.fields import Fields


def _config(fields: Fields) -> GPTConfig:
    d_model, n_heads = fields.size("hidden_size", 6144), fields.size("num_attention_heads", 64)
    n_ctx = fields.size("max_position_embeddings", 2048)
    rotary = fields.rotary(
        d_model // n_heads, n_ctx, fraction=0.25, base_name="rotary_emb_base", fraction_name="rotary_pct"
    )
    biases = fields.flag("attention_bias", True)
    return GPTConfig(
        n_layers=fields.size("num_hidden_layers", 44),
        d_model=d_model,
        n_heads=n_heads,
        n_ctx=n_ctx,
        d_vocab=fields.size("vocab_size", 50432),
        d_mlp=fields.size("intermediate_size", 24576),
        act=fields.activation("hidden_act", "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        parallel_blocks="two_norms" if fields.flag("use_parallel_residual", True) else False,
        bias_qkv=biases,
        bias_out=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        **rotary,
    )


def _by_head(tensor: Tensor, config: GPTConfig) -> Tensor:
    """Rows stand as ``[head, (q, k, v), d_head]``; ours as ``[(q, k, v), head, d_head]``."""
    return tensor.view(config.n_heads, 3, config.d_head, *tensor.shape[1:]).transpose(0, 1)


_BLOCK = "gpt_neox.layers.{l}"
GPT_NEOX = Family(
    model_type="gpt_neox",
    config=_config,
    prefix="gpt_neox.",
    ignored=r"\.attention\.((masked_)?bias|rotary_emb\.inv_freq)$",
    tensors={
        "embed.weight": stored("gpt_neox.embed_in.weight"),
        **layernorm("blocks.{l}.ln1", f"{_BLOCK}.input_layernorm"),
        **affine("blocks.{l}.attn.qkv", f"{_BLOCK}.attention.query_key_value", view=_by_head),
        **affine("blocks.{l}.attn.out", f"{_BLOCK}.attention.dense"),
        **layernorm("blocks.{l}.ln2", f"{_BLOCK}.post_attention_layernorm"),
        **affine("blocks.{l}.mlp.up", f"{_BLOCK}.mlp.dense_h_to_4h"),
        **affine("blocks.{l}.mlp.down", f"{_BLOCK}.mlp.dense_4h_to_h"),
        **layernorm("ln_final", "gpt_neox.final_layer_norm"),
        "unembed.weight": stored("embed_out.weight"),
    },
)
