"""`load`: what a string, or a path, says a model is."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import torch

from circuits import storage
from circuits.model import HookedGPT

HUB_PREFIX = "hf:"


def load(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> HookedGPT:
    """A model by name or path.

    What `source` is, in the order in which it is asked: ``"hf:ORG/NAME"``, the name of a bundled model, a file, a
    folder. A bundled name wins over a file of the same name, which is reached as ``"./NAME"``. No form but ``hf:``
    may use the network, so a name that is misspelt never does.

    Args:
        source: For example ``"shakespeare"`` or ``"runs/model.safetensors"``.
        device: Where the weights go; by default the CPU.
        dtype: Their type; by default the one they were saved in.

    Raises:
        ValueError: Neither a bundled name nor a path (the nearest names are listed), or a form that is not read.
        FileNotFoundError: A path at which there is nothing.
        storage.CheckpointError: A file that is not a readable checkpoint.
    """
    text = os.fspath(source)
    if text.startswith(HUB_PREFIX):
        raise ValueError(f"{text!r}: models from the Hugging Face hub are not read by this version")
    if isinstance(source, str) and source in storage.bundled_names():
        with storage.bundled_path(source) as path:
            return storage.read(path, device=device, dtype=dtype)
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"{text!r}: a folder; Hugging Face folders are not read by this version")
    if not path.exists():
        raise _nothing_there(text)
    if path.suffix == ".gguf":
        raise ValueError(f"{text!r}: GGUF files are not read by this version")
    return storage.read(path, device=device, dtype=dtype)


def _nothing_there(text: str) -> Exception:
    """The error for a string that names no bundled model and no path that exists."""
    names = storage.bundled_names()
    bundled = f"the bundled models are {', '.join(names)}" if names else "no model is bundled"
    if Path(text).suffix in (storage.SUFFIX, ".gguf") or text.startswith((".", "~", os.sep)):
        return FileNotFoundError(f"there is no file or folder {text!r}")
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return ValueError(f"{text!r} is neither a bundled model nor a path that exists{hint} ({bundled})")
