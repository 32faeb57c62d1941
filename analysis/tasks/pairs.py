"""Pairs of prompts with known answers, and the JSON-lines file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from analysis.metrics import Metric, logit_diff
from circuits.text import Tokenizer
from circuits.tokens import check_mask

_PAD = 0
_FIELDS = ("clean", "corrupt", "correct", "wrong")


class PairMasks(TypedDict):
    """The padding of both forms, as patching takes it."""

    clean_mask: Bool[Tensor, "batch pos"] | None
    corrupt_mask: Bool[Tensor, "batch pos2"] | None


@dataclass(frozen=True, eq=False)
class PromptPairs:
    """Prompts in a clean and a corrupted form, with the answer that is right for the clean one.

    Attributes:
        name: What the task is called.
        clean: The clean prompts; the answer is the token after the last real one.
        corrupt: The same prompts with what decides the answer changed.
        correct: The right answer to the clean prompt.
        wrong: A wrong one, which the corrupted prompt makes likelier.
        clean_mask: True for tokens, False for padding; None where all are tokens.
        corrupt_mask: Likewise.

    Raises:
        TypeError: Prompts or answers that are no tensors of token ids, masks that are none.
        ValueError: Masks of another shape than their prompts, other numbers of prompts than answers, or answers that
            are equal.
    """

    name: str
    clean: Int[Tensor, "batch pos"]
    corrupt: Int[Tensor, "batch2 pos2"]
    correct: Int[Tensor, " batch3"]
    wrong: Int[Tensor, " batch4"]
    clean_mask: Bool[Tensor, "batch pos"] | None = None
    corrupt_mask: Bool[Tensor, "batch2 pos2"] | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            given = getattr(self, name)
            if not isinstance(given, Tensor) or given.is_floating_point() or given.is_complex() or not given.ndim:
                raise TypeError(f"{name} of a PromptPairs must be a tensor of token ids, not {given!r}")
        check_mask(self.clean_mask, self.clean)
        check_mask(self.corrupt_mask, self.corrupt)
        sizes = {name: len(getattr(self, name)) for name in _FIELDS}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"every pair needs its four parts, but there are {sizes}")
        same = (self.correct == self.wrong).nonzero()
        if len(same):
            row = int(same[0])
            raise ValueError(f"pair {row}: correct and wrong are the same token {int(self.correct[row])}")

    def __len__(self) -> int:
        return len(self.clean)

    @property
    def metric(self) -> Metric:
        """``logit(correct) − logit(wrong)`` after the last token."""
        return logit_diff(self.correct, self.wrong)

    @property
    def masks(self) -> PairMasks:
        """The padding, as keyword arguments of `activation_patch` and `path_patch`."""
        return {"clean_mask": self.clean_mask, "corrupt_mask": self.corrupt_mask}

    def write(self, path: str | Path) -> None:
        """Write the pairs as JSON lines of token ids, which `read_pairs` reads."""
        lines = []
        for row in range(len(self)):
            prompts = {
                "clean": _real(self.clean[row], self.clean_mask, row),
                "corrupt": _real(self.corrupt[row], self.corrupt_mask, row),
            }
            answers = {"correct": int(self.correct[row]), "wrong": int(self.wrong[row])}
            lines.append(json.dumps({**prompts, **answers}))
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_pairs(
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    device: torch.device | str | None = None,
    *,
    d_vocab: int | None = None,
) -> PromptPairs:
    """Read pairs from a JSON-lines file: ``{"clean": …, "corrupt": …, "correct": …, "wrong": …}`` on each line.

    Prompts are texts or lists of token ids, answers texts of a single token or token ids. Prompts of different lengths
    are padded on the right.

    Args:
        path: The file.
        tokenizer: What texts are encoded with.
        device: Where the tokens go.
        d_vocab: The size of the vocabulary, where token ids are to be checked.

    Raises:
        ValueError: A line that is no such object, a text without a tokenizer or with characters that it lacks, a token
            id outside the vocabulary, an answer that is not a single token, or answers that are equal; the message
            names the line.
        OSError: The file cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a file of pairs, not {path!r}")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    rows = [_row(line, f"{path}, line {n}", tokenizer, d_vocab) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path} holds no pairs")
    return pairs_of(Path(path).stem, rows, device)


