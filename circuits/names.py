"""The hook-name vocabulary: the only place where such strings are built.

A name says what a tensor is and where it stands: ``blocks.2.attn.hook_pattern`` is the attention pattern of layer 2.
`hook_names` lists those an architecture has, in the order in which a forward pass reaches them.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from circuits.config import GPTConfig

NamesFilter = str | Iterable[str] | Callable[[str], bool] | None

EMBED = "hook_embed"
POS_EMBED = "hook_pos_embed"
FINAL_SCALE = "ln_final.hook_scale"
FINAL_NORMALIZED = "ln_final.hook_normalized"

# Costly to hold ([batch pos head d_model]), so captured only where named.
NOT_BY_DEFAULT = ("hook_q_input", "hook_k_input", "hook_v_input", "attn.hook_result")

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Every hook name of one block, built once when the block is."""

    layer: int
    resid_pre: str
    ln1_scale: str
    ln1_normalized: str
    q_input: str
    k_input: str
    v_input: str
    q: str
    k: str
    v: str
    q_norm_scale: str
    q_norm_normalized: str
    k_norm_scale: str
    k_norm_normalized: str
    rot_q: str
    rot_k: str
    scores: str
    pattern: str
    z: str
    result: str
    ln1_post_scale: str
    ln1_post_normalized: str
    attn_out: str
    resid_mid: str
    mlp_in: str
    ln2_scale: str
    ln2_normalized: str
    pre: str
    pre_linear: str
    post: str
    ln2_post_scale: str
    ln2_post_normalized: str
    mlp_out: str
    resid_post: str


# Field of BlockNames -> what stands behind "blocks.{l}.", in the order of a forward pass.
_WITHIN_BLOCK = {
    "resid_pre": "hook_resid_pre",
    "ln1_scale": "ln1.hook_scale",
    "ln1_normalized": "ln1.hook_normalized",
    "q_input": "hook_q_input",
    "k_input": "hook_k_input",
    "v_input": "hook_v_input",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "q_norm_scale": "attn.q_norm.hook_scale",
    "q_norm_normalized": "attn.q_norm.hook_normalized",
    "k_norm_scale": "attn.k_norm.hook_scale",
    "k_norm_normalized": "attn.k_norm.hook_normalized",
    "rot_q": "attn.hook_rot_q",
    "rot_k": "attn.hook_rot_k",
    "scores": "attn.hook_attn_scores",
    "pattern": "attn.hook_pattern",
    "z": "attn.hook_z",
    "result": "attn.hook_result",
    "ln1_post_scale": "ln1_post.hook_scale",
    "ln1_post_normalized": "ln1_post.hook_normalized",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_in": "hook_mlp_in",
    "ln2_scale": "ln2.hook_scale",
    "ln2_normalized": "ln2.hook_normalized",
    "pre": "mlp.hook_pre",
    "pre_linear": "mlp.hook_pre_linear",
    "post": "mlp.hook_post",
    "ln2_post_scale": "ln2_post.hook_scale",
    "ln2_post_normalized": "ln2_post.hook_normalized",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}


@lru_cache(maxsize=1024)
def block_names(layer: int) -> BlockNames:
    """The names of block `layer`, whether or not the architecture has all of them."""
    return BlockNames(layer, **{field: f"blocks.{layer}.{tail}" for field, tail in _WITHIN_BLOCK.items()})


def _absent(config: GPTConfig) -> set[str]:
    """Fields of `BlockNames` that blocks of this architecture do not have."""
    absent: set[str] = set()
    if config.norm is None:
        absent |= {"ln1_scale", "ln1_normalized", "ln2_scale", "ln2_normalized"}
    if config.attn_only:
        absent |= {"mlp_in", "ln2_scale", "ln2_normalized", "pre", "post", "mlp_out"}
        absent |= {"ln2_post_scale", "ln2_post_normalized"}
    if config.parallel_blocks == "shared_norm":
        absent |= {"ln2_scale", "ln2_normalized"}
    if not config.has_resid_mid:
        absent.add("resid_mid")
    if not config.gated_mlp:
        absent.add("pre_linear")
    if not config.qk_norm:
        absent |= {"q_norm_scale", "q_norm_normalized", "k_norm_scale", "k_norm_normalized"}
    if config.positions != "rotary":
        absent |= {"rot_q", "rot_k"}
    if not config.branch_norm:
        absent |= {"ln1_post_scale", "ln1_post_normalized", "ln2_post_scale", "ln2_post_normalized"}
    return absent


def _order(config: GPTConfig) -> list[str]:
    """Fields of `BlockNames` in the order in which a block of this architecture reaches them."""
    fields = list(_WITHIN_BLOCK)
    if config.norm_placement == "post":
        # The norms stand after the additions: ln1 makes resid_mid, ln2 makes resid_post.
        for pair, target in (("ln1", "resid_mid"), ("ln2", "resid_post")):
            moved = [f"{pair}_scale", f"{pair}_normalized"]
            fields = [f for f in fields if f not in moved]
            at = fields.index(target)
            fields[at:at] = moved
    absent = _absent(config)
    return [field for field in fields if field not in absent]


