"""What a claim of the lecture is here, and what checking it can find."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from analysis.claims.subject import Subject

Status = Literal["holds", "does not hold", "does not apply", "measured"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        status: Whether the claim holds; or what was measured where the lecture claims nothing that could fail.
        value: The measured quantity.
        bound: What it is compared with: at most this, or at least where `at_least`; None for a measurement.
        at_least: Which side of the bound is the right one.
        because: Why the claim does not apply, or what else there is to say.
    """

    status: Status
    value: float | None = None
    bound: float | None = None
    at_least: bool = False
    because: str = ""


def within(value: float, bound: float, because: str = "") -> Finding:
    """The claim holds if the value is at most the bound; NaN is not."""
    return Finding("holds" if value <= bound else "does not hold", value, bound, because=because)


def above(value: float, bound: float, because: str = "") -> Finding:
    """The claim holds if the value is at least the bound; NaN is not."""
    return Finding("holds" if value >= bound else "does not hold", value, bound, at_least=True, because=because)


def equal(value: int, expected: int, because: str = "") -> Finding:
    """The claim holds if two whole numbers are equal; what is shown is their difference."""
    shown = f"{value:,} against {expected:,}"
    return within(float(abs(value - expected)), 0.0, f"{shown}; {because}" if because else shown)


def measurement(value: float, because: str = "") -> Finding:
    """An empirical remark of the lecture, with its value on this model."""
    return Finding("measured", value, because=because)


class DoesNotApply(Exception):
    """Raised within a check where the claim says nothing about the model; the message is the reason."""


def applies(condition: object, otherwise: str) -> None:
    """Go on if the condition is true; else the claim does not apply, for this reason.

    Raises:
        DoesNotApply: The condition is false.
    """
    if not condition:
        raise DoesNotApply(otherwise)


@dataclass(frozen=True)
class Claim:
    """One checkable sentence of the lecture.

    Attributes:
        identifier: Its own name, such as ``"1.2.rank"``; the lecture's two 3.5s and two 5.2s are told apart as a and b.
        source: Where it stands.
        says: The claim, in a sentence.
        quantity: What is measured.
        mathematics: The claim in full.
        check: From the subject to what was found.
    """

    identifier: str
    source: str
    says: str
    quantity: str
    mathematics: str
    check: Callable[[Subject], Finding]

    def __call__(self, on: Subject) -> Finding:
        """Check the claim; whatever stops the check is reported as a claim that does not hold."""
        try:
            return self.check(on)
        except DoesNotApply as reason:
            return Finding("does not apply", because=str(reason))
        except Exception as error:
            return Finding("does not hold", math.nan, because=f"the check stopped: {type(error).__name__}: {error}")


def claim(identifier: str, source: str, says: str, quantity: str) -> Callable[[Callable[[Subject], Finding]], Claim]:
    """Make a claim of a check; its docstring is the mathematics."""

    def made(check: Callable[[Subject], Finding]) -> Claim:
        return Claim(identifier, source, says, quantity, inspect.cleandoc(check.__doc__ or ""), check)

    return made
