"""What patching returns: effects over layers, heads and positions, raw and normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from analysis.metrics import Metric
from analysis.patching.pairs import DIRECTIONS
from analysis.results import Result, result
from analysis.uncertainty import bootstrap_interval, prompts_and_interval, weighted_mean

LARGEST = ", of which these are the largest"
# Below this share of their size the metric on the two runs counts as equal.
_ABOUT_EQUAL = 1e-5


@dataclass(frozen=True, eq=False)
class Summary:
    """Effects of patches, summed up over prompts.

    Attributes:
        raw: Weighted mean of patched minus unpatched.
        interval: Its bootstrap interval.
        values: The same over the whole distance between the two runs; None where it was not asked for.
        values_interval: Its bootstrap interval.
    """

    raw: Float[Tensor, " patch"]
    interval: Float[Tensor, "patch bound"]
    values: Float[Tensor, " patch"] | None
    values_interval: Float[Tensor, "patch bound"] | None

    def laid_out(self, *shape: int) -> dict[str, Tensor | None]:
        """The four tensors with these leading axes."""
        fields = ("raw", "interval", "values", "values_interval")
        found = {name: getattr(self, name) for name in fields}
        return {name: None if t is None else t.reshape(*shape, *t.shape[1:]) for name, t in found.items()}


def summed_up(
    effect: Float[Tensor, "patch batch"],
    base: Float[Tensor, " batch"],
    source: Float[Tensor, " batch"],
    weight: Float[Tensor, " batch"],
    metric: Metric,
    *,
    normalise: bool,
    level: float,
    seed: int,
) -> Summary:
    """Means and intervals of effects; a prompt counts where its effect is not NaN.

    Raises:
        ValueError: Normalised values, but the metric is about the same on both runs; the message has both numbers.
    """
    present = ~effect.isnan()
    weights = weight * present
    filled = effect.nan_to_num(0.0)
    raw = ((filled * weights).sum(-1) / weights.sum(-1)).to(effect.dtype)
    interval = bootstrap_interval(filled, weights, level, seed=seed)
    if not normalise:
        return Summary(raw, interval, None, None)
    _refuse_about_equal(base, source, weight, metric)
    distance = source - base
    total = ((distance * weights).sum(-1) / weights.sum(-1)).to(effect.dtype)
    ratio = bootstrap_interval(filled, weights, level, seed=seed, over=distance)
    return Summary(raw, interval, raw / total, ratio)


def _refuse_about_equal(base: Tensor, source: Tensor, weight: Tensor, metric: Metric) -> None:
    here, there = (float(weighted_mean(values[None], weight)) for values in (base, source))
    if not abs(there - here) > _ABOUT_EQUAL * max(abs(here), abs(there), 1.0):
        raise ValueError(
            f"{metric.name} is {here:.6g} on the run that is patched and {there:.6g} on the run patched from: there is "
            "no distance to normalise by; normalise=False (--raw at the command line) gives the raw effects"
        )


def metric_in_words(name: str, direction: str) -> str:
    """The metric's name, and what it is of, where two runs leave that open: of which tokens, or from which run."""
    unpatched = "corrupt" if direction == "denoise" else "clean"
    words = {
        "loss": "loss (of predicting the clean prompts' tokens)",
        "kl": f"KL(unpatched‖patched), the unpatched run being the {unpatched} one",
    }
    return words.get(name, name)


def largest_first(raw: Tensor) -> list[int]:
    """Places of effects in their flattened table, by size; what is not a number comes last."""
    order: list[int] = raw.detach().abs().flatten().nan_to_num(-1.0).argsort(descending=True, stable=True).tolist()
    return order


class Patching(Result):
    """Base of the results of patching."""

    table = ("raw", "interval", "values", "values_interval")
    preview = LARGEST
    label_fields: ClassVar[Mapping[str, str]] = {"pos": "positions"}
    raw: Tensor
    values: Tensor | None
    site: str
    direction: str
    metric: str
    level: float
    positions: tuple[int, ...] | None
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]

    def title(self) -> str:
        """What was patched where, and between which values of the metric."""
        here, there = float(self.base.mean()), float(self.source.mean())
        share = "raw, and as a share with 0 for" if self.values is not None else "raw, between"
        one = "and 1 for" if self.values is not None else "and"
        where = "" if self.positions is None else f" at positions {', '.join(map(str, self.positions))} only"
        metric = metric_in_words(self.metric, self.direction)
        return (
            f"{self.site}{where} patched from {DIRECTIONS[self.direction]}: change of {metric}, {share} the "
            f"unpatched run (mean {here:.4g}) {one} the run patched from (mean {there:.4g}); "
            f"{prompts_and_interval(len(self.base), self.level)}"
        )

    def _previewed(self) -> Sequence[int]:
        return largest_first(self.raw)


@result
class LayerPatching(Patching):
    """Patches of a whole layer's activation, at all positions.

    Attributes:
        raw: Patched minus unpatched, weighted mean over prompts.
        interval: Bootstrap interval of `raw`; NaN for a single prompt.
        values: `raw` over the distance between the two runs; None where that was not asked for.
        values_interval: Bootstrap interval of `values`.
        effect: Patched minus unpatched for each prompt.
        base: The metric of the unpatched run, for each prompt.
        source: The metric of the run patched from.
        site: What was patched.
        direction: ``"denoise"`` or ``"noise"``.
        metric: What was measured.
        level: Level of the intervals.
        positions: Where alone patches were put; None: at every position.
    """

    raw: Float[Tensor, " layer"]
    interval: Float[Tensor, "layer bound"]
    values: Float[Tensor, " layer"] | None
    values_interval: Float[Tensor, "layer bound"] | None
    effect: Float[Tensor, "layer batch"]
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    site: str
    direction: str
    metric: str
    level: float
    positions: tuple[int, ...] | None = None


@result
class LayerPositionPatching(Patching):
    """Patches of a layer's activation at one position; attributes as in `LayerPatching`."""

    raw: Float[Tensor, "layer pos"]
    interval: Float[Tensor, "layer pos bound"]
    values: Float[Tensor, "layer pos"] | None
    values_interval: Float[Tensor, "layer pos bound"] | None
    effect: Float[Tensor, "layer pos batch"]
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    site: str
    direction: str
    metric: str
    level: float
    positions: tuple[int, ...] | None = None


@result
class HeadPatching(Patching):
    """Patches of one head at all positions (a key/value head for k and v); attributes as in `LayerPatching`."""

    raw: Float[Tensor, "layer head"]
    interval: Float[Tensor, "layer head bound"]
    values: Float[Tensor, "layer head"] | None
    values_interval: Float[Tensor, "layer head bound"] | None
    effect: Float[Tensor, "layer head batch"]
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    site: str
    direction: str
    metric: str
    level: float
    positions: tuple[int, ...] | None = None


@result
class HeadPositionPatching(Patching):
    """Patches of one head at one position (of the query, for patterns); attributes as in `LayerPatching`."""

    raw: Float[Tensor, "layer head pos"]
    interval: Float[Tensor, "layer head pos bound"]
    values: Float[Tensor, "layer head pos"] | None
    values_interval: Float[Tensor, "layer head pos bound"] | None
    effect: Float[Tensor, "layer head pos batch"]
    base: Float[Tensor, " batch"]
    source: Float[Tensor, " batch"]
    site: str
    direction: str
    metric: str
    level: float
    positions: tuple[int, ...] | None = None


KINDS: dict[tuple[bool, bool], type[Patching]] = {
    (False, False): LayerPatching,
    (False, True): LayerPositionPatching,
    (True, False): HeadPatching,
    (True, True): HeadPositionPatching,
}
