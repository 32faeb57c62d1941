"""Own checkpoints: one safetensors file with the weights, and config, tokenizer and card in its header.

The header's metadata has one entry, ``circuits``: a JSON object with ``format``, ``kind``, ``config``, ``tokenizer``
and ``card``. One entry, because safetensors writes several in no fixed order, and equal models should give equal files.
Files are never unpickled, and appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.text import Tokenizer, tokenizer_from_dict

FORMAT = 1
KIND = "model"
METADATA_KEY = "circuits"
SUFFIX = ".safetensors"

_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit


class CheckpointError(ValueError):
    """A file that is not a readable checkpoint; the message says which file and everything that is wrong with it."""


# ---------------------------------------------------------------------------------------------------------- writing


def save(model: HookedGPT, path: str | os.PathLike[str]) -> None:
    """Write a model to one safetensors file: weights, config, tokenizer and card.

    Every tensor keeps its type, bit for bit; tied embeddings stand once. The file appears whole or not at all: it is
    written beside its place, forced to disk and then renamed.

    Raises:
        ValueError: A path that does not end in ``.safetensors``.
        TypeError: A card that is not JSON data.
        OSError: The folder does not exist or cannot be written to.
    """
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


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write named tensors and a JSON header to one safetensors file, whole or not at all.

    Equal tensors and headers give equal files, byte for byte.
    """
    metadata = {METADATA_KEY: json.dumps(header, ensure_ascii=False)}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as unfinished:
        unfinished.touch()
        mode = unfinished.stat().st_mode  # the user's own default; save_file makes files that only they may read
        try:
            save_file(plain, unfinished, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from None
        unfinished.chmod(mode)


def check_writable(path: Path) -> None:
    """Refuse a path at which no checkpoint could be saved, before any work is done for it.

    Raises:
        ValueError: A name that does not end in ``.safetensors``.
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: `path` is a folder.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"a checkpoint's name ends in {SUFFIX}, and {path.name!r} does not")
    _require_place(path)


def _require_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {str(path)!r}: it is a folder")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, in the same folder, that takes its real name only when the block ends well.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: `path` is a folder.
    """
    path = Path(path)
    _require_place(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- reading


def read(
    path: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
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
    """
    path = Path(path)
    tensors, header = read_tensors(path, device=device)
    if header.get("kind") != KIND:
        raise CheckpointError(f"{path}: holds a {header.get('kind')}, not a {KIND}")
    config, tokenizer, card = _parsed(path, header)
    try:
        model = HookedGPT.from_state_dict(config, tensors)
    except ValueError as error:  # it lists every tensor that is missing, extra or misshapen
        raise CheckpointError(f"{path}: {error}") from None
    if dtype is not None:
        model.to(dtype)
    model.tokenizer = tokenizer
    model.card = card
    return model


def read_tensors(
    path: Path, *, device: torch.device | str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The named tensors and the JSON header of a file that `write_tensors` wrote.

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: A pickle, a truncated or other file, or a safetensors file without our header.
    """
    header = read_header(path)
    try:
        tensors = load_file(path, device=str(device or "cpu"))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None
    return tensors, header


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Our part of a file's header, without reading a weight: ``format``, ``config``, ``tokenizer``, ``card``.

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: As for `read_tensors`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder, not a {SUFFIX} file")
    metadata = _safetensors_metadata(path)
    if METADATA_KEY not in metadata:
        raise CheckpointError(f"{path}: a safetensors file, but not one of ours: its header has no {METADATA_KEY!r}")
    try:
        header = json.loads(metadata[METADATA_KEY])
    except ValueError as error:
        raise CheckpointError(f"{path}: its {METADATA_KEY!r} header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: its {METADATA_KEY!r} header is not a JSON object")
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path}: written in format {header.get('format')!r}; this version reads format {FORMAT}")
    return header


def _safetensors_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, after checking that the file is one and is all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if path.suffix.lower() in _PICKLE_SUFFIXES or start.startswith(_PICKLE_MAGIC):
            raise CheckpointError(
                f"{path}: a pickle, which can run any code when it is read, so it is never opened here; "
                "convert it where you trust it, with safetensors.torch.save_file"
            )
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= _MAX_HEADER:
            raise CheckpointError(f"{path}: not a safetensors file ({size} bytes)")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file ({size} bytes)")
    if len(text) < length:
        raise CheckpointError(f"{path}: truncated: its header has {length} bytes, and the file ends after {len(text)}")
    try:
        entries = json.loads(text)
        metadata: dict[str, str] = entries.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: its header cannot be read ({error})") from None
    if size < 8 + length + end:
        raise CheckpointError(f"{path}: truncated: it should have {8 + length + end} bytes and has {size}")
    return metadata


def _parsed(path: Path, header: Mapping[str, Any]) -> tuple[GPTConfig, Tokenizer | None, dict[str, Any]]:
    """Config, tokenizer and card of a header."""
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
