"""What is measured of every head without a prompt: ranks, copying, attention scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from analysis.patterns import HeadScores, head_scores
from analysis.ranks import CopyingScores, HeadRanks, copying_scores, head_ranks
from circuits.components import Head

if TYPE_CHECKING:
    from circuits.model import HookedGPT

SCORES = ("previous", "current", "first", "duplicate", "induction", "entropy")
# Rank measures and the format of each.
RANKS = {
    "numerical_rank": ".0f",
    "stable_rank": ".2f",
    "effective_rank": ".1f",
    "participation_ratio": ".1f",
    "energy_rank": ".0f",
}
CIRCUITS = ("QK", "OV")
CLEAR = 0.3  # a score from which a head is called after it

Progress = Callable[[str], None]


@dataclass(frozen=True)
class HeadMeasurements:
    """Every head of a model, by its weights and by what it attends to on different random tokens, twice.

    Attributes:
        heads: The heads, layer by layer: the order of all lists and tables.
        ranks: Ranks and spectra of W_QK and W_OV.
        copies: Copying scores.
        attention: Attention scores.
    """

    heads: tuple[Head, ...]
    ranks: HeadRanks
    copies: CopyingScores
    attention: HeadScores

    def score(self, name: str) -> list[float]:
        """One attention score of every head."""
        return _flat(getattr(self.attention, name))

    @cached_property
    def copying(self) -> list[float]:
        """The copying score of every head."""
        return _flat(self.copies.score)

    def rank(self, circuit: str, name: str) -> list[float]:
        """One rank measure of one circuit of every head."""
        return _flat(getattr(self.ranks, name)[..., self.ranks.circuits.index(circuit)])

    def spectrum(self, circuit: str) -> list[list[float]]:
        """The singular values of one circuit of every head, the largest first."""
        values = self.ranks.singular_values[..., self.ranks.circuits.index(circuit), :]
        spectra: list[list[float]] = values.flatten(0, 1).tolist()
        return spectra

    def role(self, head: Head) -> tuple[str, float] | None:
        """What a head mostly looks at, and that score; None where no score is clear."""
        place = self.heads.index(head)
        clear = [(value, name) for name in SCORES[:-1] if (value := self.score(name)[place]) >= CLEAR]
        return max(clear)[::-1] if clear else None

    def rows(self) -> list[dict[str, Any]]:
        """One row per head with every number, for tables and JSON."""
        columns: dict[str, list[Any]] = {"head": [str(head) for head in self.heads]}
        columns |= {name: self.score(name) for name in SCORES}
        columns |= {f"{c}_{name}": self.rank(c, name) for c in CIRCUITS for name in RANKS}
        columns["copying"] = self.copying
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def measure_heads(model: HookedGPT, progress: Progress = lambda step: None) -> HeadMeasurements:
    """Measure every head of a model; `progress` is called with each step before it begins."""
    config = model.config
    progress("ranks")
    ranks = head_ranks(model)
    progress("copying scores")
    copies = copying_scores(model)
    progress("attention scores")
    return HeadMeasurements(
        heads=tuple(Head(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)),
        ranks=ranks,
        copies=copies,
        attention=head_scores(model),
    )


def _flat(values: Any) -> list[float]:
    numbers: list[float] = values.flatten().tolist()
    return numbers
