"""Text in and out of a model that has a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from circuits.tokens import pad_rows
from circuits.validity import require_whole

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
            TypeError: Not text.
        """
        tokenizer = self._text_codec()
        texts = several_texts([text] if isinstance(text, str) else text)
        rows = [tokenizer.encode(t, **options) for t in texts]
        lengths = sorted({len(row) for row in rows})
        if len(lengths) > 1:
            raise ValueError(f"the texts have different lengths ({lengths} tokens); to_batch pads them")
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def to_single_token(self, text: str) -> int:
        """The id of a text that is one token, no start token added.

        Raises:
            ValueError: The text is no token or several (they are shown), or the model has no tokenizer.
            TypeError: Not text.
        """
        if not isinstance(text, str):
            raise TypeError(f"expected the text of a token, not {text!r:.80}")
        tokenizer = self._text_codec()
        ids = tokenizer.encode(text, prepend_bos=False)
        if len(ids) != 1:
            shown = f": {', '.join(map(repr, tokenizer.str_tokens(ids)))}" if ids else ""
            raise ValueError(f"{text!r} is {len(ids)} tokens, not one{shown}")
        return ids[0]

    def to_token_ids(self, tokens: Any) -> Any:
        """Ids for the texts of tokens, one text or several; anything else as it is.

        Raises:
            ValueError: As for `to_single_token`.
        """
        if isinstance(tokens, str):
            return self.to_single_token(tokens)
        if isinstance(tokens, list | tuple) and any(isinstance(token, str) for token in tokens):
            return [self.to_single_token(token) for token in tokens]
        return tokens

    def to_batch(
        self, texts: Sequence[str], side: Literal["left", "right"] = "left", **options: Any
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
        """Token ids ``[batch pos]`` of texts of any lengths, padded on one side, and the mask to pass along.

        Padding on the left is what `generate` needs; every other pass takes either.

        Raises:
            ValueError: The model has no tokenizer, or a text has no tokens.
            TypeError: Not a list of texts.
        """
        tokenizer = self._text_codec()
        tokens, mask = pad_rows([tokenizer.encode(text, **options) for text in several_texts(texts)], side)
        return tokens.to(self.device), mask.to(self.device)

    def to_string(self, tokens: Int[Tensor, " pos"] | Int[Tensor, "1 pos"] | list[int]) -> str:
        """The text of one sequence of tokens.

        Raises:
            ValueError: The model has no tokenizer, or several sequences.
            TypeError: No whole numbers.
            IndexError: An id that the tokenizer does not have.
        """
        return self._text_codec().decode(one_sequence(tokens))

    def to_str_tokens(self, text: str | Tensor | list[int]) -> list[str]:
        """The text of each token of a text, or of a sequence of tokens."""
        tokenizer = self._text_codec()
        return tokenizer.str_tokens(tokenizer.encode(text) if isinstance(text, str) else one_sequence(text))


def several_texts(texts: object) -> Sequence[str]:
    """The texts, or an error where they are anything else (one text alone is not several of one character).

    Raises:
        TypeError: Not a list of texts.
        ValueError: None at all.
    """
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"expected a text, or a list of texts, not {texts!r:.80}")
    if not texts:
        raise ValueError("expected at least one text, but the list is empty")
    return texts


def one_sequence(tokens: object) -> list[int]:
    """The ids of a single sequence: a list, a tensor or array ``[pos]`` or ``[1 pos]``, or one id alone.

    Raises:
        ValueError: Several sequences.
        TypeError: No whole numbers.
    """
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if isinstance(listed, list) and listed and isinstance(listed[0], list):
        if len(listed) != 1:
            raise ValueError(f"expected one sequence of token ids, not a batch of {len(listed)}; take one: tokens[0]")
        listed = listed[0]
    if isinstance(listed, int):
        listed = [listed]
    if not isinstance(listed, list | tuple | range):
        raise TypeError(f"expected a list of token ids or a tensor [pos], not {tokens!r:.80}")
    return [require_whole(f"token {place}", token, least=-(2**63)) for place, token in enumerate(listed)]
