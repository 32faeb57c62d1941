"""A patching settled but not yet run: what it will do, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from analysis import options as asked
from analysis.metrics import Metric
from analysis.patching.pairs import Pair
from analysis.patching.result import KINDS, Patching, summed_up
from analysis.patching.runs import reader_of, source_value, weights_of
from analysis.readings import ReadMetric
from circuits.model import HookedGPT
from circuits.rerun import Intervention
from circuits.rerun.clean import Clean
from circuits.rerun.cost import Cost
from circuits.rerun.sweep import Sweep


class PatchOptions(asked.SweepOptions, total=False):
    """What every patching takes beside its prompts, its sites and its metric.

    Attributes:
        clean_mask: 1 for tokens, 0 for padding in the clean prompts.
        corrupt_mask: Likewise in the corrupt ones.
        alignment: For each column of the clean prompts (or each cell) the column of the corrupt ones that stands for
            it, −1 for none; needed where a prompt's two forms differ in length.
        normalise: Give the effects as a share of the distance between the two runs too (True).
        freeze, level, seed, budget, executor, resume, progress: As for every sweep, see
            `analysis.options.SweepOptions`.
    """

    clean_mask: Tensor | None
    corrupt_mask: Tensor | None
    alignment: Sequence[int] | Int[Tensor, "batch pos"] | None
    normalise: bool


@dataclass(frozen=True, eq=False)
class PatchPlan:
    """Patches of one run with what their summary needs.

    Attributes:
        model: The model.
        pair: The two runs' prompts.
        sets: The patches, one for each cell of the result.
        labels: What each is called in messages.
        counted: Which prompts count in which patch.
        metric: What is measured.
        base: The unpatched run.
        source: The run patched from.
        shape: The axes of the result before the prompts, in the order of `sets`.
        site: What is patched.
        positions: Where alone; None: at every position.
        options: As they were given.
    """

    model: HookedGPT
    pair: Pair
    sets: Sequence[Intervention]
    labels: Sequence[str]
    counted: Bool[Tensor, "patch batch"]
    metric: Metric
    base: Clean
    source: Clean
    shape: dict[str, int]
    site: str
    positions: tuple[int, ...] | None
    options: PatchOptions

    @property
    def cost(self) -> Cost:
        """What running it will take, beside the two unpatched runs, which making the plan took."""
        return self._sweep(self._acting).cost()

    @torch.no_grad()
    def run(self) -> Patching:
        """Run the patches and sum up what they change.

        Raises:
            ValueError: As for `activation_patch`, where that can be known from the runs alone.
        """
        source = source_value(self.metric, self.pair, self.base, self.source, self._reader)
        clean, values = self._values()
        effect = torch.where(self.counted, values - clean, float("nan"))
        level = self.options.get("level", 0.95)
        summary = summed_up(
            effect,
            clean,
            source,
            weights_of(self.metric, self.pair, self._reader),
            self.metric,
            normalise=self.options.get("normalise", True),
            level=level,
            seed=self.options.get("seed", 0),
        )
        kind: Any = KINDS["head" in self.shape, "pos" in self.shape]
        sizes = tuple(self.shape.values())
        result: Patching = kind(
            **summary.laid_out(*sizes),
            effect=effect.reshape(*sizes, -1),
            base=clean,
            source=source,
            site=self.site,
            direction=self.pair.direction,
            metric=self.metric.name,
            level=level,
            positions=self.positions,
        )
        return result

    @property
    def _reader(self) -> ReadMetric:
        return reader_of(self.metric, self.pair)

    @property
    def _acting(self) -> list[int]:
        """The patches that change anything: one at a position where no prompt differs leaves the run as it is."""
        masks = {id(given.positions): given.positions for given in self.sets}
        somewhere = {key: not isinstance(mask, Tensor) or bool(mask.any()) for key, mask in masks.items()}
        return [i for i, given in enumerate(self.sets) if somewhere[id(given.positions)]]

    def _sweep(self, acting: Sequence[int]) -> Sweep:
        return Sweep(
            self.model,
            self.pair.base.tokens,
            [self.sets[i] for i in acting],
            self._reader,
            [self.labels[i] for i in acting],
            attention_mask=self.pair.base.mask,
            freeze=self.options.get("freeze", ()),
            budget=self.options.get("budget"),
            clean=self.base,
        )

    def _values(self) -> tuple[Tensor, Tensor]:
        """The metric of the unpatched run, and under every patch."""
        acting = self._acting
        outcome = self._sweep(acting).run(
            executor=self.options.get("executor"),
            progress=self.options.get("progress", True),
            resume=self.options.get("resume"),
            title="patch",
        )
        values = outcome.clean.repeat(len(self.sets), 1)
        values[acting] = outcome.values
        return outcome.clean, values


def check_options(options: PatchOptions) -> None:
    """Refuse an option that there is not, and a value that cannot mean anything.

    Raises:
        TypeError, ValueError: See `analysis.options.check_options`.
    """
    asked.check_options(options, PatchOptions.__annotations__, "patching")
