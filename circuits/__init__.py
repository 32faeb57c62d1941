"""A hookable GPT and the exact algebra of its circuits.

Every public name is imported from its module when first used, so `import circuits` alone loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits._lazy import attach

__version__ = "0.1.0"

# A public name stands twice, once for type checkers and once for the interpreter; a test holds the two lists equal.
if TYPE_CHECKING:
    pass
else:
    _PUBLIC: dict[str, str] = {}
    __all__ = list(_PUBLIC)
    __getattr__, __dir__ = attach(__name__, _PUBLIC)
