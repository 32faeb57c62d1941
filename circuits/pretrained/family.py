"""What a family of pretrained architectures is: a reading of its config, and the place of each of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from circuits.config import GPTConfig
from circuits.pretrained.fields import Fields

View = Callable[[Tensor, GPTConfig], Tensor]


def as_stored(tensor: Tensor, config: GPTConfig) -> Tensor:
    """A tensor whose layout is ours already."""
    return tensor


def transposed(tensor: Tensor, config: GPTConfig) -> Tensor:
    """A weight stored as ``[in, out]``; biases are as they are."""
    return tensor.mT if tensor.ndim == 2 else tensor


@dataclass(frozen=True)
class Part:
    """A tensor of a file that makes one of ours, or some rows of it.

    Attributes:
        name: Its name; ``{l}`` stands for the layer.
        view: How it is seen so that its rows are ours; reads, never copies, where it can.
    """

    name: str
    view: View = as_stored


# Where one of our tensors stands in a file: its parts, one below the other.
Stored = tuple[Part, ...]


def stored(*names: str, view: View = as_stored) -> Stored:
    """Parts that are seen in one way."""
    return tuple(Part(name, view) for name in names)


def affine(ours: str, theirs: str, view: View = as_stored) -> dict[str, Stored]:
    """A linear map's weight and bias, under the same two names on both sides."""
    return {f"{ours}.{part}": stored(f"{theirs}.{part}", view=view) for part in ("weight", "bias")}


def layernorm(ours: str, theirs: str) -> dict[str, Stored]:
    """A LayerNorm's gain and shift."""
    return {f"{ours}.w": stored(f"{theirs}.weight"), f"{ours}.b": stored(f"{theirs}.bias")}


@dataclass(frozen=True)
class Family:
    """One family of architectures.

    Attributes:
        model_type: What `config.json` calls it.
        config: From the fields of `config.json` to a `GPTConfig`.
        tensors: From the name of each tensor of ours to its place in a file. Entries that a config has no use for
            (biases it lacks, a tied unembedding) are not looked up.
        prefix: What stands before every name but the unembedding's; files of the bare model leave it out.
        ignored: A pattern of tensors that files hold and that are no weights (masks, rotary tables).
    """

    model_type: str
    config: Callable[[Fields], GPTConfig]
    tensors: Mapping[str, Stored]
    prefix: str
    ignored: str = r"\.(masked_bias|inv_freq)$"