def hook_names(config: GPTConfig) -> tuple[str, ...]:
    """Every hook name that a model of this architecture has, in the order of a forward pass."""
    names = [EMBED]
    if config.positions == "learned":
        names.append(POS_EMBED)
    fields = _order(config)
    for layer in range(config.n_layers):
        names += [f"blocks.{layer}.{_WITHIN_BLOCK[field]}" for field in fields]
    if config.final_norm:
        names += [FINAL_SCALE, FINAL_NORMALIZED]
    return tuple(names)


def layer_of(name: str) -> int | None:
    """The layer that a hook name belongs to, or None outside the blocks."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def by_default(name: str) -> bool:
    """Whether ``names_filter=None`` captures this name."""
    return not name.endswith(NOT_BY_DEFAULT)


def unknown_name(name: str, names: Iterable[str]) -> str:
    """The message for a hook name that the model does not have, with the closest that it has."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    hint = f"; the closest are {', '.join(close)}" if close else f"; it has {len(names)}, listed by model.hook_names"
    return f"this model has no hook named {name!r}{hint}"


def resolve(names_filter: NamesFilter, names: tuple[str, ...]) -> frozenset[str]:
    """The hook names that a filter selects.

    Args:
        names_filter: None (everything but the costly ones), one name, several names, or a predicate on names.
        names: The names that the model has.

    Raises:
        KeyError: A name that the model does not have, with the closest that it has; or a predicate that selects none.
        TypeError: A filter of another kind.
    """
    if names_filter is None:
        return frozenset(filter(by_default, names))
    if isinstance(names_filter, str):
        names_filter = [names_filter]
    if callable(names_filter):
        selected = frozenset(name for name in names if names_filter(name))
        if not selected:
            raise KeyError(f"the predicate selects no hook of this model, which has {len(names)}: model.hook_names")
        return selected
    if not isinstance(names_filter, Iterable):
        raise TypeError(f"names_filter must be None, a name, names or a predicate, not {names_filter!r}")
    wanted = list(names_filter)
    known = set(names)
    for name in wanted:
        if not isinstance(name, str):
            raise TypeError(f"a hook name must be a string, not {name!r}")
        if name not in known:
            raise KeyError(unknown_name(name, names))
    return frozenset(wanted)


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def layer_index(layer: int, n_layers: int) -> int:
    """The layer counted from the front; negative ones count from the end.

    Raises:
        TypeError: Not a whole number.
        IndexError: A layer that the model does not have.
    """
    if not _is_whole(layer):
        raise TypeError(f"a layer must be a whole number, not {layer!r}")
    index = operator.index(layer)
    if not -n_layers <= index < n_layers:
        raise IndexError(f"layer {index} is not in a model of {n_layers} layers")
    return index % n_layers


# Other names that a stem is known by, in TransformerLens or in speech.
_STEMS = {"attn": "pattern", "attn_logits": "attn_scores", "scores": "attn_scores", "query": "q", "key": "k"}
_STEMS |= {"value": "v", "mlp_pre": "pre", "mlp_post": "post"}


def full_name(key: str | tuple[str, int] | tuple[str, int, str], names: Iterable[str], n_layers: int) -> str:
    """The full hook name for a shorthand: ``("pattern", 0)`` is ``"blocks.0.attn.hook_pattern"``.

    A pair is a stem and a layer (negative layers count from the end); ``("scale", 0, "ln1")`` names the module as
    well, where a stem alone would be ambiguous. A string is a full name, or the stem of a name outside the blocks.

    Raises:
        KeyError: A key that names nothing here, with the closest names.
        IndexError: A layer that the model does not have.
    """
    names = list(names)
    if isinstance(key, str):
        for candidate in (key, f"hook_{key}"):
            if candidate in names:
                return candidate
        stem = key.removeprefix("hook_")
        if any(name.endswith(f".hook_{stem}") and layer_of(name) is not None for name in names):
            raise KeyError(f"{key!r} stands in every layer; say which: ({stem!r}, 0)")
        raise KeyError(unknown_name(key, names))
    if not (isinstance(key, tuple) and 2 <= len(key) <= 3 and isinstance(key[0], str) and _is_whole(key[1])):
        raise KeyError(f"expected a hook name or (stem, layer), such as ('pattern', 0), not {key!r}")
    stem, layer = key[0].removeprefix("hook_"), layer_index(key[1], n_layers)
    module = f"{key[2]}." if len(key) == 3 else ""
    prefix = f"blocks.{layer}."
    stem = _STEMS.get(stem, stem)
    for within in (module,) if module else ("", "attn.", "mlp."):
        if f"{prefix}{within}hook_{stem}" in names:
            return f"{prefix}{within}hook_{stem}"
    wanted = f"{prefix}{module}hook_{stem}"
    raise KeyError(unknown_name(wanted, names))
