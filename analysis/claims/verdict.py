"""The result of checking every claim."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from analysis.claims.claim import Claim, Finding, Status
from analysis.results import Column, Result, jsonable, result

ORDER: tuple[Status, ...] = ("holds", "does not hold", "does not apply", "measured")


@dataclass(frozen=True)
class Verdict:
    """One claim and what was found.

    Attributes:
        claim: The claim.
        finding: What checking it found.
    """

    claim: Claim
    finding: Finding

    def to_dict(self) -> dict[str, Any]:
        """The row as plain data."""
        found = self.finding
        return {
            "claim": self.claim.identifier,
            "source": self.claim.source,
            "says": self.claim.says,
            "quantity": self.claim.quantity,
            "value": found.value,
            "bound": found.bound,
            "relation": relation(found),
            "status": found.status,
            "because": found.because,
        }


def relation(found: Finding) -> str | None:
    """How value and bound must compare."""
    if found.bound is None:
        return None
    return "≥" if found.at_least else "≤"


def compared(row: Mapping[str, Any]) -> str:
    """A row's value beside its bound, ``1.2e-15 ≤ 1e-09``; empty where nothing was measured."""
    if row["value"] is None:
        return ""
    value = format(row["value"], ".3g")
    return value if row["bound"] is None else f"{value} {row['relation']} {row['bound']:.3g}"


@result
class Verification(Result):
    """Every claim of the lecture, checked on one model.

    Attributes:
        claims: Identifiers.
        value: What was measured; NaN where a claim does not apply.
        bound: What it was compared with; NaN for a measurement.
        verdicts: The same in full, with the sentence, the status and the reason.
        model: What was checked, in words.
    """

    table = ("value", "bound")
    claims: tuple[str, ...]
    value: Float[Tensor, " claim"]
    bound: Float[Tensor, " claim"]
    verdicts: tuple[Verdict, ...]
    model: str

    @property
    def holds(self) -> bool:
        """Whether no claim fails."""
        return not self.failures

    @property
    def failures(self) -> tuple[Verdict, ...]:
        """The claims that do not hold."""
        return tuple(v for v in self.verdicts if v.finding.status == "does not hold")

    def __getitem__(self, identifier: str) -> Verdict:
        """The verdict on one claim.

        Raises:
            KeyError: No such claim was checked.
        """
        if identifier not in self.claims:
            raise KeyError(f"{identifier!r} was not checked; checked were {', '.join(self.claims)}")
        return self.verdicts[self.claims.index(identifier)]

    def count(self, status: Status) -> int:
        """How many claims have this status."""
        return sum(v.finding.status == status for v in self.verdicts)

    def title(self) -> str:
        """The model, and how many claims came out how."""
        many = {"holds": "hold", "does not hold": "do not hold", "does not apply": "do not apply"}
        counted = {status: self.count(status) for status in ORDER}
        words = [f"{n} {status if n == 1 else many.get(status, status)}" for status, n in counted.items() if n]
        return f"{len(self.claims)} claims of the lecture on {self.model}: {', '.join(words)}"

    def columns(self, *fields: str) -> dict[str, Column]:
        """The table, with source, sentence, status and reason beside the numbers."""
        table = super().columns(*fields)
        rows = [verdict.to_dict() for verdict in self.verdicts]
        for name in ("status", "source", "says", "quantity", "because"):
            table[name] = np.array([row[name] for row in rows], dtype=object)
        return table

    def rows(self, *fields: str) -> Iterator[dict[str, Any]]:
        """The rows as plain data; None where a number is missing."""
        for verdict in self.verdicts:
            row = verdict.to_dict()
            yield {name: row[name] for name in fields} if fields else row

    def to_dict(self) -> dict[str, Any]:
        """The whole as JSON data."""
        counts = {status: self.count(status) for status in ORDER}
        return {
            "type": "Verification",
            "model": self.model,
            "holds": self.holds,
            "counts": counts,
            "claims": jsonable([verdict.to_dict() for verdict in self.verdicts]),
        }

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def __repr__(self) -> str:
        width = max(map(len, self.claims), default=0)
        lines = [self.title()]
        for verdict in self.failures:
            found = verdict.finding
            lines.append(
                f"  {verdict.claim.identifier:<{width}}  does not hold: {verdict.claim.says} ({found.because})"
            )
        return "\n".join(lines)


def verification(verdicts: tuple[Verdict, ...], model: str) -> Verification:
    """Verdicts as a result."""

    def numbers(name: str) -> Tensor:
        found = [getattr(verdict.finding, name) for verdict in verdicts]
        return torch.tensor([torch.nan if x is None else x for x in found], dtype=torch.float64)

    return Verification(
        claims=tuple(verdict.claim.identifier for verdict in verdicts),
        value=numbers("value"),
        bound=numbers("bound"),
        verdicts=verdicts,
        model=model,
    )
