"""The values of a sweep as they come in, and the file that keeps them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from circuits.rerun.layout import Lane

if TYPE_CHECKING:
    pass

_SECONDS_BETWEEN_WRITES = 5.0
_KIND = "sweep"


class Record:
    """Values ``[set batch]`` as batches deliver them, in any order.

    Args:
        sets: How many sets of interventions.
        clean: The clean values, which stand for rows that a set does not touch.
        path: A file to keep them in; None keeps nothing.
        owner: Fingerprint of the sweep.

    Raises:
        ValueError: The file belongs to another sweep, is no such file, or cannot be one.
    """

    def __init__(self, sets: int, clean: Float[Tensor, " batch"], path: str | Path | None, owner: str) -> None:
        self.values = clean.expand(sets, -1).clone()
        self.done = torch.zeros(self.values.shape, dtype=torch.bool, device=clean.device)
        self._path = None if path is None else Path(path)
        self._owner = owner
        self._written = time.monotonic()
        if self._path is None:
            return
        if self._path.is_dir() or not self._path.parent.is_dir():
            raise ValueError(f"resume names a file in a folder that exists, not {str(self._path)!r}")
        if self._path.exists():
            self._read(self._path)

    def holds(self, lanes: Sequence[Lane]) -> bool:
        """Whether all of these are done."""
        return all(bool(self.done[lane.number, lane.rows].all()) for lane in lanes)

    def add(self, done: Sequence[tuple[int, Tensor]], values: Float[Tensor, "lane batch"]) -> None:
        """Take over what a batch delivered."""
        numbers = torch.tensor([number for number, _ in done], device=values.device)
        if all(rows.shape[0] == values.shape[1] for _, rows in done):
            self.values[numbers], self.done[numbers] = values.to(self.values), True
        else:
            for (number, rows), row in zip(done, values, strict=True):
                self.values[number, rows], self.done[number, rows] = row[rows].to(self.values), True
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.close()

    def close(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        temporary = Path(f"{self._path}.part")
        tensors = {"values": self.values.cpu().contiguous(), "done": self.done.cpu()}
        save_file(tensors, temporary, metadata={"kind": _KIND, "sweep": self._owner})
        temporary.replace(self._path)
        self._written = time.monotonic()

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("kind") == _KIND and metadata.get("sweep") == self._owner:
                    self.values = file.get_tensor("values").to(self.values)
                    self.done = file.get_tensor("done").to(self.done.device)
                    return
        except SafetensorError as error:
            raise ValueError(f"{path} is not the record of a sweep: {error}") from None
        if metadata.get("kind") != _KIND:
            raise ValueError(f"{path} is not the record of a sweep")
        raise ValueError(f"{path} keeps another sweep: of another model, prompts, interventions or metric")
