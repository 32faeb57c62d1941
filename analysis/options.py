"""What measurements of interventions take beside what they intervene on: refused by name before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TypedDict

from analysis.uncertainty import check_level
from circuits.arguments import seeded
from circuits.rerun.requests import check_budget, check_executor, check_resume
from circuits.validity import require_flag


class SweepOptions(TypedDict, total=False):
    """What every sweep of interventions takes.

    Attributes:
        freeze: Hold ``"patterns"`` or ``"norms"`` (their scales), or both, at the unchanged run: what is left is the
            effect through values alone.
        level: Level of the bootstrap intervals over prompts (0.95).
        seed: Seed of everything that is drawn: bootstrap, p-values, resampling (0).
        budget: Bytes that a batch of runs may take, a whole number; by default a part of what is free.
        executor: A `concurrent.futures` executor that runs the batches; by default they run here. Other processes need
            a metric that can be pickled (a function of a module, no lambda); there batches run on one thread, and each
            parcel of them makes the unchanged run again, which threads share.
        resume: A file that keeps what is done, so that an interrupted sweep goes on where it stopped.
        progress: Show a progress bar on a terminal (True).
    """

    freeze: Iterable[str]
    level: float
    seed: int
    budget: int | None
    executor: Executor | None
    resume: str | Path | None
    progress: bool


# Those that a run is told nothing else about before it is too late: masks, references and positions say it themselves.
_CHECKS: dict[str, Callable[[object], object]] = {
    "level": check_level,
    "seed": seeded,
    "budget": check_budget,
    "executor": check_executor,
    "resume": check_resume,
    **{flag: partial(require_flag, flag) for flag in ("per_position", "normalise", "progress")},
}


def check_options(options: Mapping[str, object], known: Iterable[str], what: str) -> None:
    """Refuse options that there are not, and values that cannot mean anything.

    Args:
        options: As a caller gave them.
        known: The options that there are.
        what: What takes them, for the message.

    Raises:
        TypeError: An unknown option (with the nearest), or a value of the wrong kind.
        ValueError: A value out of range.
    """
    names = tuple(known)
    for name, value in options.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{what} has no option {name!r}{hint}; the options are {', '.join(names)}")
        if name in _CHECKS:
            _CHECKS[name](value)