def pairs_of(name: str, rows: Sequence[Mapping[str, Any]], device: torch.device | str | None = None) -> PromptPairs:
    """Pairs from token ids: ``clean`` and ``corrupt`` lists, ``correct`` and ``wrong`` numbers.

    Raises:
        ValueError: No pairs.
    """
    if not rows:
        raise ValueError(f"{name}: expected at least 1 pair of prompts, got none")
    clean, clean_mask = padded([row["clean"] for row in rows], device)
    corrupt, corrupt_mask = padded([row["corrupt"] for row in rows], device)
    answers = {part: torch.tensor([row[part] for row in rows], device=device) for part in ("correct", "wrong")}
    return PromptPairs(name, clean, corrupt, answers["correct"], answers["wrong"], clean_mask, corrupt_mask)


def padded(
    prompts: Iterable[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"] | None]:
    """Prompts as one batch, padded on the right; the mask is None where all are of one length."""
    rows = [list(prompt) for prompt in prompts]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [_PAD] * (width - len(row)) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(width, device=device) < lengths[:, None]
    return tokens, None if bool(mask.all()) else mask


def single_token(text: str, tokenizer: Tokenizer) -> int | None:
    """The id of a text that is one token; None for any other."""
    try:
        ids = tokenizer.encode(text, prepend_bos=False)
    except ValueError:  # characters that the vocabulary lacks
        return None
    return ids[0] if len(ids) == 1 else None


def _row(line: str, where: str, tokenizer: Tokenizer | None, d_vocab: int | None) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(data, dict) or any(field not in data for field in _FIELDS):
        raise ValueError(f"{where}: expected an object with {', '.join(_FIELDS)}")
    row = {part: _prompt(data[part], f"{where}: {part}", tokenizer) for part in ("clean", "corrupt")}
    answers = {part: _answer(data[part], f"{where}: {part}", tokenizer) for part in ("correct", "wrong")}
    for part, ids in {**row, **{part: [token] for part, token in answers.items()}}.items():
        for token in ids:
            if d_vocab is not None and not 0 <= token < d_vocab:
                raise ValueError(f"{where}: {part} has token id {token}, outside a vocabulary of {d_vocab} tokens")
    if answers["correct"] == answers["wrong"]:
        raise ValueError(f"{where}: correct and wrong are the same token {answers['correct']}")
    return {**row, **answers}


def _prompt(given: object, where: str, tokenizer: Tokenizer | None) -> list[int]:
    ids = given
    if isinstance(given, str):
        if tokenizer is None:
            raise ValueError(f"{where} is a text, but the model has no tokenizer; give token ids")
        ids = _encoded(given, where, tokenizer)
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"{where} must be a text or a list of token ids, not {given!r}")
    return ids


def _answer(given: object, where: str, tokenizer: Tokenizer | None) -> int:
    if type(given) is int:
        return given
    if not isinstance(given, str):
        raise ValueError(f"{where} must be a text or a token id, not {given!r}")
    if tokenizer is None:
        raise ValueError(f"{where} is a text, but the model has no tokenizer; give a token id")
    token = single_token(given, tokenizer)
    if token is None:
        n = len(_encoded(given, where, tokenizer, prepend_bos=False))
        raise ValueError(f"{where} {given!r} is {n} tokens of this model; an answer must be a single one")
    return token


def _encoded(text: str, where: str, tokenizer: Tokenizer, **options: bool) -> list[int]:
    try:
        return tokenizer.encode(text, **options)
    except ValueError as error:  # characters that the vocabulary lacks
        raise ValueError(f"{where}: {error}") from None


def _real(row: Tensor, mask: Tensor | None, index: int) -> list[int]:
    ids: list[int] = (row if mask is None else row[mask[index]]).tolist()
    return ids
