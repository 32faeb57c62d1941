"""From a file's tensors to a model: every weight is allocated once, in the type and place it will have, and filled."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from circuits.config import GPTConfig
from circuits.initialise import load_exactly
from circuits.model import HookedGPT
from circuits.pretrained.family import Family, Part, Stored

_OUR_LAYER = re.compile(r"^blocks\.(\d+)\.")


@runtime_checkable
class Tensors(Protocol):
    """Named tensors to read from, one at a time."""

    @property
    def names(self) -> set[str]:
        """What there is."""
        ...

    def read(self, name: str) -> Tensor:
        """A tensor by name; the caller does not change it."""
        ...


def chosen_layers(layers: Sequence[int] | None, n_layers: int) -> tuple[int, ...]:
    """The layers to read, in order; all of them by default.

    Raises:
        ValueError: None, one twice, not in order, or outside the model.
    """
    if layers is None:
        return tuple(range(n_layers))
    chosen = tuple(layers)
    increasing = all(a < b for a, b in itertools.pairwise(chosen))
    if not chosen or not increasing or chosen[0] < 0 or chosen[-1] >= n_layers:
        raise ValueError(
            f"layers must be increasing numbers from 0 to {n_layers - 1}, such as range(0, {min(6, n_layers)}), "
            f"not {layers!r}"
        )
    return chosen


def part_of_the_stack(config: GPTConfig, layers: tuple[int, ...]) -> GPTConfig:
    """The configuration of a model that has only some of the layers."""
    return config.replace(n_layers=len(layers), window=tuple(config.window[layer] for layer in layers))


def assemble(
    config: GPTConfig,
    family: Family,
    tensors: Tensors,
    *,
    layers: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> HookedGPT:
    """A model of `config`, cut to `layers`, with the weights that `tensors` holds under the family's names.

    Raises:
        ValueError: Tensors that are missing, left over or misshapen, by name.
    """
    names = _Names(family, tensors, config.n_layers)
    if config.tie_embeddings and _unembedding_of_its_own(family, tensors, names):
        config = config.replace(tie_embeddings=False)
    model = HookedGPT(part_of_the_stack(config, layers), device="meta")
    places = {ours: names.place(ours, layers) for ours in model.state_dict()}
    names.require_present([part.name for place in places.values() for part in place])
    state = {
        ours: _filled(ours, shape.shape, places[ours], tensors, config, dtype, device)
        for ours, shape in model.state_dict().items()
    }
    load_exactly(model, state)
    return model


class _Names:
    """The family's names as this file spells them: files of a bare model leave the prefix out."""

    def __init__(self, family: Family, tensors: Tensors, n_layers: int) -> None:
        self.family = family
        self.there = tensors.names
        self.prefix = family.prefix
        self.bare = not any(name.startswith(family.prefix) for name in self.there)
        self.n_layers = n_layers

    def spelled(self, name: str) -> str:
        return name.removeprefix(self.prefix) if self.bare else name

    def place(self, ours: str, layers: tuple[int, ...]) -> Stored:
        """Where one of our tensors stands in the file."""
        match = _OUR_LAYER.match(ours)
        layer = layers[int(match[1])] if match else None
        place = self.family.tensors[ours if match is None else _OUR_LAYER.sub("blocks.{l}.", ours)]
        return tuple(Part(self.spelled(part.name.replace("{l}", str(layer))), part.view) for part in place)

    def require_present(self, wanted: list[str]) -> None:
        """Refuse a file that lacks weights, or holds some that this family has no place for."""
        missing = [name for name in wanted if name not in self.there]
        if missing:
            raise ValueError(f"{self.family.model_type}: {_listed(missing)} missing from the file")
        known = {
            self.spelled(part.name.replace("{l}", str(layer)))
            for place in self.family.tensors.values()
            for part in place
            for layer in range(self.n_layers)
        }
        left = sorted(name for name in self.there - known if not re.search(self.family.ignored, name))
        if left:
            raise ValueError(f"{self.family.model_type}: {_listed(left)} not part of this family")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f", and {len(names) - 5} more" if len(names) > 5 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def _unembedding_of_its_own(family: Family, tensors: Tensors, names: _Names) -> bool:
    """Whether a file whose config ties the embeddings stores an unembedding that differs: the weights decide."""
    embed, unembed = (names.spelled(family.tensors[ours][0].name) for ours in ("embed.weight", "unembed.weight"))
    if not {embed, unembed} <= names.there:
        return False
    return not torch.equal(tensors.read(embed), tensors.read(unembed))


def _filled(
    ours: str,
    shape: torch.Size,
    place: Stored,
    tensors: Tensors,
    config: GPTConfig,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """One of our tensors, filled from the file's, row block by row block."""
    target = torch.empty(shape, dtype=dtype, device=device)
    start = 0
    for part in place:
        view = part.view(tensors.read(part.name), config)
        rows = view.numel() // max(target[:1].numel(), 1)
        fits = start + rows <= shape[0] and (target.ndim == 1 or view.shape[-1] == shape[1])
        if not fits:
            raise _misfit(ours, shape, part.name, view)
        target[start : start + rows].view(view.shape).copy_(view)
        start += rows
    if start != shape[0]:
        raise _misfit(ours, shape, part.name, view)
    return target


def _misfit(ours: str, shape: torch.Size, name: str, view: Tensor) -> ValueError:
    return ValueError(f"tensor {name} {list(view.shape)} does not fit {ours} {list(shape)}, which the config asks for")
