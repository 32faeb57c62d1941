"""Own checkpoints: one safetensors file with the weights, and config, tokenizer and card in its header.

What such a file is, and how it is read and written whole, stands in `tensorfile`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.placement import check_dtype
from circuits.tensorfile import (
    FORMAT as FORMAT,
    SUFFIX as SUFFIX,
    CheckpointError as CheckpointError,
    check_writable as check_writable,
    read_header as read_header,
    read_tensors as read_tensors,
    write_tensors as write_tensors,
    written_whole as written_whole,
)
from circuits.text import Tokenizer, tokenizer_from_dict

KIND = "model"


# ---------------------------------------------------------------------------------------------------------- writing


def save(model: HookedGPT, path: str | os.PathLike[str]) -> None:
    """Write a model to one safetensors file: weights, config, tokenizer and card.

    Every tensor keeps its type, bit for bit; tied embeddings stand once. The file appears whole or not at all: it is
    written beside its place, forced to disk and then renamed.

    Raises:
        ValueError: A path that does not end in ``.safetensors``, or a model without weights.
        TypeError: Not a model, or a card that is not JSON data.
        OSError: The folder does not exist or cannot be written to.
    """
    if not isinstance(model, HookedGPT):
        raise TypeError(f"expected a HookedGPT to save, not {type(model).__name__}")
    if not isinstance(model.card, Mapping):
        raise TypeError(f"the card must be a dict of JSON data, not {model.card!r}")
    if model.device.type == "meta":
        raise ValueError("a model on the meta device has no weights to save")
    path = Path(path)
    check_writable(path)
    tokenizer = None if model.tokenizer is None else model.tokenizer.to_dict()
    header = {
        "format": FORMAT,
        "kind": KIND,
        "config": model.config.to_dict(),
        "tokenizer": tokenizer,
        "card": dict(model.card),
    }
    write_tensors(path, model.state_dict(), header)


# ---------------------------------------------------------------------------------------------------------- reading


def read(
    path: str | os.PathLike[str], *, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
) -> HookedGPT:
    """Read a model that `save` wrote.

    Args:
        path: The file.
        device: Where the weights go; by default the CPU.
        dtype: Their type; by default the one they were saved in.

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: Not such a file: a pickle, truncated, without our header, with an unknown config field, or with
            missing, extra or misshapen tensors (all of them are listed).
        TypeError, ValueError: A type or a device that no model can have.
    """
    path = Path(path)
    check_dtype(dtype)
    tensors, header = read_tensors(path, device=device)
    if header.get("kind") != KIND:
        raise CheckpointError(f"{path}: holds a {header.get('kind')}, not a {KIND}")
    config, tokenizer, card = _parsed(path, header, len(tensors))
    try:
        model = HookedGPT.from_state_dict(config, tensors)
    except ValueError as error:  # it lists every tensor that is missing, extra or misshapen
        raise CheckpointError(f"{path}: {error}") from None
    except (RuntimeError, TypeError, OverflowError):  # torch, of sizes beyond 64 bits
        raise CheckpointError(f"{path}: its config has sizes that no tensor can have: {config}") from None
    if dtype is not None:
        model.to(dtype)
    model.tokenizer = tokenizer
    model.card = card
    return model


def _parsed(path: Path, header: Mapping[str, Any], tensors: int) -> tuple[GPTConfig, Tokenizer | None, dict[str, Any]]:
    """Config, tokenizer and card of the header of a file of so many tensors."""
    for entry, needed in (("config", True), ("tokenizer", False), ("card", False)):
        value = header.get(entry)
        if not isinstance(value, dict) and (value is not None or (needed and entry in header)):
            raise CheckpointError(f"{path}: the {entry!r} in its header is not a JSON object, but {value!r:.80}")
    layers = header.get("config", {}).get("n_layers")
    if isinstance(layers, int) and layers > tensors:  # before anything is made of that many parts
        raise CheckpointError(f"{path}: its config has n_layers {layers}, but the file has {tensors} tensors")
    try:
        config = GPTConfig.from_dict(header["config"])
        tokenizer = None if header.get("tokenizer") is None else tokenizer_from_dict(header["tokenizer"])
    except KeyError as error:
        raise CheckpointError(f"{path}: its header has no {error.args[0]!r}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if tokenizer is not None and tokenizer.d_vocab > config.d_vocab:
        raise CheckpointError(f"{path}: its tokenizer has {tokenizer.d_vocab} tokens, its config {config.d_vocab}")
    return config, tokenizer, dict(header.get("card") or {})


# ------------------------------------------------------------------------------------------------ the bundled models


def bundled_names() -> tuple[str, ...]:
    """The small trained models that ship with the package, by name."""
    folder = resources.files("circuits") / "bundled"
    files = folder.iterdir() if folder.is_dir() else iter(())
    return tuple(sorted(file.name.removesuffix(SUFFIX) for file in files if file.name.endswith(SUFFIX)))


@contextlib.contextmanager
def bundled_path(name: str) -> Iterator[Path]:
    """The file of a bundled model, for as long as the block lasts.

    Raises:
        ValueError: There is no bundled model of this name.
    """
    if name not in bundled_names():
        raise ValueError(f"there is no bundled model {name!r}; there are: {', '.join(bundled_names()) or 'none'}")
    with resources.as_file(resources.files("circuits") / "bundled" / f"{name}{SUFFIX}") as path:
        yield path
