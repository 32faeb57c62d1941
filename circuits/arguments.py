"""What must be a model, a cache, a seed or whole numbers: said where a function is entered, not deep inside it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from circuits.cache import ActivationCache
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.validity import require_whole


def require_model(*models: object) -> None:
    """Refuse what is not a model, and say how to get one from what came.

    Raises:
        TypeError: A name, a configuration, or anything else.
    """
    for model in models:
        if isinstance(model, HookedGPT):
            continue
        if isinstance(model, str):
            raise TypeError(f"expected a HookedGPT, not the text {model!r}; circuits.load makes a model of a name")
        if isinstance(model, GPTConfig):
            raise TypeError("expected a HookedGPT, not a GPTConfig; HookedGPT(config) makes an untrained model of it")
        raise TypeError(f"expected a HookedGPT, not {type(model).__name__}")


def require_cache(cache: object, model: HookedGPT) -> None:
    """Refuse what is not a cache, and a cache of another architecture.

    Raises:
        TypeError: Not an ActivationCache.
        ValueError: Its config is not the model's; the message says which fields differ.
    """
    if not isinstance(cache, ActivationCache):
        raise TypeError(
            f"expected an ActivationCache, the second of what model.run_with_cache(tokens) returns, not "
            f"{type(cache).__name__}"
        )
    if cache.config != model.config:
        mine, other = model.config.to_dict(), cache.config.to_dict()
        differing = [f"{k} {other[k]!r} in the cache, {mine[k]!r} in the model" for k in mine if mine[k] != other[k]]
        raise ValueError(f"the cache came from another architecture: {'; '.join(differing)}")


def seeded(seed: object) -> torch.Generator:
    """A generator of its own for what is drawn, on the CPU.

    Raises:
        TypeError, ValueError: A seed that is not a whole number of 64 bits.
    """
    return torch.Generator().manual_seed(require_whole("seed", seed, least=-(2**63)))


def whole_numbers(what: str, given: object) -> list[int]:
    """One whole number, or several, as a list.

    Args:
        what: What one of them is, for messages: ``"position"``.
        given: What a caller gave.

    Raises:
        TypeError: Neither a whole number nor a list of them.
        ValueError: An empty list, which would silently mean nothing.
    """
    if isinstance(given, Tensor):
        given = given.tolist()
    if isinstance(given, str) or not (isinstance(given, Iterable) or hasattr(given, "__index__")):
        raise TypeError(f"{what}s must be a whole number or a list of them, not {given!r}")
    found = [require_whole(what, item, least=-(2**63)) for item in (given if isinstance(given, Iterable) else [given])]
    if not found:
        raise ValueError(f"no {what} was given: {what}s is empty")
    return found
