"""Prompts: what a measurement on one text runs on, and how its tokens are shown."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.patterns import repeated_tokens, start_token
from circuits.text import CharTokenizer

if TYPE_CHECKING:
    from circuits.model import HookedGPT

# Names and words return in both, so that heads which look back for them have something to find.
CHARACTER_PROMPT = "ROMEO:\nO gentle Juliet, speak again! Speak, gentle Juliet, speak"
WORD_PROMPT = (
    "When Mary and John went to the store, John gave a drink to Mary. When John and Mary went home, Mary gave it to"
)
LONGEST_REPEAT = 24
MARKS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\N{NO-BREAK SPACE}": "⍽"}
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})


def default_tokens(model: HookedGPT) -> Int[Tensor, "1 pos"]:
    """A prompt that suits the model when none was given.

    A text in which names come back (written for a model of characters, or of words), where the tokenizer has its
    letters; a character tokenizer that lacks some of its other signs, or all capitals, reads it without them. Otherwise
    random tokens that do not repeat, twice over, the same at every call: what induction heads need. Cut to n_ctx.
    """
    ids = (_default_text_ids(model) or _repeated_ids(model))[: model.config.n_ctx]
    return torch.tensor([ids], device=model.device)


def built_in(model: HookedGPT, tokens: Int[Tensor, "1 pos"]) -> str | None:
    """What the built-in prompt of this model is, in words, where these tokens are that prompt; else None."""
    if not torch.equal(tokens.cpu(), default_tokens(model).cpu()):
        return None
    if _default_text_ids(model):
        return "The built-in text, in which names and words come back."
    ids = tokens[0].tolist()
    half = len(ids) // 2
    if half < 2 or ids[-half:] != ids[-2 * half : -half]:
        return "The built-in prompt."
    return f"The built-in prompt: {half} different random tokens, twice, since {_why_no_text(model)}."


def _why_no_text(model: HookedGPT) -> str:
    return (
        "the model has no tokenizer" if model.tokenizer is None else "the tokenizer lacks letters of the built-in text"
    )


def _default_text_ids(model: HookedGPT) -> list[int] | None:
    """The ids of the built-in text that suits the tokenizer, if there is one that it can write."""
    if model.tokenizer is None:
        return None
    if isinstance(model.tokenizer, CharTokenizer):
        written = _in_characters(CHARACTER_PROMPT, frozenset(model.tokenizer.vocab))
        return None if written is None else model.tokenizer.encode(written)
    for text in (CHARACTER_PROMPT, WORD_PROMPT):
        try:
            ids = list(model.tokenizer.encode(text))
        except ValueError:  # characters that the vocabulary lacks
            continue
        if text == WORD_PROMPT or len(ids) >= len(text):
            return ids
    return None


def _in_characters(text: str, vocab: frozenset[str]) -> str | None:
    """A text as a vocabulary of characters can write it: its letters are needed, in small ones if not in capitals."""
    for form in (text, text.lower()):
        if {character for character in form if character.isalpha()} <= vocab:
            return "".join(character for character in form if character in vocab)
    return None


def _repeated_ids(model: HookedGPT) -> list[int]:
    room = (model.config.n_ctx - (start_token(model) is not None)) // 2
    length = min(model.config.d_vocab, room, LONGEST_REPEAT)
    if length < 2:
        return list(range(model.config.d_vocab))
    ids: list[int] = repeated_tokens(model, length, batch=1)[0].tolist()
    return ids


def parse_tokens(text: str) -> list[int]:
    """Token ids written as ``"1 2 3"`` or ``"1, 2, 3"``.

    Raises:
        ValueError: Something that is not a whole number, and where it stands; or nothing at all.
    """
    words = re.split(r"[\s,]+", text.strip().strip(","))
    if words == [""]:
        raise ValueError('no token ids were given; write them as "1 2 3"')
    for place, word in enumerate(words):
        if not re.fullmatch(r"-?[0-9]+", word):
            raise ValueError(f'token {place} is {word!r}, not a whole number; write token ids as "1 2 3"')
    return [int(word) for word in words]


def prompt_tokens(model: HookedGPT, text: str | None = None, ids: Sequence[int] | None = None) -> Int[Tensor, "1 pos"]:
    """One sequence of tokens, checked: a text, token ids, or the default where neither is given.

    Raises:
        ValueError: Text for a model without a tokenizer; an empty prompt, or one longer than n_ctx; characters that the
            tokenizer lacks.
        IndexError: An id outside the vocabulary.
    """
    config = model.config
    if text is None and ids is None:
        return default_tokens(model)
    if ids is None:
        assert text is not None
        if model.tokenizer is None:
            raise ValueError("this model has no tokenizer: give token ids (--tokens at the command line), not text")
        ids = model.tokenizer.encode(text)
    if not ids:
        raise ValueError("the prompt is empty: at least one token is needed")
    if len(ids) > config.n_ctx:
        raise ValueError(f"the prompt has {len(ids)} tokens, more than the model's context n_ctx = {config.n_ctx}")
    for place, token in enumerate(ids):
        if not 0 <= token < config.d_vocab:
            raise IndexError(f"token {place} is {token}, not an id of a vocabulary of {config.d_vocab}")
    return torch.tensor([list(ids)], device=model.device)


def token_labels(model: HookedGPT, ids: Iterable[int]) -> tuple[str, ...]:
    """The text of each token with its white space made visible; the id itself where there is no tokenizer."""
    listed = [int(token) for token in ids]
    tokenizer = model.tokenizer
    if tokenizer is None:
        return tuple(map(str, listed))
    known = [token for token in listed if token < tokenizer.d_vocab]  # a vocabulary may be padded beyond its tokenizer
    texts = dict(zip(known, tokenizer.str_tokens(known), strict=True))
    return tuple(visible(texts[token]) if token in texts else f"<{token}>" for token in listed)


def visible(text: str) -> str:
    r"""The text with a mark for every character that has no shape of its own.

    A space reads ``·``, a line break ``⏎``, a tab ``⇥``; other control and format characters (zero-width ones, those
    that turn the direction of writing) read ``\u200b``; a combining mark at the start stands on a dotted circle.
    """
    if not text:
        return "∅"
    if unicodedata.combining(text[0]):
        text = "\N{DOTTED CIRCLE}" + text
    return "".join(map(_mark, text))


def _mark(character: str) -> str:
    if character in MARKS:
        return MARKS[character]
    if unicodedata.category(character) in UNSEEN:
        return f"\\u{ord(character):04x}"
    return character
