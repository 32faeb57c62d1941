"""What measurements of interventions take beside what they intervene on: refused by name before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from analysis.uncertainty import check_level
from circuits.arguments import seeded
from circuits.rerun.requests import check_budget, check_executor, check_resume
from circuits.validity import require_flag

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
