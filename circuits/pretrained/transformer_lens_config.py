"""TransformerLens' own config as a `GPTConfig`: that of its native models, and of a 3.x `HookedTransformer`."""

from __future__ import annotations

import math
from typing import Any

from circuits.config import GPTConfig, RotaryScaling
from circuits.pretrained.fields import ACTIVATIONS, Fields

NATIVE = "TransformerLensNative"

_NORMS = {"LN": "layernorm", "LNPRE": "layernorm", "RMS": "rmsnorm", "RMSPRE": "rmsnorm", None: None}
_POSITIONS = {"standard": "learned", "rotary": "rotary", "none": None}


def config_of(cfg: Any) -> GPTConfig:
    """The configuration of a model that TransformerLens computes itself.

    Raises:
        UnsupportedModel: A value that has no equal here; by name.
    """
    fields = Fields({**vars(cfg), "model_type": "TransformerLens"})
    _refuse(fields)
    native = fields.get("architecture") == NATIVE
    kind = fields.get("normalization_type")
    norm = _choice(fields, "normalization_type", kind.upper() if kind else None, _NORMS)
    if norm == "layernorm":
        fields.only("final_rms", False)
    attn_only = fields.flag("attn_only", False)
    n_heads, d_head = fields.size("n_heads", 0), fields.size("d_head", 0)
    positions = _choice(fields, "positional_embedding_type", fields.get("positional_embedding_type"), _POSITIONS)
    return GPTConfig(
        n_layers=fields.size("n_layers", 0),
        d_model=fields.size("d_model", 0),
        n_heads=n_heads,
        n_kv_heads=fields.get("n_key_value_heads") or n_heads,
        n_ctx=fields.size("n_ctx", 0),
        d_vocab=fields.size("d_vocab", 0),
        d_head=d_head,
        d_mlp=0 if attn_only else fields.size("d_mlp", 0),
        act="gelu" if attn_only else _choice(fields, "act_fn", fields.get("act_fn"), ACTIVATIONS),
        gated_mlp=fields.flag("gated_mlp", False) and not attn_only,
        attn_only=attn_only,
        norm=norm,
        norm_eps=fields.number("eps", 1e-5),
        logit_softcap=_cap(fields, "output_logits_soft_cap"),
        attn_softcap=_cap(fields, "attn_scores_soft_cap"),
        attn_scale=_scale(fields, d_head, native),
        **(_rotary(fields, d_head, native) if positions == "rotary" else {"positions": positions}),
        **({} if native else _what_native_models_lack(fields, attn_only)),
    )


def _refuse(fields: Fields) -> None:
    """Values that change what is computed and have no equal here."""
    fields.only("attention_dir", "causal")
    fields.only("num_experts", None)
    fields.only("post_embedding_ln", False)
    fields.only("scale_attn_by_inverse_layer_idx", False)
    if fields.get("d_vocab_out", -1) not in (-1, fields.get("d_vocab")):
        raise fields.unsupported("d_vocab_out", fields.get("d_vocab_out"), f"d_vocab, {fields.get('d_vocab')}")


def _choice(fields: Fields, name: str, value: Any, choices: dict[Any, Any]) -> Any:
    if value not in choices:
        raise fields.unsupported(name, value, ", ".join(map(repr, choices)))
    return choices[value]


def _cap(fields: Fields, name: str) -> float | None:
    """A soft cap; they write −1 for none."""
    cap = fields.number(name, -1.0)
    return cap if cap > 0 else None


def _scale(fields: Fields, d_head: int, native: bool) -> float:
    """The factor on scores, of which they keep the inverse.

    Unscaled scores are 3.x's ``use_attn_scale=False``; native models ignore that.
    """
    usual: float = d_head**-0.5
    if not fields.flag("use_attn_scale", True):
        return usual if native else 1.0
    divisor = fields.number("attn_scale", -1.0)
    return usual if divisor <= 0 or math.isclose(divisor, d_head**0.5) else 1.0 / divisor


def _rotary(fields: Fields, d_head: int, native: bool) -> dict[str, Any]:
    """Rotary positions. Native models turn neighbouring coordinates; 3.x says which."""
    stretched = fields.get("rope_scaling") if native else None
    return {
        "positions": "rotary",
        "rotary_dim": fields.get("rotary_dim") or d_head,
        "rotary_base": fields.number("rotary_base", 10_000.0),
        "rotary_layout": "interleaved" if native or fields.flag("rotary_adjacent_pairs", False) else "half",
        "rotary_scaling": fields.rotary_scaling(stretched, 8192) if stretched else _by_parts(fields, native),
    }


def _by_parts(fields: Fields, native: bool) -> RotaryScaling | None:
    if native or not fields.flag("use_NTK_by_parts_rope", False):
        return None
    return RotaryScaling(
        kind="llama3",
        factor=fields.number("NTK_by_parts_factor", 8.0),
        low_freq_factor=fields.number("NTK_by_parts_low_freq_factor", 1.0),
        high_freq_factor=fields.number("NTK_by_parts_high_freq_factor", 4.0),
        original_n_ctx=fields.size("NTK_original_ctx_len", 8192),
    )


def _what_native_models_lack(fields: Fields, attn_only: bool) -> dict[str, Any]:
    """Fields that 3.x computes with and native models do not look at."""
    n_layers = fields.size("n_layers", 0)
    kinds = (fields.get("attn_types") or ["global"] * n_layers) if fields.flag("use_local_attn", False) else []
    parallel = fields.flag("parallel_attn_mlp", False) and not attn_only
    return {
        "parallel_blocks": "two_norms" if parallel else False,
        "branch_norm": fields.flag("use_normalization_before_and_after", False),
        "qk_norm": fields.flag("use_qk_norm", False),
        "window": tuple(fields.get("window_size") if kind == "local" else None for kind in kinds) or (None,) * n_layers,
    }
