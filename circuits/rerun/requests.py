"""What may be asked of a sweep beside its interventions: refused by name before anything runs."""

from __future__ import annotations

import os
from concurrent.futures import Executor

from circuits.validity import require_whole


def check_budget(budget: object) -> None:
    """Refuse a memory budget that is no number of bytes; None is the default.

    Raises:
        TypeError: Not a whole number.
        ValueError: Below 1.
    """
    if budget is not None:
        require_whole("budget (bytes)", budget)


def check_executor(executor: object) -> None:
    """Refuse what runs no jobs; None runs them here.

    Raises:
        TypeError: Not an executor.
    """
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor must be a concurrent.futures.Executor, such as ThreadPoolExecutor(4), or None, not {executor!r}"
        )


def check_resume(resume: object) -> None:
    """Refuse what names no file; None keeps nothing.

    Raises:
        TypeError: Not a path.
    """
    if resume is not None and not isinstance(resume, str | os.PathLike):
        raise TypeError(f"resume must be the path of a file, or None, not {resume!r}")
