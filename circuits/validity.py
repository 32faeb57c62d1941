"""Which configurations can mean anything: types, choices, sizes, and fields that contradict each other.

Every refusal names the field, what was expected and what came.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from circuits.config import GPTConfig

ACTIVATIONS = ("gelu", "gelu_new", "relu", "silu")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "act": ACTIVATIONS,
    "norm": ("layernorm", "rmsnorm", None),
    "norm_placement": ("pre", "post"),
    "positions": ("learned", "rotary", None),
    "rotary_layout": ("half", "interleaved"),
    "parallel_blocks": (False, "shared_norm", "two_norms"),
}
_FLAGS = (
    "gated_mlp attn_only bias_qkv bias_out bias_mlp bias_unembed tie_embeddings qk_norm branch_norm final_norm".split()
)
_POSITIVE_SIZES = "n_layers d_model n_heads n_ctx d_vocab d_head n_kv_heads".split()


def require_positive_number(name: str, value: object) -> None:
    """Refuse what is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, not {value!r}")


def require_size(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number (a Python int), not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def require_whole(name: str, value: object, least: int = 1) -> int:
    """The value as an int: a whole number of any library, of at least `least` and below 2⁶³.

    Raises:
        TypeError: Not a whole number.
        ValueError: Out of range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]  # it says so itself
    except TypeError:  # a tensor has an index where it is one whole number
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    if number >= 2**63:
        raise ValueError(f"{name} must be below 2**63, not {number}")
    return number


def require_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: What came instead.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_given(config: GPTConfig) -> None:
    """Types and choices of what the caller gave, before anything is derived from it."""
    for name in _POSITIVE_SIZES:
        if getattr(config, name) is not None:
            require_size(name, getattr(config, name))
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            raise ValueError(f"{name} {value!r} is not one of {', '.join(map(repr, choices))}")
    for name in _FLAGS:
        value = getattr(config, name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")
    for name in ("norm_eps", "rotary_base", "attn_scale", "attn_softcap", "logit_softcap", "embed_scale"):
        value = getattr(config, name)
        if value is not None:
            require_positive_number(name, value)


def check_sizes(config: GPTConfig) -> None:
    """Sizes that have to fit each other."""
    if config.attn_only:
        if config.d_mlp != 0:
            raise ValueError(f"d_mlp {config.d_mlp} was given for an attention-only model, which has no MLP")
    else:
        require_size("d_mlp", config.d_mlp)
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"n_heads {config.n_heads} is not a multiple of n_kv_heads {config.n_kv_heads}")
    if config.positions == "rotary":
        require_size("rotary_dim", config.rotary_dim)
        if config.rotary_dim % 2 or config.rotary_dim > config.d_head:
            raise ValueError(f"rotary_dim {config.rotary_dim} is not an even number of at most d_head {config.d_head}")
    elif config.rotary_dim:
        raise ValueError(f"rotary_dim {config.rotary_dim} was given, but positions is {config.positions!r}")


def check_combinations(config: GPTConfig) -> None:
    """Fields that contradict each other; each line says which and why."""
    post = config.norm_placement == "post"
    refusals = {
        "norm_placement 'post' needs a norm, but norm is None": post and config.norm is None,
        "final_norm True needs a norm, but norm is None": config.final_norm and config.norm is None,
        "branch_norm True needs a norm, but norm is None": config.branch_norm and config.norm is None,
        "branch_norm True normalises a branch before it is added, which norm_placement 'post' replaces": (
            config.branch_norm and post
        ),
        f"parallel_blocks {config.parallel_blocks!r} needs norm_placement 'pre'": bool(config.parallel_blocks) and post,
        f"parallel_blocks {config.parallel_blocks!r} needs MLPs, but attn_only is True": (
            bool(config.parallel_blocks) and config.attn_only
        ),
        "gated_mlp True needs MLPs, but attn_only is True": config.gated_mlp and config.attn_only,
        f"rotary_scaling needs positions 'rotary', not {config.positions!r}": (
            config.rotary_scaling is not None and config.positions != "rotary"
        ),
    }
    for message, refused in refusals.items():
        if refused:
            raise ValueError(message)
