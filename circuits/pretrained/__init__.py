"""Models that others trained: Hugging Face folders, GGUF files, TransformerLens models.

``circuits.load`` reads files; `from_transformer_lens` takes a model that is already in memory. Each family of
architectures is one table (`families`): what its config fields mean as fields of `GPTConfig`, and where its tensors
stand. No other library's model code is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits._lazy import attach

if TYPE_CHECKING:
    from circuits.pretrained.fields import UnsupportedModel as UnsupportedModel
    from circuits.pretrained.transformer_lens import from_transformer_lens as from_transformer_lens
else:
    _PUBLIC: dict[str, str] = {
        "UnsupportedModel": "circuits.pretrained.fields",
        "from_transformer_lens": "circuits.pretrained.transformer_lens",
    }
    __all__ = list(_PUBLIC)
    __getattr__, __dir__ = attach(__name__, _PUBLIC)
