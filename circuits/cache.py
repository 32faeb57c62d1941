"""ActivationCache: a read-only mapping from hook name to tensor. It holds no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits import lens_names, names as vocabulary
from circuits.config import GPTConfig
from circuits.tensorfile import FORMAT, CheckpointError, read_tensors, write_tensors

KIND = "cache"
Key = str | tuple[str, int] | tuple[str, int, str]


class ActivationCache(Mapping[str, Tensor]):
    """What one forward pass captured.

    ``cache["blocks.0.attn.hook_pattern"]`` and ``cache["pattern", 0]`` are the same tensor; negative layers count from
    the end. The names cannot be rebound.

    Attributes:
        config: The architecture that the activations came from.
        attention_mask: The padding of the batch, ``[batch pos]``, True for tokens; None where all were tokens.
    """

    def __init__(
        self,
        activations: Mapping[str, Tensor],
        config: GPTConfig,
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
    ) -> None:
        self._activations = MappingProxyType(dict(activations))
        self.config = config
        self.attention_mask = attention_mask

    def __getitem__(self, key: Key) -> Tensor:
        return self._activations[self._resolve(key)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    def __contains__(self, key: object) -> bool:
        try:
            self._resolve(key)  # type: ignore[arg-type]  # `in` may ask for anything
        except (KeyError, IndexError):
            return False
        return True

    def _resolve(self, key: Key) -> str:
        """The full name behind a key, told apart: a name that no such model has, and one that was not captured."""
        if isinstance(key, str) and key in self._activations:
            return key
        name = vocabulary.full_name(key, vocabulary.hook_names(self.config), self.config.n_layers)
        if name not in self._activations:
            raise KeyError(f"{name} was not captured; ask for it: run_with_cache(tokens, names_filter=[{name!r}, ...])")
        return name

    def __getattr__(self, name: str) -> object:
        raise AttributeError(lens_names.absent(type(self).__name__, name, lens_names.CACHE))

    def __eq__(self, other: object) -> bool:
        # As a mapping it would ask tensors for one truth value; two runs are compared tensor by tensor.
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> tuple[object, ...]:
        return ActivationCache, (dict(self._activations), self.config, self.attention_mask)

    def __repr__(self) -> str:
        total = sum(t.numel() * t.element_size() for t in self._activations.values())
        shape = list(next(iter(self._activations.values())).shape) if self._activations else []
        first = f", {next(iter(self._activations))} {shape}, …" if self._activations else ""
        return f"ActivationCache({len(self)} activations, {total / 2**20:.1f} MiB{first})"

    def require(self, *names: str) -> None:
        """Refuse a cache that lacks some of these activations, all of them listed.

        Raises:
            KeyError: Some are missing; the message says how to capture them.
        """
        missing = [name for name in names if name not in self._activations]
        if missing:
            raise KeyError(
                f"the cache lacks {', '.join(missing)}; capture them: run_with_cache(tokens, names_filter={missing!r})"
            )

    def _map(self, function: Callable[[Tensor], Tensor]) -> ActivationCache:
        mask = None if self.attention_mask is None else function(self.attention_mask)
        return ActivationCache({name: function(t) for name, t in self.items()}, self.config, mask)

    def to(self, device: torch.device | str) -> ActivationCache:
        """The same activations on another device."""
        return self._map(lambda t: t.to(device))

    def detach(self) -> ActivationCache:
        """The same activations, outside any autograd graph."""
        return self._map(lambda t: t.detach())

    def select_batch(self, rows: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> ActivationCache:
        """Some rows of the batch, as a cache of their own; the batch axis stays.

        Args:
            rows: One row, a slice, rows in any order, or one boolean per row. Negative rows count from the end.

        Raises:
            TypeError: No such index.
            IndexError: A row that the batch does not have, or none at all.
        """
        if not self._activations:
            return self
        chosen = batch_rows(rows, len(next(iter(self.values()))))
        return self._map(lambda t: t[chosen])

    def stack_activation(self, stem: str) -> Float[Tensor, "layer ..."]:
        """One activation of every layer: ``stack_activation("pattern")`` is ``[layer batch head query key]``, a copy.

        Raises:
            KeyError: A stem that names nothing here, or an activation that was not captured in some layer.
        """
        n_layers, known = self.config.n_layers, vocabulary.hook_names(self.config)
        names = [vocabulary.full_name((stem, layer), known, n_layers) for layer in range(n_layers)]
        self.require(*names)
        return torch.stack([self._activations[name] for name in names])

    def accumulated_resid(
        self, layer: int | None = None, *, incl_mid: bool = False
    ) -> tuple[Float[Tensor, "component batch pos d_model"], list[str]]:
        """The stream as it grows: what stands before each block up to `layer`, and after the last.

        Args:
            layer: Stop before this block (negative layers count from the end); None goes through all of them.
            incl_mid: Add the stream between attention and MLP, where the blocks are sequential.

        Returns:
            The streams and the labels of the first axis (``"0_pre"``, ``"0_mid"``, …, ``"final_post"``).

        Raises:
            KeyError: The cache lacks one of the streams.
            IndexError: A layer that the model does not have.
        """
        n_layers = self.config.n_layers
        stop = n_layers if layer is None else vocabulary.layer_index(layer, n_layers)
        names, labels = [], []
        for index in range(stop):
            names.append(vocabulary.block_names(index).resid_pre)
            labels.append(f"{index}_pre")
            if incl_mid and self.config.has_resid_mid:
                names.append(vocabulary.block_names(index).resid_mid)
                labels.append(f"{index}_mid")
        if stop < n_layers:
            names.append(vocabulary.block_names(stop).resid_pre)
            labels.append(f"{stop}_pre")
        else:
            names.append(vocabulary.block_names(n_layers - 1).resid_post)
            labels.append("final_post")
        self.require(*names)
        return torch.stack([self._activations[name] for name in names]), labels

    def save(self, path: str | Path) -> None:
        """Write the cache as one safetensors file, its architecture in the header; whole or not at all.

        Raises:
            OSError: The folder does not exist or cannot be written to.
        """
        # Cloned, for two names can show one tensor, which the file format does not allow.
        tensors = {name: t.detach().clone() for name, t in self.items()}
        if self.attention_mask is not None:
            tensors["attention_mask"] = self.attention_mask
        write_tensors(Path(path), tensors, {"format": FORMAT, "kind": KIND, "config": self.config.to_dict()})

    @staticmethod
    def load(path: str | Path) -> ActivationCache:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: No such file.
            CheckpointError: The file is not a saved cache, or not whole.
        """
        tensors, header = read_tensors(Path(path))
        if header.get("kind") != KIND:
            raise CheckpointError(f"{path}: holds a {header.get('kind')}, not a saved ActivationCache")
        try:
            config = GPTConfig.from_dict(header["config"])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: its config cannot be read: {error}") from None
        mask = tensors.pop("attention_mask", None)
        ordered = {n: tensors[n] for n in vocabulary.hook_names(config) if n in tensors}
        return ActivationCache(ordered, config, mask)


def batch_rows(rows: object, batch: int) -> slice | list[int]:
    """An index of the batch axis that keeps the axis: a slice as it is, anything else as a list of rows.

    Raises:
        TypeError: No such index.
        IndexError: A row that the batch does not have, or none at all.
    """
    if isinstance(rows, slice):
        if not range(batch)[rows]:
            raise IndexError(f"{rows} selects no row of a batch of {batch}")
        return rows
    listed = rows.tolist() if hasattr(rows, "tolist") else rows  # tensors, and numbers and arrays of numpy
    listed = list(listed) if isinstance(listed, list | tuple | range) else [listed]
    if listed and all(isinstance(row, bool) for row in listed) and len(listed) == batch:
        listed = [row for row, chosen in enumerate(listed) if chosen]
    for row in listed:
        if isinstance(row, bool) or not isinstance(row, int):
            raise TypeError(f"rows must be a row, a slice, rows, or {batch} booleans, not {rows!r}")
        if not -batch <= row < batch:
            raise IndexError(f"row {row} is not in a batch of {batch} (0 to {batch - 1})")
    if not listed:
        raise IndexError(f"{rows!r} selects no row of a batch of {batch}")
    return listed
