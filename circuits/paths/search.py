"""Best first through the suffixes of paths, backwards from the logit, until nothing is left, proven, or paid for."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.components import Component, Head
from circuits.paths.bounds import Reach, reach
from circuits.paths.counting import Counts
from circuits.paths.expansion import Children, children
from circuits.paths.frozen import FrozenRun, Suffix

POSITIONS_AT_ONCE = 256  # of all suffixes in one step together: what keeps a product of matrices busy and small


@dataclass(frozen=True, order=True)
class Open:
    """A suffix whose longer paths have not been looked at; the most promising sorts first."""

    rank: float
    suffix: Suffix
    deeper: Tensor = field(compare=False)
    bound: float = field(compare=False)


@dataclass(frozen=True, order=True)
class Found:
    """A path with its value; the smallest sorts first."""

    size: float
    components: tuple[Component, ...] = field(compare=False)
    suffix: Suffix = field(compare=False)
    value: Tensor = field(compare=False)


@dataclass
class Search:
    """The state of one search.

    Attributes:
        run: The frozen run.
        root: The direction of the logit.
        top: How many paths to keep; None for all.
        best: The largest found, as a heap.
        open: Unexpanded suffixes by the layer of their earliest head, as heaps.
        shut: Suffixes that no listed path can come from.
        found: The sum of all paths looked at, ``[batch]``.
        n_found: Their number.
    """

    run: FrozenRun
    root: Float[Tensor, "batch pos d_model"]
    top: int | None
    found: Float[Tensor, " batch"]
    n_found: int = 0
    best: list[Found] = field(default_factory=list)
    open: dict[int, list[Open]] = field(default_factory=dict)
    shut: list[Open] = field(default_factory=list)

    def go(self, budget: int, counts: Counts) -> None:
        """Expand up to `budget` suffixes; all of them, without bounds, where the budget suffices."""
        looking_ahead = None if counts.expansions <= budget else reach(self.run)
        self._expand([()], len(self.run.layers), looking_ahead)
        spent = 1
        while spent < budget and (group := self._next(budget - spent)):
            self._expand([entry.suffix for entry in group], group[0].suffix[0].layer, looking_ahead)
            spent += len(group)

    @property
    def threshold(self) -> float:
        """A path must be larger than this to be listed."""
        return self.best[0].size if self.top is not None and len(self.best) >= self.top else -1.0

    def unexpanded(self) -> list[Open]:
        """Every suffix that was not expanded."""
        return [*self.shut, *(entry for heap in self.open.values() for entry in heap)]

    def offer(self, components: tuple[Component, ...], suffix: Suffix, value: Float[Tensor, " batch"]) -> None:
        """Count a path, and keep it if it is large enough."""
        self.found += value
        self.n_found += 1
        self._keep(Found(float(value.abs().mean()), components, suffix, value))

    def _keep(self, found: Found) -> None:
        if self.top is None or len(self.best) < self.top:
            heapq.heappush(self.best, found)
        elif found.size > self.threshold:
            heapq.heapreplace(self.best, found)

    def _next(self, most: int) -> list[Open]:
        """The most promising suffixes, of one layer so that they expand together; those proven useless are shut."""
        group: list[Open] = []
        at_once = min(most, max(1, POSITIONS_AT_ONCE // (self.root.shape[0] * self.root.shape[1])))
        while not group and any(self.open.values()):
            heap = min((heap for heap in self.open.values() if heap), key=lambda heap: heap[0].rank)
            while heap and len(group) < at_once:
                entry = heapq.heappop(heap)
                (self.shut if entry.bound <= self.threshold else group).append(entry)
        return group

    def _expand(self, suffixes: list[Suffix], below: int, looking_ahead: Reach | None) -> None:
        D = torch.stack([self.run.direction(self.root, suffix) for suffix in suffixes])
        for part in children(self.run, D, below, looking_ahead):
            self._take_paths(part, suffixes)
            if part.layer > 0:
                self._take_suffixes(part, suffixes)

    def _take_paths(self, part: Children, suffixes: list[Suffix]) -> None:
        self.found += part.values.sum((0, 2, 3))
        sizes = part.values.abs().mean(1)
        self.n_found += sizes.numel()
        flat = sizes.flatten()
        if self.top is not None and len(flat) > self.top:
            flat, places = flat.topk(self.top)
        else:
            places = torch.arange(len(flat), device=flat.device)
        for size, place in zip(flat.tolist(), places.tolist(), strict=True):
            if size <= self.threshold:
                continue
            which, head, start = (int(i) for i in torch.unravel_index(torch.tensor(place), sizes.shape))
            first = Head(part.layer, head)
            components = (*self.run.starts(first)[start], *suffixes[which])
            value = part.values[which, :, head, start].clone()
            self._keep(Found(size, components, (first, *suffixes[which]), value))

    def _take_suffixes(self, part: Children, suffixes: list[Suffix]) -> None:
        heap = self.open.setdefault(part.layer, [])
        shape = (part.deeper.shape[0], part.deeper.shape[2])
        bounds = [[float("inf")] * shape[1]] * shape[0] if part.bound is None else part.bound.tolist()
        expected = bounds if part.expected is None else part.expected.tolist()
        for which, suffix in enumerate(suffixes):
            for head in range(shape[1]):
                longer = (Head(part.layer, head), *suffix)
                deeper = part.deeper[which, :, head]
                heapq.heappush(heap, Open(-expected[which][head], longer, deeper, bounds[which][head]))
