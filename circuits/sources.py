"""`load`: what a string, or a path, says a model is."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from circuits import storage
from circuits.model import HookedGPT

HUB_PREFIX = "hf:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    layers: Sequence[int] | None = None,
) -> HookedGPT:
    """A model by name or path.

    What `source` is, in the order in which it is asked: ``"hf:ORG/NAME"``, the name of a bundled model, a file, a
    folder. A bundled name wins over a file of the same name, which is reached as ``"./NAME"``. No form but ``hf:``
    may use the network, so a name that is misspelt never does.

    Args:
        source: For example ``"shakespeare"``, ``"runs/model.safetensors"``, a Hugging Face folder, ``"model.gguf"``,
            ``"hf:EleutherAI/pythia-70m"`` or ``"hf:ORG/NAME@REVISION"``.
        device: Where the weights go; by default the CPU.
        dtype: Their type; by default that of the file for an own checkpoint, and float32 for all others.
        layers: Which layers to read, such as ``range(0, 6)``; by default all. A part of the stack is for weight-space
            work: what it predicts is not what the whole predicts.

    Raises:
        TypeError: Neither text nor a path.
        ValueError: Neither a bundled name nor a path (the nearest names are listed), or a form that is not read.
        FileNotFoundError: A path at which there is nothing.
        storage.CheckpointError: A file that is not a readable checkpoint.
        UnsupportedModel: A pretrained model of a kind that has no equal here.
        HubError: A model that could not be fetched.
        ImportError: A GGUF file, without the extra that reads it.
    """
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"expected the name or path of a model, not {source!r:.80}")
    if not text.strip():
        raise ValueError("the name of the model is empty")
    if text.startswith(HUB_PREFIX):
        return _from_hub(text.removeprefix(HUB_PREFIX), device=device, dtype=dtype, layers=layers)
    if isinstance(source, str) and source in storage.bundled_names():
        with storage.bundled_path(source) as path:
            return _layers_of(storage.read(path, device=device, dtype=dtype), layers)
    path = Path(text)
    if path.is_dir():
        from circuits.pretrained.folder import read_folder

        return read_folder(path, device=device, dtype=dtype, layers=layers)
    if not path.exists():
        raise _nothing_there(text)
    if path.suffix == ".gguf":
        from circuits.pretrained.gguf import read_gguf

        return read_gguf(path, device=device, dtype=dtype, layers=layers)
    return _layers_of(storage.read(path, device=device, dtype=dtype), layers)


def _from_hub(model_id: str, **options: Any) -> HookedGPT:
    from circuits.pretrained.folder import read_folder
    from circuits.pretrained.hub import fetch

    folder = fetch(model_id)
    model = read_folder(folder, **options)
    model.card |= {"source": HUB_PREFIX + model_id.partition("@")[0], "revision": folder.name}
    return model


def _layers_of(model: HookedGPT, layers: Sequence[int] | None) -> HookedGPT:
    """Some layers of a model that is in memory, sharing its weights."""
    if layers is None:
        return model
    from circuits.pretrained.assemble import chosen_layers, part_of_the_stack

    chosen = chosen_layers(layers, model.config.n_layers)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("blocks.")}
    for new, old in enumerate(chosen):
        prefix = f"blocks.{old}."
        state |= {
            f"blocks.{new}.{name.removeprefix(prefix)}": tensor
            for name, tensor in model.state_dict().items()
            if name.startswith(prefix)
        }
    part = HookedGPT.from_state_dict(part_of_the_stack(model.config, chosen), state)
    part.tokenizer, part.card = model.tokenizer, {**model.card, "layers": list(chosen)}
    return part


def _nothing_there(text: str) -> Exception:
    """The error for a string that names no bundled model and no path that exists."""
    names = storage.bundled_names()
    bundled = f"the bundled models are {', '.join(names)}" if names else "no model is bundled"
    if Path(text).suffix in (storage.SUFFIX, ".gguf") or text.startswith((".", "~", os.sep)):
        return FileNotFoundError(f"there is no file or folder {text!r}")
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    if not hint and _HUB_ID.fullmatch(text):
        hint = f"; a model of the Hugging Face hub is asked for as {HUB_PREFIX + text!r}"
    return ValueError(f"{text!r} is neither a bundled model nor a path that exists{hint} ({bundled})")
