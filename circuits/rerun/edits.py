"""What to put in place of an activation: small values, each a rule from the old to the new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.arguments import whole_numbers
from circuits.cache import ActivationCache


@runtime_checkable
class Cells(Protocol):
    """The rows and positions at which an edit is asked for new values."""

    @property
    def name(self) -> str:
        """The hook name."""
        ...

    def select(self, value: Tensor) -> Tensor:
        """Of a tensor that broadcasts against the whole activation, the part that stands at these cells."""
        ...

    def clean(self) -> Tensor:
        """The activation of the clean run at these cells."""
        ...


class Edit:
    """A rule from the old value of an activation to the new one.

    An edit of a head, or of one neuron, sees only that head's or neuron's part. Values given as tensors broadcast
    against the whole activation ``[batch pos …]`` (without the head axis, for one head), whatever positions and rows
    the intervention names.
    """

    # Whether a cell's new value depends on that cell alone, so that any part of the cells may be computed by itself.
    pointwise: ClassVar[bool] = True
    # Whether the new value may differ from that of the clean run where nothing else was changed.
    acts: ClassVar[bool] = True
    # The number that stands everywhere afterwards, whatever stood there; None where the new value is no such number.
    constant: ClassVar[float | None] = None

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The value to go on with, broadcastable to `old`."""
        # Not abstract: `From` has none either, and stands for another edit once `at` knows the activation.
        raise NotImplementedError(
            f"{type(self).__name__} has no value by itself; `at` gives the edit of one activation"
        )

    def at(self, name: str, index: int | None) -> Edit:
        """This edit for one activation; `index` is the head or neuron, or None."""
        return self


@dataclass(frozen=True, eq=False)
class Zero(Edit):
    """Zero."""

    constant: ClassVar[float | None] = 0.0

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """0."""
        return old.new_zeros(())


@dataclass(frozen=True, eq=False)
class Put(Edit):
    """A given value: a mean, another prompt's activation, anything."""

    value: Tensor

    def __post_init__(self) -> None:
        _require(self, "value", Tensor, "a tensor")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The value."""
        return cells.select(self.value).to(old)


@dataclass(frozen=True, eq=False)
class From(Edit):
    """The value that another run had at the same place: patching."""

    cache: ActivationCache

    def __post_init__(self) -> None:
        _require(self, "cache", Mapping, "an ActivationCache")

    def at(self, name: str, index: int | None) -> Edit:
        """The cached activation itself.

        Raises:
            KeyError: It was not captured.
        """
        return Put(part_of(self.cache[name], name, index))


@dataclass(frozen=True, eq=False)
class Keep(Edit):
    """What the clean run had: holds an activation still, whatever was changed before it."""

    acts: ClassVar[bool] = False

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The clean value."""
        return cells.clean()


@dataclass(frozen=True, eq=False)
class Scale(Edit):
    """``factor · x``."""

    factor: float | Tensor

    def __post_init__(self) -> None:
        _require(self, "factor", Real | Tensor, "a number or a tensor")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The multiple."""
        return old * (cells.select(self.factor).to(old) if isinstance(self.factor, Tensor) else self.factor)


@dataclass(frozen=True, eq=False)
class Add(Edit):
    """``x + coefficient · direction``: steering."""

    direction: Tensor
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        _require(self, "direction", Tensor, "a tensor")
        _require(self, "coefficient", Real | Tensor, "a number")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The sum."""
        return old + self.coefficient * cells.select(self.direction).to(old)


@dataclass(frozen=True, eq=False)
class ProjectOut(Edit):
    """``x − x P``, with P the orthogonal projection on the span of `directions` (``[d]`` or ``[k d]``)."""

    directions: Float[Tensor, "*k d"]

    def __post_init__(self) -> None:
        _require(self, "directions", Tensor, "a tensor [d] or [k d]")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """What is orthogonal to the directions."""
        return old - _projected(old, self.directions)


