"""What a model is trained on: a text, or random sequences that repeat themselves.

A batch is a pure function of a seed and the number of the update (see `stream`), so a run that is resumed needs no
generator state: it sees the batches that an uninterrupted run sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from circuits.arguments import require_model
from circuits.model import HookedGPT
from circuits.text import CharTokenizer, Tokenizer

VALIDATION_SHARE = 0.1  # the last tenth of a text
UNDETERMINED_SHARE = 0.1  # of the tokens that cannot be predicted, how many are trained on
_AT_A_TIME = 8192  # tokens in one validation batch


def stream(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A generator of its own for each seed, purpose and index."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))  # the CPU generator keeps 32 bits of it


@runtime_checkable
class Data(Protocol):
    """What `train` needs to know of what it trains on."""

    @property
    def d_vocab(self) -> int:
        """Number of token ids."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that goes with the model, if any."""
        ...

    @property
    def n_ctx(self) -> int:
        """Length of a sequence."""
        ...

    def batch(self, size: int, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Inputs, and the next token at each of their positions, or −100 where it is not trained on."""
        ...

    def validation_loss(self, model: HookedGPT) -> float:
        """Loss on what is kept from training, in nats."""
        ...

    def card(self) -> dict[str, Any]:
        """What the checkpoint records about the data, as plain JSON data."""
        ...


def text_loss(model: HookedGPT, tokens: Int[Tensor, " pos"]) -> float:
    """Mean next-token cross-entropy of a text, in nats: non-overlapping windows of `n_ctx`, every position counted.

    Window i reads tokens ``[i n_ctx, (i + 1) n_ctx)`` and predicts the token after each, so that the early positions of
    a window, which see little, count like the late ones. What remains after the last full window is left out.

    Raises:
        ValueError: Fewer than ``n_ctx + 1`` tokens.
    """
    require_model(model)
    n_ctx = model.config.n_ctx
    windows = (len(tokens) - 1) // n_ctx
    if windows < 1:
        raise ValueError(f"a loss over windows of n_ctx {n_ctx} needs at least {n_ctx + 1} tokens, not {len(tokens)}")
    inputs = tokens[: windows * n_ctx].view(windows, n_ctx)
    targets = tokens[1 : windows * n_ctx + 1].view(windows, n_ctx)
    return _mean_loss(model, inputs, targets, torch.ones_like(targets, dtype=torch.bool))


def _mean_loss(
    model: HookedGPT,
    inputs: Int[Tensor, "batch pos"],
    targets: Int[Tensor, "batch pos"],
    counted: Bool[Tensor, "batch pos"],
) -> float:
    """Cross-entropy over the counted positions, each weighing the same, summed in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for rows in _chunks(len(inputs), max(1, _AT_A_TIME // inputs.shape[1])):
        with torch.no_grad():
            logits = model(inputs[rows].to(model.device))
        nats = F.cross_entropy(logits.flatten(0, 1).float(), targets[rows].flatten().to(model.device), reduction="none")
        total += nats.double().cpu()[counted[rows].flatten()].sum()
    return float(total / counted.sum())


def _chunks(length: int, size: int) -> Iterator[slice]:
    yield from (slice(start, start + size) for start in range(0, length, size))


@dataclass(frozen=True, eq=False)
class TextData:
    """A text, its last tenth kept for validation.

    Attributes:
        tokens: The whole text.
        tokenizer: What made them.
        n_ctx: Length of a training sequence.
        source: Where the text came from, for the card: name, sha256 and the like.

    Raises:
        ValueError: A text too short for one sequence in each part.
    """

    tokens: Int[Tensor, " pos"]
    tokenizer: Tokenizer
    n_ctx: int
    source: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shortest = min(len(self.train_tokens), len(self.validation_tokens))
        if shortest < self.n_ctx + 1:
            raise ValueError(
                f"a text of {len(self.tokens)} tokens, its last tenth kept for validation, is too short for "
                f"sequences of n_ctx {self.n_ctx}: {shortest} tokens remain, {self.n_ctx + 1} are needed"
            )

    @staticmethod
    def from_text(text: str, n_ctx: int, source: dict[str, Any] | None = None) -> TextData:
        """One token per character, the vocabulary taken from the whole text."""
        if not text:
            raise ValueError("the text is empty")
        tokenizer = CharTokenizer.from_text(text)
        return TextData(torch.tensor(tokenizer.encode(text)), tokenizer, n_ctx, source or {})

    @staticmethod
    def from_file(path: str | Path, n_ctx: int) -> TextData:
        """A UTF-8 file, one token per character; the card records its name and sha256.

        Raises:
            ValueError: Not UTF-8 (and where), or too short.
        """
        path = Path(path)
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        source = {"file": path.name, "sha256": hashlib.sha256(content).hexdigest(), "characters": len(text)}
        return TextData.from_text(text, n_ctx, source)

    @property
    def _split(self) -> int:
        return int(len(self.tokens) * (1 - VALIDATION_SHARE))

    @property
    def train_tokens(self) -> Int[Tensor, " part"]:
        """The first nine tenths."""
        return self.tokens[: self._split]

    @property
    def validation_tokens(self) -> Int[Tensor, " part"]:
        """The last tenth."""
        return self.tokens[self._split :]

    @property
    def d_vocab(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.tokenizer.d_vocab

    def batch(self, size: int, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Windows from random places of the training part, and the same one token on."""
        tokens = self.train_tokens
        starts = torch.randint(len(tokens) - self.n_ctx, (size, 1), generator=generator)
        windows = tokens[starts + torch.arange(self.n_ctx + 1)]
        return windows[:, :-1], windows[:, 1:]

    def validation_loss(self, model: HookedGPT) -> float:
        """`text_loss` of the validation part."""
        return text_loss(model, self.validation_tokens)

    def card(self) -> dict[str, Any]:
        """The source, the sizes of the two parts, and what the validation loss is."""
        return self.source | {
            "train_tokens": len(self.train_tokens),
            "validation_tokens": len(self.validation_tokens),
            "validation_loss_of": "the last tenth: non-overlapping windows of n_ctx tokens, every position counted",
        }


@dataclass(frozen=True)
class RepeatedData:
    """Random tokens in blocks that stand twice in a row: ``x A A B B …``, lengths and places drawn for each sequence.

    With a fixed length the second copy could be predicted by position alone; so that it takes looking for the earlier
    occurrence, the first block begins anywhere from 0 to ``2 min_repeat`` and every block has a length of its own. (A
    first block that may begin late is learned much later: what a position sees of an early token is less diluted.)
    Where the vocabulary is large enough no token stands twice but in the two copies of a block.

    Attributes:
        d_vocab: Number of token ids.
        n_ctx: Length of a sequence.
        min_repeat: Shortest block.
        max_repeat: Longest block; by default half a sequence.
        seed: Seed of the validation sequences.
        validation_sequences: How many of them.

    Raises:
        ValueError: Blocks shorter than 2 tokens, or two of which do not fit.
    """

    d_vocab: int
    n_ctx: int
    min_repeat: int = 4
    max_repeat: int | None = None
    seed: int = 0
    validation_sequences: int = 512

    def __post_init__(self) -> None:
        if not 2 <= self.min_repeat <= self.longest <= (self.n_ctx + 1) // 2:
            raise ValueError(
                f"blocks of {self.min_repeat} to {self.longest} tokens, twice in a row, do not fit sequences of n_ctx "
                f"{self.n_ctx}: expected 2 ≤ min_repeat ≤ max_repeat ≤ {(self.n_ctx + 1) // 2}"
            )

    @property
    def longest(self) -> int:
        """The longest block."""
        return (self.n_ctx + 1) // 2 if self.max_repeat is None else self.max_repeat

    @property
    def tokenizer(self) -> None:
        """None: the tokens are numbers, not text."""
        return

    def sequences(
        self, size: int, generator: torch.Generator
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
        """Sequences of ``n_ctx + 1`` tokens, and which of their tokens are determined by what stands before.

        The first token of a second copy is not determined: nothing says that the block begins again.
        """
        length = self.n_ctx + 1
        if self.d_vocab >= length:
            fresh = torch.rand(size, self.d_vocab, generator=generator).argsort(dim=1)[:, :length]
        else:
            fresh = torch.randint(self.d_vocab, (size, length), generator=generator)
        source = torch.arange(length).repeat(size, 1)
        position = torch.arange(length)
        determined = torch.zeros(size, length, dtype=torch.bool)
        latest = min(2 * self.min_repeat, length - 2 * self.min_repeat)
        start = torch.randint(latest + 1, (size, 1), generator=generator)
        while bool((start <= length - 2 * self.min_repeat).any()):
            drawn = torch.randint(self.min_repeat, self.longest + 1, (size, 1), generator=generator)
            block = drawn.minimum((length - start) // 2)
            second = (position >= start + block) & (position < start + 2 * block) & (block >= self.min_repeat)
            source = torch.where(second, position - block, source)
            determined |= second & (position > start + block)
            start = torch.where(block >= self.min_repeat, start + 2 * block, length)
        return fresh.gather(1, source), determined

    def batch(self, size: int, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Sequences, and the same one token on, where it counts.

        Every determined token counts, and a random tenth of the others, on which nothing can be learned but not to be
        too sure: enough for that, and too few for their noise to drown what is to be learned. The rest have the target
        −100, which `torch.nn.functional.cross_entropy` leaves out.
        """
        tokens, determined = self.sequences(size, generator)
        counted = determined | (torch.rand(tokens.shape, generator=generator) < UNDETERMINED_SHARE)
        return tokens[:, :-1], tokens.masked_fill(~counted, -100)[:, 1:]

    def validation_loss(self, model: HookedGPT) -> float:
        """Mean loss over the determined tokens of fixed sequences, none of which is trained on."""
        tokens, determined = self.sequences(self.validation_sequences, stream(self.seed, "validation"))
        return _mean_loss(model, tokens[:, :-1], tokens[:, 1:], determined[:, 1:])

    def card(self) -> dict[str, Any]:
        """The task, its lengths, and what the validation loss is."""
        return {
            "task": "repeated",
            "min_repeat": self.min_repeat,
            "max_repeat": self.longest,
            "validation_loss_of": "the second copies in fresh sequences, their first token not counted",
        }
