"""The tensors of a Hugging Face folder: one safetensors file or several, mapped into memory and never copied whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    "w = torch.load('pytorch_model.bin', weights_only=True); "
    "s.save_file({k: v.clone().contiguous() for k, v in w.items()}, 'model.safetensors')\""
)


class Shards:
    """Named tensors in safetensors files.

    A tensor that is read is a view of the mapped file: it costs private memory only once it is copied.
    """

    def __init__(self, files: list[Path]) -> None:
        self._where: dict[str, Any] = {}
        for path in files:
            try:
                # Not a `with`: the mapping has to live as long as the tensors are read, and closes with this object.
                file = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ValueError(
                    f"{path}: not a whole safetensors file ({error}); was its download cut short?"
                ) from None
            self._where |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]  # safetensors leaves it so

    @property
    def names(self) -> set[str]:
        """The tensors that the files hold."""
        return set(self._where)

    def read(self, name: str) -> Tensor:
        """A tensor by name."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order.

    Raises:
        FileNotFoundError: None, or some of those that the index lists are missing.
        ValueError: Only pickles, or an index that cannot be read.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any((folder / name).is_file() for name in PICKLES):
        raise ValueError(pickle_refusal(str(folder)))
    raise FileNotFoundError(f"{folder}: has neither {SINGLE} nor {INDEX}")


def _indexed(folder: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX}: not an index of safetensors files ({error!r})") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {len(missing)} of {len(names)} files of weights are missing ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}); the download is not complete"
        )
    return [folder / name for name in names]


def pickle_refusal(where: str) -> str:
    """Why a ``.bin`` is not opened, and the line that converts it."""
    return (
        f"{where}: its weights are a pickle (pytorch_model.bin), which can run any code when it is read, so it is "
        f"never opened here; convert it where you trust it: {CONVERT}"
    )