@dataclass(frozen=True, eq=False)
class Within(Edit):
    """``x + (value − x) P``: patching inside the span of `directions` only, the rest of x left as it is."""

    directions: Float[Tensor, "*k d"]
    value: Tensor | ActivationCache

    def __post_init__(self) -> None:
        _require(self, "directions", Tensor, "a tensor [d] or [k d]")
        _require(self, "value", Tensor | Mapping, "a tensor or an ActivationCache")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The value inside the subspace, x outside."""
        assert isinstance(self.value, Tensor)
        return old + _projected(cells.select(self.value).to(old) - old, self.directions)

    def at(self, name: str, index: int | None) -> Edit:
        """The same with the cached activation as the value."""
        if isinstance(self.value, Tensor):
            return self
        return Within(self.directions, part_of(self.value[name], name, index))


@dataclass(frozen=True, eq=False)
class Apply(Edit):
    """``function(x)`` of the whole piece ``[rows positions …]`` that the intervention names."""

    pointwise: ClassVar[bool] = False
    function: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        _require(self, "function", Callable, "a function")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """What the function returned.

        Raises:
            TypeError: It returned no tensor.
            ValueError: It returned another shape.
        """
        whole_matrix = is_attention_matrix(cells.name) and old.ndim == 4  # comes with the positions in front
        old = old.transpose(1, 2) if whole_matrix else old
        new = self.function(old.clone())
        if not isinstance(new, Tensor):
            raise TypeError(f"the function on {cells.name} returned {type(new).__name__}, not a tensor")
        if new.shape != old.shape:
            raise ValueError(
                f"the function on {cells.name} returned shape {list(new.shape)}, expected {list(old.shape)}"
            )
        return (new.transpose(1, 2) if whole_matrix else new).to(old)


@dataclass(frozen=True, eq=False)
class CutKeys(Edit):
    """Scores of −inf at some keys: queries may not look there. For ``hook_attn_scores`` only."""

    keys: Sequence[int]

    def __post_init__(self) -> None:
        outside = [key for key in whole_numbers("key", self.keys) if key < 0]
        if outside:
            raise ValueError(f"the keys of CutKeys are columns of the prompts, from 0 on, not {outside[0]}")

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        """The scores without these keys; what the pass does not reach is none of its keys."""
        keys = [key for key in whole_numbers("key", self.keys) if key < old.shape[-1]]
        new = old.clone()
        new[..., keys] = float("-inf")
        return new

    def at(self, name: str, index: int | None) -> Edit:
        """This edit.

        Raises:
            ValueError: Not for attention scores.
        """
        if not name.endswith("attn.hook_attn_scores"):
            raise ValueError(f"CutKeys edits attention scores, not {name}")
        return self


def is_attention_matrix(name: str) -> bool:
    """Whether an activation is ``[batch head query key]`` rather than ``[batch pos …]``."""
    return name.endswith(("hook_attn_scores", "hook_pattern"))


def part_of(activation: Tensor, name: str, index: int | None) -> Tensor:
    """One head's or neuron's part of an activation; all of it for None."""
    if index is None:
        return activation
    return activation.select(1 if is_attention_matrix(name) else 2, index)


def _require(edit: Edit, field: str, kinds: Any, expected: str) -> None:
    """Refuse an edit whose field holds something else, where it is made."""
    given = getattr(edit, field)
    if isinstance(given, bool) or not isinstance(given, kinds):
        raise TypeError(f"the {field} of {type(edit).__name__} must be {expected}, not {given!r}")


def _projected(x: Tensor, directions: Tensor) -> Tensor:
    """``x P``, through an orthonormal basis of the span; directions of linearly dependent sets count once."""
    rows = torch.atleast_2d(directions).to(x)
    if rows.shape[-1] != x.shape[-1]:
        raise ValueError(f"the directions have width {rows.shape[-1]}, but the activation has {x.shape[-1]}")
    exact = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    _, singular, basis = torch.linalg.svd(exact, full_matrices=False)
    tolerance = max(exact.shape) * torch.finfo(exact.dtype).eps * singular[:1]
    basis = basis[singular > tolerance].to(x)
    projected: Tensor = (x @ basis.mT) @ basis
    return projected
