"""Timing that a noisy machine cannot bend: contestants take turns, and medians of their turns are compared."""

from __future__ import annotations

import ctypes
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: What was done.
        ours: Our figure (seconds, or bytes for memory).
        theirs: The other's figure.
        other: Who the other is.
        must: The bound that the ratio has to meet; None where nothing is promised.
        aim: The bound it should meet.
        better: What is bounded: the ratio ``ours / theirs`` from above (``"lower"``), the speed-up ``theirs / ours``
            from below (``"higher"``), or the excess ``ours − theirs`` from above (``"excess"``).
        unit: ``"s"`` or ``"bytes"``.
    """

    work: str
    ours: float
    theirs: float
    other: str
    must: float | None = None
    aim: float | None = None
    better: Literal["lower", "higher", "excess"] = "lower"
    unit: Literal["s", "bytes"] = "s"

    @property
    def figure(self) -> float:
        """The figure that the bounds are for."""
        if self.better == "excess":
            return self.ours - self.theirs
        return self.ours / self.theirs if self.better == "lower" else self.theirs / self.ours

    @property
    def met(self) -> bool | None:
        """Whether the figure meets `must`; None where nothing is promised."""
        if self.must is None:
            return None
        return self.figure >= self.must if self.better == "higher" else self.figure <= self.must


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int = 9, warmup: int = 2, at_least: float = 0.0
) -> dict[str, float]:
    """Median seconds of each contestant; every round runs all of them, in alternating order.

    Args:
        contestants: Name to what is timed.
        repeats: Counted rounds.
        warmup: Rounds before those.
        at_least: Go on past `repeats` until this many seconds were spent, so that short work gets many rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for _ in range(warmup):
        for name in names:
            contestants[name]()
    gc.collect()
    gc.disable()
    try:
        began = time.perf_counter()
        turn = 0
        while turn < repeats or time.perf_counter() - began < at_least:
            for name in names if turn % 2 == 0 else reversed(names):
                start = time.perf_counter()
                contestants[name]()
                samples[name].append(time.perf_counter() - start)
            turn += 1
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in samples.items()}


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not report private resident memory")


def _give_back_freed_memory() -> None:
    """Freed memory that the allocator keeps would be used again unseen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def peak_memory(every: float = 0.002) -> Iterator[Callable[[], int]]:
    """How far private resident memory rose above its value on entry, in bytes; sampled, so a floor of the true peak."""
    gc.collect()
    _give_back_freed_memory()
    base = peak = _resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(every):
            peak = max(peak, _resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: max(peak, _resident()) - base
    finally:
        done.set()
        watcher.join()
