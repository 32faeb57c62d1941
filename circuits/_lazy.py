"""Package names that are imported when first asked for (PEP 562), so that importing a package costs almost nothing."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

_MACHINERY = ("__getattr__", "__dir__", "__annotations__")


def attach(
    package: str, modules: Mapping[str, str], hints: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names live in other modules.

    Args:
        package: The package's `__name__`.
        modules: From each public name to the module that defines it.
        hints: From names that others have to what they are here.

    Returns:
        `__getattr__`, which imports the defining module and keeps the value, and `__dir__`, which lists every name
        whether or not it has been imported, and nothing that is not public.
    """

    def __getattr__(name: str) -> object:
        if name not in modules:
            message = f"module {package!r} has no attribute {name!r}"
            if name in hints:
                raise AttributeError(f"{message}; here it is {hints[name]}")
            nearest = difflib.get_close_matches(name, modules, n=3)
            raise AttributeError(f"{message}; nearest: {', '.join(nearest)}" if nearest else message)
        value: object = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        own = {name for name in vars(sys.modules[package]) if name.startswith("__") and name not in _MACHINERY}
        return sorted({*own, *modules})

    return __getattr__, __dir__
