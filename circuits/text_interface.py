"""Text in and out of a model that has a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from circuits.tokens import pad_rows

if TYPE_CHECKING:
    from circuits.text import Tokenizer


class TextInterface:
    """What a model says in text, through its tokenizer. `HookedGPT` is one.

    Attributes:
        tokenizer: Text to tokens and back, or None.
    """

    tokenizer: Tokenizer | None

    @property
    def device(self) -> torch.device:
        """Where token ids are put."""
        raise NotImplementedError

    def _text_codec(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; give it token ids [batch pos]")
        return self.tokenizer

    def to_tokens(self, text: str | list[str], **options: Any) -> Int[Tensor, "batch pos"]:
        """Token ids ``[batch pos]`` of a text, or of several of one length (see the tokenizer's `encode`).

        Raises:
            ValueError: The model has no tokenizer, or the text holds what it cannot encode.
        """
        texts = [text] if isinstance(text, str) else text
        tokenizer = self._text_codec()
        rows = [tokenizer.encode(t, **options) for t in texts]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise ValueError(f"the texts have different lengths ({lengths} tokens); to_batch pads them")
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def to_batch(
        self, texts: Sequence[str], side: Literal["left", "right"] = "left", **options: Any
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
        """Token ids ``[batch pos]`` of texts of any lengths, padded on one side, and the mask to pass along.

        Padding on the left is what `generate` needs; every other pass takes either.

        Raises:
            ValueError: The model has no tokenizer, or a text has no tokens.
        """
        tokenizer = self._text_codec()
        tokens, mask = pad_rows([tokenizer.encode(text, **options) for text in texts], side)
        return tokens.to(self.device), mask.to(self.device)

    def to_string(self, tokens: Int[Tensor, " pos"] | Int[Tensor, "1 pos"] | list[int]) -> str:
        """The text of one sequence of tokens."""
        ids = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
        return self._text_codec().decode(ids)

    def to_str_tokens(self, text: str | Tensor | list[int]) -> list[str]:
        """The text of each token of a text, or of a sequence of tokens."""
        tokenizer = self._text_codec()
        if isinstance(text, str):
            ids: list[int] = tokenizer.encode(text)
        else:
            ids = text.flatten().tolist() if isinstance(text, Tensor) else text
        return tokenizer.str_tokens(ids)
