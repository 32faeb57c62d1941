"""What one forward pass shows and lets you change: a value, never state on the model.

`Hooks` says what to capture and what to change. A pass turns it into a `Tap`, through which every named activation
flows: untouched names cost one set lookup, and nothing outlives the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from circuits import names as hook_vocabulary
from circuits.names import NamesFilter


@dataclass(frozen=True, slots=True)
class Hook:
    """Where a hook function was called: its `name` and `layer()`."""

    name: str

    def layer(self) -> int:
        """The layer of this hook point.

        Raises:
            ValueError: The hook point is outside the blocks.
        """
        layer = hook_vocabulary.layer_of(self.name)
        if layer is None:
            raise ValueError(f"{self.name} does not belong to a layer")
        return layer


HookFn = Callable[[Tensor, Hook], Tensor | None]
FwdHooks = Sequence[tuple[NamesFilter, HookFn]]
Edits = Mapping[str, tuple[HookFn, ...]]

_NO_EDITS: Edits = MappingProxyType({})


@dataclass(frozen=True)
class Hooks:
    """What to capture and what to change in one forward pass.

    Attributes:
        capture: Names whose activations are kept, after any change.
        edits: Name -> functions applied in order. Each gets a copy of the activation, so it may write in place; it
            returns a new value, or None to keep what it was given (as it now is).
        grad: Make captured activations leaves of differentiation where they are not part of a graph already.
    """

    capture: frozenset[str] = frozenset()
    edits: Edits = field(default_factory=lambda: _NO_EDITS)
    grad: bool = False

    def __or__(self, other: Hooks) -> Hooks:
        """Both together; the edits of `other` run after those of `self`."""
        merged = dict(self.edits)
        for name, functions in other.edits.items():
            merged[name] = merged.get(name, ()) + functions
        return Hooks(self.capture | other.capture, MappingProxyType(merged), self.grad or other.grad)


NO_HOOKS = Hooks()


def edits_of(fwd_hooks: FwdHooks, names: tuple[str, ...]) -> Edits:
    """Resolve ``[(name | names | predicate, function), ...]`` against the names a model has.

    Raises:
        KeyError: A name that the model does not have.
        TypeError: An entry that is not such a pair.
    """
    if not isinstance(fwd_hooks, Iterable) or isinstance(fwd_hooks, str | Mapping):
        raise TypeError(f"fwd_hooks must be a list of (name or predicate, function), not {fwd_hooks!r:.80}")
    edits: dict[str, tuple[HookFn, ...]] = {}
    for entry in fwd_hooks:
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and callable(entry[1])):
            raise TypeError(f"each of fwd_hooks must be (name or predicate, function), not {entry!r}")
        where, function = entry
        if where is None:
            raise TypeError("a hook function needs a name or a predicate, not None")
        selected = hook_vocabulary.resolve(where, names)
        if not selected:
            raise KeyError("an entry of fwd_hooks names no hook, so its function would never run")
        for name in names:
            if name in selected:
                edits[name] = (*edits.get(name, ()), function)
    return MappingProxyType(edits)


class Tap:
    """One pass's view of its `Hooks`: every named activation flows through it."""

    __slots__ = ("_capture", "_edits", "_touched", "captured", "grad")

    # Whether values that nobody else sees may be written over. Only where the pass is known not to be differentiated,
    # vectorised or traced: transforms of `torch.func` do not take kindly to it.
    in_place: ClassVar[bool] = False

    def __init__(self, hooks: Hooks = NO_HOOKS) -> None:
        self._edits = hooks.edits
        self._capture = hooks.capture
        self._touched = hooks.capture.union(hooks.edits)
        self.grad = hooks.grad
        self.captured: dict[str, Tensor] = {}

    def __call__(self, name: str, activation: Tensor, settle: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The activation as the pass goes on with it: changed where asked, kept where asked.

        `settle` is applied to a changed value, so that what is kept is what the pass goes on with.
        """
        if name not in self._touched:
            return activation
        if name in self._edits:
            for function in self._edits[name]:
                activation = _edited(activation, function, Hook(name))
            activation = activation if settle is None else settle(activation)
        if name in self._capture:
            activation = self._kept(activation)
            self.captured[name] = activation
            if self.grad and settle is not None:
                # What settling discards has no effect, so it has no gradient either.
                return settle(activation)
        return activation

    def slices(self, names: tuple[str, ...], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Slices that make up one buffer, each under its name; where all are kept, none need be copied out of it."""
        if self._capture.issuperset(names) and not self.grad and not self.edits(*names):
            self.captured.update(zip(names, parts, strict=True))
            return tuple(parts)
        return tuple(self(name, part) for name, part in zip(names, parts, strict=True))

    def touches(self, *names: str) -> bool:
        """Whether any of these names is captured or changed, so that it must exist as a tensor."""
        return not self._touched.isdisjoint(names)

    def edits(self, *names: str) -> bool:
        """Whether any of these names is changed."""
        return any(name in self._edits for name in names)

    def _kept(self, activation: Tensor) -> Tensor:
        # A slice of a larger buffer would keep all of it alive: hold only what was asked for.
        if activation.untyped_storage().nbytes() > activation.numel() * activation.element_size():
            activation = activation.clone(memory_format=torch.contiguous_format)
        if not self.grad:
            return activation
        # Two names can show one tensor (`hook_resid_mid`, `hook_mlp_in`), but only what follows a name is its gradient.
        return activation.view_as(activation) if activation.requires_grad else activation.detach().requires_grad_()


NO_TAP = Tap()


def _edited(activation: Tensor, function: HookFn, hook: Hook) -> Tensor:
    """What `function` makes of a copy of the activation, checked to be of the same kind."""
    given = activation.clone(memory_format=torch.contiguous_format)
    new = function(given, hook)
    if new is None:
        new = given
    if not isinstance(new, Tensor):
        raise TypeError(f"the hook on {hook.name} returned {type(new).__name__}, not a tensor or None")
    if new.shape != activation.shape:
        raise ValueError(f"the hook on {hook.name} returned shape {list(new.shape)}, expected {list(activation.shape)}")
    expected, came = ([t.dtype, t.device, t.layout] for t in (activation, new))
    if came != expected:
        shown = [f"{dtype} on {device} ({layout})" for dtype, device, layout in (came, expected)]
        raise ValueError(f"the hook on {hook.name} returned {shown[0]}, expected {shown[1]}")
    return new
