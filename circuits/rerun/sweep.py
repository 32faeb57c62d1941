"""Many interventions, one number for each and each prompt: cut into batches, run in any order, kept in a file."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from circuits.model import HookedGPT
from circuits.rerun.clean import Clean, clean_pass
from circuits.rerun.cost import Cost, Scope, allowance, batches_of, forward_flops
from circuits.rerun.engine import Changed, may_run_along, recompute, run_along
from circuits.rerun.fingerprint import fingerprint
from circuits.rerun.intervention import Intervened
from circuits.rerun.layout import Lane
from circuits.rerun.prepare import freeze_options, lanes_of, needs
from circuits.rerun.record import Record
from circuits.rerun.requests import check_budget, check_executor, check_resume
from circuits.tokens import check_mask, check_tokens

# Beyond this many cells the matrix products of a batch run at nearly full speed, and a larger one only takes memory.
MOST_CELLS = 2048
# Parcels of batches for each processor that an executor of other processes is sent.
_ERRANDS = 4


@runtime_checkable
class Reading(Protocol):
    """A measurement of final streams, bound to one clean run."""

    @property
    def clean(self) -> Float[Tensor, " batch"]:
        """Its value on the clean run, for each prompt."""
        ...

    def values(self, changed: Changed, labels: Sequence[str]) -> Float[Tensor, "lane batch"]:
        """Its value for each lane (called by its label where something is wrong with it) and each prompt."""
        ...


@runtime_checkable
class Reader(Protocol):
    """What is measured: which positions it reads, and how, once there is a clean run."""

    def positions(self, tokens: Tensor, mask: Tensor | None) -> Int[Tensor, "batch slot"] | None:
        """The positions that are read in each row; None: all."""
        ...

    def columns(self, d_vocab: int) -> int:
        """How many columns of the unembedding are read at each of them."""
        ...

    def bind(self, clean: Clean) -> Reading:
        """The measurement on this clean run."""
        ...


@dataclass(frozen=True, eq=False)
class Prepared:
    """What all batches of a sweep share.

    Attributes:
        clean: The clean run.
        reading: What is measured on it.
        read: The positions that are read; None: all.
        along: What the lanes changed, where there is but one batch and it ran along with the clean run.
    """

    clean: Clean
    reading: Reading
    read: Tensor | None
    along: Changed | None = None


@dataclass(frozen=True, eq=False)
class Job:
    """One batch of a sweep: independent of the others, and picklable where the sweep's parts are."""

    sweep: Sweep
    lanes: tuple[Lane, ...] = field(repr=False)

    def __call__(self) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """For each lane its number and the rows it stands for, and the values ``[lane batch]``."""
        with torch.no_grad():
            shared = self.sweep.prepared()
            changed = shared.along or recompute(shared.clean, self.lanes, shared.read)
            values = shared.reading.values(changed, [self.sweep.labels[lane.number] for lane in self.lanes])
        return [(lane.number, lane.rows) for lane in self.lanes], values


@dataclass(frozen=True, eq=False)
class Outcome:
    """The values of a sweep.

    Attributes:
        clean: On the clean run, for each prompt.
        values: Under each set of interventions.
    """

    clean: Float[Tensor, " batch"]
    values: Float[Tensor, "set batch"]


