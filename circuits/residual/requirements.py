"""Which activations a decomposition needs, and the models and caches that it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from circuits import names
from circuits.arguments import require_cache, require_model
from circuits.cache import ActivationCache
from circuits.config import GPTConfig
from circuits.finite import check_finite
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.validity import require_whole

Unit = Literal["head", "layer", "neuron"]


def needed_names(
    config: GPTConfig, unit: Unit = "head", *, layer: int | None = None, by_source: bool = False
) -> list[str]:
    """The activations that `decompose` and `direct_logit_attribution` read: a ``names_filter`` for ``run_with_cache``.

    Args:
        config: The architecture.
        unit: ``"layer"``, ``"head"`` or ``"neuron"``.
        layer: Up to the stream before this block; None for all blocks and the final norm.
        by_source: Also what a split by source position needs.

    Raises:
        ValueError: An unknown unit.
        IndexError: A layer that the model does not have.
    """
    stop = stop_layer(config, layer)
    return [*write_names(config, unit, stop, by_source=by_source), *stream_names(config, stop)]


def write_names(config: GPTConfig, unit: Unit, stop: int, *, mid: bool = False, by_source: bool = False) -> list[str]:
    """Activations behind every write before block `stop`; with `mid`, behind its attention too."""
    wanted = [names.EMBED] + ([names.POS_EMBED] if config.positions == "learned" else [])
    for layer in range(stop + mid):
        n = block_names(layer)
        if by_source:
            wanted += [n.v, n.pattern]
        if unit == "layer" and not by_source:
            wanted.append(n.attn_out)
        else:
            wanted += [n.z, *([n.ln1_post_scale] if config.branch_norm else [])]
        if not config.has_mlp or layer == stop:
            continue
        if unit == "neuron":
            wanted += [n.post, *([n.ln2_post_scale] if config.branch_norm else [])]
        else:
            wanted.append(n.mlp_out)
    return wanted


def stream_names(config: GPTConfig, stop: int) -> list[str]:
    """The stream before block `stop`; after the last block, also how the final norm scaled it."""
    if stop < config.n_layers:
        return [block_names(stop).resid_pre]
    final = [names.FINAL_SCALE, names.FINAL_NORMALIZED] if config.final_norm else []
    return [block_names(stop - 1).resid_post, *final]


def stop_layer(config: GPTConfig, layer: int | None) -> int:
    """How many whole blocks stand before the stream in question.

    Raises:
        IndexError: A layer that the model does not have.
    """
    if layer is None:
        return config.n_layers
    layer = require_whole("layer", layer, least=-(2**63))
    if not -config.n_layers <= layer < config.n_layers:
        raise IndexError(f"layer {layer} is not in a model of {config.n_layers} layers (0 to {config.n_layers - 1})")
    return layer % config.n_layers


def check_unit(unit: str) -> None:
    """Refuse a unit that does not exist.

    Raises:
        ValueError: The unit, and those there are.
    """
    if unit not in get_args(Unit):
        raise ValueError(f"unit {unit!r} is not one of {', '.join(map(repr, get_args(Unit)))}")


def check_linear(model: HookedGPT, cache: ActivationCache) -> None:
    """Refuse a model whose stream is no sum of writes, and a cache of another architecture.

    Raises:
        TypeError: No model, or no cache.
        ValueError: A post-norm model, or a cache whose config is not the model's.
    """
    require_model(model)
    require_cache(cache, model)
    if model.config.norm_placement == "post":
        raise ValueError(
            "a post-norm model's stream is not a sum of writes: every norm after an addition rescales all earlier "
            "writes, so no linear decomposition exists; only norm_placement 'pre' (or no norm) has one"
        )


def require_finite(what: str, value: Tensor, model: HookedGPT, cache: ActivationCache, used: Iterable[str]) -> None:
    """Refuse a result with NaN or infinities, and say where the first one stands.

    Only the small result is looked at; the cause is searched for when there is something wrong with it.

    Raises:
        ValueError: The first weight or activation, in the order of the forward pass, that is not finite.
    """
    if bool(torch.isfinite(value).all()):
        return
    check_finite(dict(model.named_parameters()))
    wanted = set(used)
    for name in names.hook_names(model.config):
        if name in wanted and (at := _first_bad(cache[name])) is not None:
            place = ", ".join(f"{axis} {i}" for axis, i in zip(("batch", "position"), at, strict=False))
            if name.endswith("pattern"):
                place = f"batch {at[0]}, head {at[1]}, query {at[2]}, key {at[3]}"
            raise ValueError(f"{what} is not finite: {name} is {float(cache[name][at])} first at {place}")
    raise ValueError(f"{what} is not finite, though every weight and activation is: it overflows {value.dtype}")


def _first_bad(x: Tensor) -> tuple[int, ...] | None:
    bad = ~torch.isfinite(x)
    return tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else None
