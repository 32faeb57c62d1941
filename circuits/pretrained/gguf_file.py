"""The GGUF container: metadata and tensor places, parsed from the mapped file.

Layout (GGUF versions 2 and 3, little-endian): magic, version, number of tensors, number of metadata entries; the
entries; for each tensor its name, sizes (innermost first), type and offset; then the data, aligned.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie.

    Attributes:
        shape: Outermost size first.
        kind: The number of its type in ggml's list.
        start: Offset from the beginning of the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFFile:
    """A parsed GGUF file.

    Attributes:
        metadata: Its entries.
        places: Where each tensor lies.
        data: The mapped file.

    Raises:
        ValueError: Not a GGUF file, of a version that is not read, or cut short.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ValueError(f"{path}: not a GGUF file")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise ValueError(f"{path}: not a whole GGUF file ({error!r})") from None

    def _parse(self) -> None:
        cursor = _Cursor(self.data, len(MAGIC))
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version} is not read (versions 2 and 3 are)")
        n_tensors, n_entries = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(n_entries)}
        heads = [
            (cursor.string(), cursor.scalars(f"{cursor.scalar('I')}Q"), cursor.scalar("I"), cursor.scalar("Q"))
            for _ in range(n_tensors)
        ]
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-cursor.position // alignment) * alignment
        self.places = {name: Place(sizes[::-1], kind, start + offset) for name, sizes, kind, offset in heads}


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data = data
        self.position = position

    def scalars(self, kinds: str) -> tuple[Any, ...]:
        format = f"<{kinds}"
        values = struct.unpack_from(format, self.data, self.position)
        self.position += struct.calcsize(format)
        return values

    def scalar(self, kind: str) -> Any:
        return self.scalars(kind)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        text = self.data[self.position : self.position + length]
        if len(text) < length:
            raise IndexError("the file ends within a string")
        self.position += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        read: Callable[[], Any]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, length = self.scalar("I"), self.scalar("Q")
        if item in _SCALARS:
            return list(self.scalars(f"{length}{_SCALARS[item]}"))
        read = self.string if item == _STRING else lambda: self.value(item)
        return [read() for _ in range(length)]
