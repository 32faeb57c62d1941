"""Models that others trained: Hugging Face folders, GGUF files, TransformerLens models.

``circuits.load`` reads files; `from_transformer_lens` takes a model that is already in memory. Each family of
architectures is one table (`families`): what its config fields mean as fields of `GPTConfig`, and where its tensors
stand. No other library's model code is imported.
"""

from __future__ import annotations
