"""What a recomputation costs, in floating-point operations and in memory, known before it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from circuits.config import GPTConfig
from circuits.rerun.layout import Lane
from circuits.rerun.stages import Entry, Stage

# Bytes for which nobody need look at what is free.
_A_LITTLE = 2**25


@dataclass(frozen=True)
class Cost:
    """What a sweep will do.

    Attributes:
        interventions: How many sets of interventions.
        batches: How many passes they share.
        flops: Floating-point operations, a multiply-add counted as 2.
        forwards: The same in full forward passes over the batch, unembedding included.
        bytes: Memory of the largest batch, beside the model and the clean run.
    """

    interventions: int
    batches: int
    flops: float
    forwards: float
    bytes: int

    def __str__(self) -> str:
        passes = f"{self.forwards:.3g} forward passes' worth of operations"
        return (
            f"{_of(self.interventions, 'intervention')} in {_of(self.batches, 'batch', 'es')}: {passes} "
            f"({self.flops:.2e}) "
            f"instead of {self.interventions}, {self.bytes / 2**20:.0f} MiB at a time"
        )


def _of(count: int, thing: str, ending: str = "s") -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{ending}"


@dataclass(frozen=True)
class Scope:
    """What does not differ between the lanes of a sweep.

    Attributes:
        config: The architecture.
        stop: One past the last position that can matter.
        read: Positions that are read in each row; None: all.
        columns: Columns of the unembedding that are read at each of them.
        itemsize: Bytes of a number.
    """

    config: GPTConfig
    stop: int
    read: int | None
    columns: int
    itemsize: int
    _known: dict[tuple[int, bool], int] = field(default_factory=dict, repr=False, compare=False)

    def last_width(self, start: int) -> int:
        """Positions that the last block goes on with, of those from `start` on."""
        length = max(self.stop - start, 0)
        return length if self.read is None else min(self.read, length)

    def flops(self, entry: Entry, start: int, rows: int) -> float:
        """Operations of a lane of so many rows that begins there."""
        length = self.stop - start
        if length <= 0:
            return 0.0
        layer, stage = entry
        last = self.config.n_layers - 1
        total = 0.0
        for index in range(layer, self.config.n_layers):
            width = self.last_width(start) if index == last else length
            stage_here = stage if index == layer else Stage.START
            total += _block_flops(self.config, stage_here, length, width, self.stop)
        return rows * (total + 2 * self.last_width(start) * self.config.d_model * self.columns)

    def bytes(self, lane: Lane) -> int:
        """Memory of one lane while it is under way: an upper estimate of what is alive at once."""
        return lane.height * self.bytes_per_row(lane)

    def bytes_per_row(self, lane: Lane) -> int:
        """The same for one of its rows."""
        explicit = self.config.attn_softcap is not None or lane.edits_attention
        key = lane.start, explicit
        if key not in self._known:
            self._known[key] = self._bytes_from(*key)
        return self._known[key]

    def _bytes_from(self, start: int, explicit: bool) -> int:
        c, length = self.config, max(self.stop - start, 0)
        width = (c.n_heads + 2 * c.n_kv_heads) * c.d_head
        cell = 7 * c.d_model + 2 * width + (4 if c.gated_mlp else 3) * c.d_mlp
        keys = 2 * self.stop * c.n_heads * c.d_head
        matrices = 4 * c.n_heads * length * self.stop if explicit else 0
        return self.itemsize * (length * cell + keys + matrices)


def _block_flops(config: GPTConfig, stage: Stage, length: int, width: int, keys: int) -> float:
    """Operations of one row in one block from a stage on: `length` positions, `width` of them behind the attention."""
    d, heads = config.d_model, config.n_heads * config.d_head
    kv = config.n_kv_heads * config.d_head
    maps = 3 if config.gated_mlp else 2
    down = 2 * width * d * config.d_mlp
    mlp = maps * down
    out = 2 * width * d * heads
    attention = 2 * length * d * 2 * kv + 2 * width * d * heads + 4 * width * keys * heads
    return float(
        {
            Stage.EMBED: attention + out + mlp,
            Stage.START: attention + out + mlp,
            Stage.HEADS: out + (0 if config.parallel_blocks else mlp),
            Stage.MID: mlp,
            Stage.POST: down,
            Stage.OUT: 0,
            Stage.END: 0,
        }[stage]
    )


def forward_flops(config: GPTConfig, tokens: Tensor) -> float:
    """Operations of one full forward pass over a batch, the unembedding included."""
    batch, pos = tokens.shape
    block = _block_flops(config, Stage.START, pos, pos, pos)
    return batch * (config.n_layers * block + 2.0 * pos * config.d_model * config.d_vocab)


def allowance(device: torch.device, wanted: int) -> int:
    """Memory that a sweep may take by default: a quarter of what is free, at most 2 GiB; a little is always there."""
    if wanted <= _A_LITTLE:
        return _A_LITTLE
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_main_memory()
    return min(free // 4, 2 * 2**30)


def _free_main_memory() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2 * 2**30


def batches_of(lanes: Sequence[Lane], scope: Scope, budget: int, most_cells: int) -> list[list[Lane]]:
    """Lanes in the order of their entry, cut into batches that fit a memory budget.

    A lane that does not fit by itself is cut between its rows, which do not see each other.

    Args:
        lanes: The lanes.
        scope: What they share.
        budget: Bytes that one batch may take.
        most_cells: Rows × positions beyond which a larger batch is no faster.

    Raises:
        ValueError: One row does not fit the budget; the message says how much it needs.
    """
    batches: list[list[Lane]] = []
    taken = cells = 0
    for whole in sorted(lanes, key=lambda lane: (lane.entry, lane.start)):
        for lane in _cut(whole, scope, budget):
            size, count = scope.bytes(lane), lane.height * max(scope.stop - lane.start, 0)
            if not batches or taken + size > budget or cells + count > most_cells:
                batches.append([])
                taken = cells = 0
            batches[-1].append(lane)
            taken, cells = taken + size, cells + count
    return batches


def _cut(lane: Lane, scope: Scope, budget: int) -> list[Lane]:
    if scope.bytes(lane) <= budget:
        return [lane]
    needed = scope.bytes_per_row(lane)
    if any(not placed.edit.pointwise for placed in lane.placed):
        needed = scope.bytes(lane)  # a function that sees several rows must see them together
    if needed > budget:
        raise ValueError(
            f"a memory budget of {budget / 2**20:.3g} MiB is too small: one row needs about {needed / 2**20:.3g} MiB"
        )
    at_once = budget // needed
    return [Lane(lane.number, lane.placed, lane.entry, lane.start, rows) for rows in lane.rows.split(at_once)]
