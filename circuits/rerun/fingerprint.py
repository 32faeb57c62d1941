"""A digest of everything that decides a sweep's values, so that a file of another sweep is not taken for its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from circuits.rerun.sweep import Sweep

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))


def fingerprint(sweep: Sweep) -> str:
    """The digest of weights, prompts, interventions and what is measured."""
    digest = _Digest()
    digest.text(repr(sweep.model.config))
    for name, tensor in sweep.model.state_dict().items():
        digest.text(name)
        digest.tensor(tensor)
    digest.value(sweep.tokens)
    digest.value(sweep.mask)
    digest.value(sweep.reader)
    for lane, label in zip(sweep.lanes, sweep.labels, strict=True):
        digest.text(label)
        for placed in lane.placed:
            digest.value(placed)
    return digest.hexdigest()


class _Digest:
    """A hash that values are added to by their content."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._functions: set[FunctionType] = set()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def text(self, text: str) -> None:
        self._hash.update(f"{len(text)} {text}".encode())

    def tensor(self, tensor: Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().flatten()
        self.text(f"{tensor.dtype} {list(tensor.shape)}")
        self._hash.update(flat.view(torch.uint8).numpy().tobytes())

    def value(self, value: object) -> None:
        """Tensors by their numbers, small objects by their attributes, functions by their code and what it uses."""
        self.text(type(value).__qualname__)
        if isinstance(value, Tensor):
            self.tensor(value)
        elif isinstance(value, list | tuple):
            for item in value:
                self.value(item)
        elif isinstance(value, set | frozenset):
            for item in sorted(value, key=repr):
                self.value(item)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif isinstance(value, partial):
            self.value([value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                self.text(field)
                self.value(getattr(value, field))
        elif isinstance(value, (*_PLAIN, type)) or not hasattr(value, "__dict__"):
            self.text(repr(value))
        else:
            for name, held in vars(value).items():
                self._held(name, held)

    def _function(self, function: FunctionType) -> None:
        """What tells functions of one name apart: their code, their defaults, and what they close over or look up."""
        self.text(f"{function.__module__}.{function.__qualname__}")
        if function in self._functions:
            return
        self._functions.add(function)
        self._code(function.__code__)
        for held in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            self._held("default", held)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not _is_empty(cell):
                self._held(name, cell.cell_contents)
        for name in _names(function.__code__):
            held = function.__globals__.get(name)
            same_module = isinstance(held, FunctionType) and held.__module__ == function.__module__
            if same_module or _is_plain(held):
                self._held(name, held)

    def _held(self, name: str, held: object) -> None:
        """What is plain, or a function. Anything else may be told by its address, which another process changes."""
        if _is_plain(held) or isinstance(held, FunctionType | MethodType | partial):
            self.text(name)
            self.value(held)

    def _code(self, code: CodeType) -> None:
        self._hash.update(code.co_code)
        self.text(repr(code.co_names))
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant)
            else:
                self.value(constant)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function looks up, those of the functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # asking is the only way to know
    except ValueError:
        return True
    return False
