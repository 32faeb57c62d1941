"""Tokenizers: what turns a text into token ids and back.

A tokenizer is a value that a checkpoint carries in its header: `to_dict` gives plain JSON data, `tokenizer_from_dict`
reads it. The beginning-of-sequence rule is one and explicit: `prepend_bos` says whether `encode` puts `bos_token_id` in
front, and a caller may say otherwise for one text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from circuits.validity import require_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer


@runtime_checkable
class Tokenizer(Protocol):
    """What every tokenizer here offers."""

    @property
    def d_vocab(self) -> int:
        """How many token ids there are; ids run from 0 to ``d_vocab - 1``."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token, or None where there is none."""
        ...

    @property
    def prepend_bos(self) -> bool:
        """Whether `encode` puts the beginning-of-sequence token in front unless told otherwise."""
        ...

    def encode(self, text: str, prepend_bos: bool | None = None) -> list[int]:
        """The token ids of a text; `prepend_bos` overrides the tokenizer's own rule."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some token ids, special tokens shown."""
        ...

    def str_tokens(self, ids: Iterable[int]) -> list[str]:
        r"""The text of each token alone; bytes that are not whole characters read ``\xe2``."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """The tokenizer as plain JSON data, read back by `tokenizer_from_dict`."""
        ...


@dataclass(frozen=True)
class CharTokenizer:
    """One token per character, from a fixed vocabulary.

    Attributes:
        vocab: The characters, in the order of their ids.

    Raises:
        ValueError: An empty vocabulary, an entry that is not one character, or one that stands twice.
    """

    vocab: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.vocab:
            raise ValueError("a character vocabulary needs at least one character, and has none")
        for index, character in enumerate(self.vocab):
            if not isinstance(character, str) or len(character) != 1:
                raise ValueError(f"vocabulary entry {index} must be one character, not {character!r}")
        if len(self._ids) != len(self.vocab):
            twice = next(c for i, c in enumerate(self.vocab) if self._ids[c] != i)
            raise ValueError(f"the character {twice!r} stands more than once in the vocabulary")

    @staticmethod
    def from_text(text: str) -> CharTokenizer:
        """The characters of a text, in the order of their code points."""
        return CharTokenizer(tuple(sorted(set(text))))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: index for index, character in enumerate(self.vocab)}

    @property
    def d_vocab(self) -> int:
        """Number of characters."""
        return len(self.vocab)

    @property
    def bos_token_id(self) -> None:
        """None: characters have no beginning-of-sequence token."""
        return

    @property
    def prepend_bos(self) -> bool:
        """False: there is none to prepend."""
        return False

    def encode(self, text: str, prepend_bos: bool | None = None) -> list[int]:
        """The id of each character.

        Raises:
            ValueError: Characters that the vocabulary lacks: which, and where each first stands; or `prepend_bos`.
        """
        if not isinstance(text, str):
            raise TypeError(f"expected a text, not {text!r:.80}")
        if prepend_bos:
            raise ValueError("prepend_bos is True, but a character tokenizer has no beginning-of-sequence token")
        ids = self._ids
        try:
            return [ids[character] for character in text]
        except KeyError:
            raise ValueError(self._lacking(text)) from None

    def _lacking(self, text: str) -> str:
        unknown = [c for c in dict.fromkeys(text) if c not in self._ids]
        shown = [f"{c!r} at position {text.index(c)}" for c in unknown[:5]]
        more = f", and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        return f"the text has characters that are not among the tokenizer's {self.d_vocab}: {', '.join(shown)}{more}"

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of some ids, joined."""
        return "".join(self.str_tokens(ids))

    def str_tokens(self, ids: Iterable[int]) -> list[str]:
        """The character of each id.

        Raises:
            IndexError: An id outside the vocabulary.
        """
        return [self.vocab[_checked(token, self.d_vocab)] for token in ids]

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "char", "vocab": "…"}``."""
        return {"kind": "char", "vocab": "".join(self.vocab)}


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A tokenizer of the `tokenizers` library, as pretrained models bring it in ``tokenizer.json``.

    Ids are those of the text alone (the file's own post-processing is not used), with `bos_token_id` in front where
    `prepend_bos` says so and the text does not begin with it already.

    Attributes:
        json_text: The content of ``tokenizer.json``.
        bos_token_id: The beginning-of-sequence token, or None.
        prepend_bos: Whether `encode` puts it in front unless told otherwise.

    Raises:
        ValueError: `json_text` is not a tokenizer, or `prepend_bos` without a `bos_token_id` in the vocabulary.
    """

    json_text: str
    bos_token_id: int | None = None
    prepend_bos: bool = False

    def __post_init__(self) -> None:
        rust = self._rust  # built now, so nonsense is refused here and not at the first use
        if self.bos_token_id is not None and (self.bos_token_id < 0 or rust.id_to_token(self.bos_token_id) is None):
            raise ValueError(f"bos_token_id {self.bos_token_id} is not in a vocabulary of {self.d_vocab} tokens")
        if self.prepend_bos and self.bos_token_id is None:
            raise ValueError("prepend_bos is True, but bos_token_id is None")

    def __repr__(self) -> str:
        bos = f"bos_token_id={self.bos_token_id}, prepend_bos={self.prepend_bos}"
        return f"PretrainedTokenizer({self.d_vocab} tokens, {bos})"

    @staticmethod
    def from_files(json_text: str, config: Mapping[str, Any]) -> PretrainedTokenizer:
        """From ``tokenizer.json`` and what ``tokenizer_config.json`` says.

        A beginning-of-sequence token is prepended where ``add_bos_token`` is true; where the config does not say,
        where the post-processing in ``tokenizer.json`` itself begins a text with ``bos_token``.
        """
        rust = _rust(json_text)
        bos = config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, Mapping) else bos
        bos_id: int | None = None if bos is None else rust.token_to_id(bos)
        add = config.get("add_bos_token")
        if add is None:
            add = bos_id is not None and rust.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
        return PretrainedTokenizer(json_text, bos_id, bool(add) and bos_id is not None)

    @cached_property
    def _rust(self) -> RustTokenizer:
        return _rust(self.json_text)

    @cached_property
    def _special(self) -> dict[int, str]:
        """Added tokens, which stand for their own text whatever the decoder does."""
        return {index: token.content for index, token in self._rust.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of bytes."""
        return '"ByteLevel"' in json.dumps(json.loads(self.json_text).get("decoder"))

    @cached_property
    def d_vocab(self) -> int:
        """Number of token ids, added tokens included."""
        return max(self._rust.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, prepend_bos: bool | None = None) -> list[int]:
        """The token ids of a text.

        Raises:
            ValueError: `prepend_bos` where there is no such token.
        """
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        if prepend_bos is None:
            prepend_bos = self.prepend_bos
        if not prepend_bos:
            return ids
        if self.bos_token_id is None:
            raise ValueError("prepend_bos is True, but this tokenizer has no beginning-of-sequence token")
        return ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens shown."""
        text: str = self._rust.decode([_checked(token, self.d_vocab) for token in ids], skip_special_tokens=False)
        return text

    def str_tokens(self, ids: Iterable[int]) -> list[str]:
        r"""The text of each id alone, leading spaces kept; bytes that are not whole characters read ``\xe2``."""
        return [self._str_token(_checked(token, self.d_vocab)) for token in ids]

    def _str_token(self, token: int) -> str:
        if token in self._special:
            return self._special[token]
        piece = self._rust.id_to_token(token)
        if piece is None:
            return f"<unused {token}>"
        return _spelled_bytes(piece, self._byte_level).decode("utf-8", errors="backslashreplace")

    def to_dict(self) -> dict[str, Any]:
        """``{"kind": "pretrained", "json": "…", "bos_token_id": …, "prepend_bos": …}``."""
        return {
            "kind": "pretrained",
            "json": self.json_text,
            "bos_token_id": self.bos_token_id,
            "prepend_bos": self.prepend_bos,
        }


def tokenizer_from_dict(data: Mapping[str, Any]) -> Tokenizer:
    """The inverse of a tokenizer's `to_dict`.

    Raises:
        ValueError: An unknown kind, or data that is not such a tokenizer's.
    """
    kind = data.get("kind")
    try:
        if kind == "char":
            return CharTokenizer(tuple(data["vocab"]))
        if kind == "pretrained":
            return PretrainedTokenizer(data["json"], data["bos_token_id"], data["prepend_bos"])
    except KeyError as error:
        raise ValueError(f"a tokenizer of kind {kind!r} needs {error.args[0]!r}, which is missing") from None
    raise ValueError(f"tokenizer kind {kind!r} is not one of 'char', 'pretrained'")


def _checked(token: int, d_vocab: int) -> int:
    token = require_whole("a token id", token, least=-(2**63))
    if not 0 <= token < d_vocab:
        raise IndexError(f"token id {token} is not in a vocabulary of {d_vocab} (0 to {d_vocab - 1})")
    return token


@lru_cache(maxsize=1)  # building one takes longer than anything else here, and a file is looked at twice
def _rust(json_text: str) -> RustTokenizer:
    from tokenizers import Tokenizer as RustTokenizer

    try:
        return RustTokenizer.from_str(json_text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"not a tokenizer.json of the tokenizers library: {error}") from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes as visible characters: itself where printable, else shifted above 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _spelled_bytes(piece: str, byte_level: bool) -> bytes:
    """The bytes that a vocabulary entry stands for: GPT-2's byte alphabet, or SentencePiece's ``▁`` and ``<0xE2>``."""
    if byte_level:
        return bytes(_BYTES[c] for c in piece) if all(c in _BYTES for c in piece) else piece.encode()
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
