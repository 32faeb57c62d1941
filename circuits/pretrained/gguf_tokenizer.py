"""The tokenizer of a GGUF file, spelled as a `tokenizer.json` of the tokenizers library.

GGUF keeps the tokens, the merges or the scores, and names the rule that splits a text into words; the rules
themselves are known by that name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from circuits.text import PretrainedTokenizer

_CONTROL, _USER_DEFINED = 3, 4
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DECODER = {**_BYTE_LEVEL, "use_regex": True}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


_GPT2 = [{**_BYTE_LEVEL, "use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}]
# What `tokenizer.ggml.pre` names.
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS + _GPT2,
    "llama-bpe": _split(_WORDS % "{1,3}"),
    "qwen2": _split(_WORDS % ""),
}
# Vocabularies whose files need not say that a text begins with the beginning-of-sequence token.
_BEGINS_BY_DEFAULT = {"llama", "llama-bpe"}


def tokenizer_of(metadata: Mapping[str, Any]) -> PretrainedTokenizer | None:
    """The tokenizer that a file's metadata describes; None where it has none.

    Raises:
        ValueError: A kind of vocabulary, or a rule for words, that is not known here.
    """
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    if "tokens" not in fields:
        return None
    kind, rule = fields.get("model"), fields.get("pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported (supported: 'gpt2', 'llama')")
    description = _byte_level(fields, rule) if kind == "gpt2" else _sentencepiece(fields)
    begins = fields.get("add_bos_token", kind in _BEGINS_BY_DEFAULT or rule in _BEGINS_BY_DEFAULT)
    bos = fields.get("bos_token_id")
    return PretrainedTokenizer(json.dumps(description, ensure_ascii=False), bos, bool(begins) and bos is not None)


def _byte_level(fields: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """GPT-2's byte-level BPE."""
    if rule not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {rule!r} is not supported (supported: {', '.join(_SPLITS)})")
    model = _bpe(fields["tokens"], [merge.split(" ", 1) for merge in fields["merges"]])
    return {
        **_frame(fields),
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[rule]},
        "decoder": _DECODER,
        "model": {**model, "ignore_merges": rule == "llama-bpe"},
    }


def _sentencepiece(fields: Mapping[str, Any]) -> dict[str, Any]:
    """SentencePiece's BPE, whose merges are told by the scores of the pieces.

    The leading space is put in front of every text, and of what follows a special token, as SentencePiece and llama.cpp
    do; newer versions of transformers leave it out before a space and after a special token.
    """
    spaces = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    if fields.get("add_space_prefix", True):
        spaces.insert(0, {"type": "Prepend", "prepend": "▁"})
    unknown = fields["tokens"][fields.get("unknown_token_id", 0)]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = _bpe(fields["tokens"], merges_of_scores(fields["tokens"], fields["scores"]))
    return {
        **_frame(fields),
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def merges_of_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, the best-scored piece first."""
    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [
        (-score, ids[token[:at]], ids[token[at:]], token[:at], token[at:])
        for token, score in zip(tokens, scores, strict=True)
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [[left, right] for *_, left, right in sorted(pairs)]


def _bpe(tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    vocab = {token: index for index, token in enumerate(tokens)}
    return {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False, "fuse_unk": False}


def _frame(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What every `tokenizer.json` has: its version, and the tokens that stand for themselves in a text."""
    kinds = fields.get("token_type") or []
    added = [
        {
            "id": index,
            "content": fields["tokens"][index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