class Sweep:
    """A measurement under many interventions.

    Args:
        model: The model.
        tokens: The prompts.
        interventions: Interventions, each by itself, or sequences of them that apply together.
        reader: What is measured.
        labels: A name for each, for messages and the record.
        attention_mask: 1 for tokens, 0 for padding.
        freeze: What is held at the clean run, as for `rerun`.
        budget: Bytes that a batch may take beside the model and the clean run; by default a part of what is free.
        clean: A clean run of these prompts, where there is one already; made again where it lacks an activation.

    Raises:
        TypeError, KeyError, ValueError, IndexError: What this model and batch cannot have, by name.
    """

    def __init__(
        self,
        model: HookedGPT,
        tokens: Int[Tensor, "batch pos"],
        interventions: Sequence[Intervened],
        reader: Reader,
        labels: Sequence[str],
        *,
        attention_mask: Tensor | None = None,
        freeze: Iterable[str] = (),
        budget: int | None = None,
        clean: Clean | None = None,
    ) -> None:
        if model.in_scope_of_hooks:
            raise ValueError("a sweep takes its interventions as arguments; leave the `with model.hooks(...)` block")
        check_budget(budget)
        self.model, self.reader, self.labels = model, reader, list(labels)
        self.tokens = check_tokens(tokens, model.config)
        self.mask: Bool[Tensor, "batch pos"] | None = check_mask(attention_mask, self.tokens)
        self.freeze = freeze_options(freeze)
        self.lanes = lanes_of(model, self.tokens, self.mask, interventions, self.freeze)
        self.read = reader.positions(self.tokens, self.mask)
        self.scope = self._scope()
        self.budget = allowance(model.device, sum(map(self.scope.bytes, self.lanes))) if budget is None else budget
        self._batches = batches_of(self.lanes, self.scope, self.budget, MOST_CELLS)
        self._clean = clean
        self._prepared: Prepared | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clean": None, "_prepared": None, "_lock": None, "_batches": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def _scope(self) -> Scope:
        slots = None if self.read is None else self.read.shape[1]
        stop = self.tokens.shape[1] if self.read is None else int(self.read.max()) + 1
        columns = self.reader.columns(self.model.config.d_vocab)
        return Scope(self.model.config, stop, slots, columns, self.model.embed.weight.element_size())

    @property
    def jobs(self) -> list[Job]:
        """The batches, each of which can be run anywhere and in any order."""
        return [Job(self, tuple(batch)) for batch in self._batches]

    def cost(self) -> Cost:
        """What running it will take."""
        scope = self.scope
        alike = Counter((lane.entry, lane.start, lane.height) for lane in self.lanes)
        flops = sum(count * scope.flops(*what) for what, count in alike.items())
        memory = max((sum(map(scope.bytes, batch)) for batch in self._batches), default=0)
        forwards = flops / forward_flops(self.model.config, self.tokens)
        return Cost(len(self.lanes), len(self._batches), flops, forwards, memory)

    def prepared(self) -> Prepared:
        """The clean run and what is measured on it, made once by each copy of the sweep.

        Jobs that run in this process share one copy. A job that was pickled for another process holds a copy of its
        own, so there each job runs the clean pass again: other processes pay where batches are much more than that.
        """
        with self._lock:
            if self._prepared is None:
                clean, along = self._clean_run(needs(self.model, self.lanes))
                self._prepared = Prepared(clean, self.reader.bind(clean), self.read, along)
            return self._prepared

    def _clean_run(self, wanted: frozenset[str]) -> tuple[Clean, Changed | None]:
        if self._clean is not None and wanted <= self._clean.captured.keys():
            return self._clean, None
        lanes = self._batches[0] if len(self._batches) == 1 else []
        if may_run_along(self.model, lanes, self.read, self.tokens.shape[1]):
            return run_along(self.model, self.tokens, self.mask, lanes, self.read, wanted)
        return clean_pass(self.model, self.tokens, self.mask, wanted), None

    def run(
        self,
        *,
        executor: Executor | None = None,
        progress: bool = True,
        resume: str | Path | None = None,
        title: str = "rerun",
    ) -> Outcome:
        """Run what is left to do.

        Args:
            executor: Where the batches run; by default here, one after the other. In another process every batch runs
                the clean pass too (see `prepared`); threads share this one's.
            progress: Show a progress bar on a terminal.
            resume: A file that keeps what is done, also when the run is interrupted; what it holds already is not run
                again. None keeps nothing.
            title: What the progress bar says, before what it costs.

        Raises:
            TypeError: What is no executor or names no file.
            ValueError: The file belongs to another sweep.
        """
        check_executor(executor)
        check_resume(resume)
        with torch.no_grad():
            clean = self.prepared().reading.clean
        record = Record(len(self.lanes), clean, resume, fingerprint(self) if resume else "")
        jobs = [job for job in self.jobs if not record.holds(job.lanes)]
        results = _results(jobs, executor)
        if progress and len(jobs) > 1:
            words = f"{title}: {self.cost().forwards:.3g} forward passes' worth"
            results = tqdm(results, words, len(jobs), leave=False, disable=None)  # None: shown on a terminal only
        try:
            for done, values in results:
                record.add(done, values)
        finally:
            record.close()
        return Outcome(clean, record.values)


def _results(jobs: Sequence[Job], executor: Executor | None) -> Iterable[Any]:
    """What the jobs return, as it comes."""
    if executor is None:
        yield from (job() for job in jobs)
        return
    futures = [executor.submit(_elsewhere, errand, os.getpid()) for errand in _errands(jobs, executor)]
    try:
        for future in as_completed(futures):
            yield from future.result()
    finally:
        for future in futures:
            future.cancel()


def _errands(jobs: Sequence[Job], executor: Executor) -> list[Sequence[Job]]:
    """Jobs that travel together: to another process they take the model along, and share a clean run there."""
    most = len(jobs) if isinstance(executor, ThreadPoolExecutor) else _ERRANDS * (os.cpu_count() or 1)
    return [jobs[i::most] for i in range(min(most, len(jobs)))]


def _elsewhere(jobs: Sequence[Job], home: int) -> list[tuple[list[tuple[int, Tensor]], Tensor]]:
    """Jobs as an executor runs them: on one thread in another process.

    A forked process inherits OpenMP's state but not its threads, and would wait for them for ever.
    """
    if os.getpid() == home:
        return [job() for job in jobs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [job() for job in jobs]
    finally:
        torch.set_num_threads(threads)
