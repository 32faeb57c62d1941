"""One safetensors file of named tensors with a JSON object in its header: read and written whole.

The header's metadata has one entry, ``circuits``, a JSON object with ``format``, ``kind`` and what that kind needs. One
entry, because safetensors writes several in no fixed order, and equal contents should give equal files. Files are never
unpickled, and appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from circuits.placement import check_device

FORMAT = 1
METADATA_KEY = "circuits"
SUFFIX = ".safetensors"

_PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
_PICKLE_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit


class CheckpointError(ValueError):
    """A file that is not a readable checkpoint; the message says which file and everything that is wrong with it."""


# ---------------------------------------------------------------------------------------------------------- writing


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Write named tensors and a JSON header to one safetensors file, whole or not at all.

    Equal tensors and headers give equal files, byte for byte.
    """
    try:
        metadata = {METADATA_KEY: json.dumps(header, ensure_ascii=False)}
    except TypeError as error:
        raise TypeError(f"what goes into the header of {path.name} must be JSON data: {error}") from None
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
        OSError: `path` is no file but, say, a device.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"a checkpoint's name ends in {SUFFIX}, and {path.name!r} does not")
    _require_place(path)


def _require_place(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: there is no folder {str(path.parent)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {str(path)!r}: it is a folder")
    if path.exists() and not path.is_file():  # renaming onto a device or a pipe would replace it
        raise OSError(f"cannot write {str(path)!r}: it is not a regular file")


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, in the same folder, that takes its real name only when the block ends well.

    A symbolic link stays one: the file that it points to is written.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: `path` is a folder.
        OSError: `path` is no file but, say, a device.
    """
    _require_place(Path(path))  # first as it was given, for the message
    path = Path(os.path.realpath(path))
    _require_place(path)
    unfinished = path.with_name(f".{path.stem[:32]}.{secrets.token_hex(6)}.unfinished")
    try:
        yield unfinished
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------- reading


def read_tensors(
    path: Path, *, device: torch.device | str | int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The named tensors and the JSON header of a file that `write_tensors` wrote.

    Raises:
        FileNotFoundError: No such file.
        CheckpointError: A pickle, a truncated or other file, or a safetensors file without our header.
        TypeError, ValueError: A device that does not exist here.
    """
    place = check_device(device)
    if place is not None and place.type == "meta":
        raise ValueError("device 'meta' holds no weights, so none can be read onto it")
    header = read_header(path)
    try:
        tensors = load_file(path, device="cpu" if place is None else str(place))
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
    except (ValueError, RecursionError) as error:
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
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        if not all(isinstance(text, str) for text in metadata.values()):
            raise TypeError("its metadata are not texts")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: its header cannot be read ({error})") from None
    if size < 8 + length + end:
        raise CheckpointError(f"{path}: truncated: it should have {8 + length + end} bytes and has {size}")
    return metadata
