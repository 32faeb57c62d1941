"""A hookable GPT and the exact algebra of its circuits.

Every public name is imported from its module when first used, so `import circuits` alone loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits import lens_names
from circuits._lazy import attach

__version__ = "0.1.0"

# A public name stands twice, once for type checkers and once for the interpreter; a test holds the two lists equal.
if TYPE_CHECKING:
    from circuits.cache import ActivationCache as ActivationCache
    from circuits.components import (
        MLP as MLP,
        Attn as Attn,
        AttnBias as AttnBias,
        Block as Block,
        Embed as Embed,
        Head as Head,
        Neuron as Neuron,
        PosEmbed as PosEmbed,
    )
    from circuits.config import GPTConfig as GPTConfig
    from circuits.factored import FactoredMatrix as FactoredMatrix
    from circuits.model import HookedGPT as HookedGPT
    from circuits.sources import load as load
    from circuits.storage import save as save
else:
    _PUBLIC: dict[str, str] = {
        "ActivationCache": "circuits.cache",
        "HookedGPT": "circuits.model",
        "Attn": "circuits.components",
        "AttnBias": "circuits.components",
        "Block": "circuits.components",
        "Embed": "circuits.components",
        "Head": "circuits.components",
        "MLP": "circuits.components",
        "Neuron": "circuits.components",
        "PosEmbed": "circuits.components",
        "FactoredMatrix": "circuits.factored",
        "GPTConfig": "circuits.config",
        "load": "circuits.sources",
        "save": "circuits.storage",
    }
    __all__ = list(_PUBLIC)
    __getattr__, __dir__ = attach(__name__, _PUBLIC, lens_names.PACKAGE)
