"""Where a configuration leaves the lecture's conventions: the reasons why a claim does not apply to it."""

from __future__ import annotations

import math

from circuits.config import GPTConfig


def first_of(reasons: dict[str, bool]) -> str:
    """The reasons that are true, as one sentence; empty where none is."""
    return ", ".join(reason for reason, true in reasons.items() if true)


def off_attention(config: GPTConfig) -> str:
    """How its attention differs from Lecture 4's scaled dot-product attention of all earlier positions."""
    return first_of(
        {
            "positions are rotary, so that scores depend on the offset too": config.positions == "rotary",
            "queries and keys are normalised": config.qk_norm,
            f"scores are multiplied by {config.attn_scale:.4g}, not 1/√d_head = {config.d_head**-0.5:.4g}": (
                not math.isclose(config.attn_scale, config.d_head**-0.5, rel_tol=1e-6)
            ),
            "scores are soft-capped": config.attn_softcap is not None,
            "attention has windows": any(size is not None and size < config.n_ctx for size in config.window),
        }
    )


def off_block(config: GPTConfig) -> str:
    """How its blocks differ from definition 3.1, whichever norm and MLP they have."""
    return first_of(
        {
            "there are no norms": config.norm is None,
            "norms stand after the additions (post-norm)": config.norm_placement == "post",
            "attention and MLP read the stream in parallel": bool(config.parallel_blocks),
            "there are norms on what the branches add": config.branch_norm,
            "there are no MLPs": config.attn_only,
        }
    )


def off_model(config: GPTConfig) -> str:
    """How it differs from section 5 in structure; biases, activation and sizes are not structure."""
    return first_of(
        {reason: True for reason in (off_attention(config), off_block(config)) if reason}
        | {
            f"the norm is {config.norm}": config.norm == "rmsnorm",
            "MLPs are gated": config.gated_mlp,
            f"positions are {config.positions!r}, not learned": config.positions != "learned"
            and config.positions != "rotary",
            "there is no final norm": not config.final_norm,
            f"the embedding is multiplied by {config.embed_scale:.4g}": config.embed_scale != 1,
            "logits are soft-capped": config.logit_softcap is not None,
        }
    )


def off_counts(config: GPTConfig) -> str:
    """How it differs from the assumptions of theorem 5.2."""
    d = config.d_model
    two_layernorms = config.norm == "layernorm" and config.parallel_blocks != "shared_norm" and not config.branch_norm
    return first_of(
        {
            f"d_mlp is {config.d_mlp}, not 4 d_model = {4 * d}": config.d_mlp != 4 * d,
            f"n_heads · d_head is {config.n_heads * config.d_head}, not d_model = {d}": config.n_heads * config.d_head
            != d,
            f"n_kv_heads is {config.n_kv_heads}": config.n_kv_heads != config.n_heads,
            "positions are not learned": config.positions != "learned",
            "MLPs are gated": config.gated_mlp,
            "the norms of a block are not two LayerNorms": not two_layernorms,
            "there is no final norm": not config.final_norm,
            "queries and keys have gains": config.qk_norm,
            "queries, keys and values have biases": config.bias_qkv,
            "the attention output has no bias": not config.bias_out,
            "the MLPs have no biases": not config.bias_mlp and not config.attn_only,
            "the unembedding has a bias": config.bias_unembed,
            "the unembedding is tied to the embedding": config.tie_embeddings,
        }
    )
