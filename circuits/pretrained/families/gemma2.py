"""Gemma 2: Llama's parts with norms on what a branch adds, soft caps, and a window in every other layer.

Its norms multiply by ``1 + w``; that sum is what is kept here, so a norm's gain is always a gain.
"""

from __future__ import annotations

from torch import Tensor

from circuits.config import GPTConfig
from circuits.pretrained.families.llama import ATTENTION_AND_MLP, BLOCK, sizes_and_rotary
from circuits.pretrained.family import Family, stored
from circuits.pretrained.fields import Fields


def _config(fields: Fields) -> GPTConfig:
    fields.only("use_bidirectional_attention", None)
    with_width = Fields({"head_dim": 256, **fields.data})
    shared = sizes_and_rotary(with_width, d_model=2304, d_mlp=9216, n_layers=26, n_heads=8, n_ctx=8192, d_vocab=256_000)
    n_layers, biases = shared["n_layers"], fields.flag("attention_bias", False)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(n_layers)]
    return GPTConfig(
        **shared,
        n_kv_heads=fields.size("num_key_value_heads", 4),
        act=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        branch_norm=True,
        attn_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attn_softcap=fields.get("attn_logit_softcapping", 50.0),
        logit_softcap=fields.get("final_logit_softcapping", 30.0),
        window=fields.windows(n_layers, kinds, 4096),
        embed_scale=shared["d_model"] ** 0.5,
        bias_qkv=biases,
        bias_out=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _one_plus(tensor: Tensor, config: GPTConfig) -> Tensor:
    """In float32 at least: most gains are near 1, where bfloat16 keeps two decimals."""
    return 1.0 + (tensor if tensor.element_size() >= 4 else tensor.float())


_NORMS = {
    "blocks.{l}.ln1.w": f"{BLOCK}.input_layernorm.weight",
    "blocks.{l}.ln1_post.w": f"{BLOCK}.post_attention_layernorm.weight",
    "blocks.{l}.ln2.w": f"{BLOCK}.pre_feedforward_layernorm.weight",
    "blocks.{l}.ln2_post.w": f"{BLOCK}.post_feedforward_layernorm.weight",
    "ln_final.w": "model.norm.weight",
}
GEMMA2 = Family(
    model_type="gemma2",
    config=_config,
    prefix="model.",
    tensors={
        "embed.weight": stored("model.embed_tokens.weight"),
        **ATTENTION_AND_MLP,
        **{ours: stored(theirs, view=_one_plus) for ours, theirs in _NORMS.items()},
        "unembed.weight": stored("lm_head.weight"),
    },
)
