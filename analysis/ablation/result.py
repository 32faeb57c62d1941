"""What ablations return: effects for each component and prompt, with their mean, interval and p-value."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.ablation.targets import Target
from analysis.results import Result, label_text, result
from analysis.uncertainty import false_discovery, prompts_and_interval, sign_flip_p_values, weighted_mean
from circuits.components import Head


@result
class Ablation(Result):
    """What each ablation changes; an effect is ablated minus clean.

    Attributes:
        components: What was ablated, one after the other; a tuple was ablated together.
        clean: The metric of the unchanged run, for each prompt.
        effect: Its change.
        weight: What each prompt counts in the mean: the tokens that its value is a mean over, or 1.
        mean: Weighted mean effect.
        interval: Bootstrap interval of that mean over prompts; NaN for a single prompt.
        method: ``"zero"``, ``"mean"`` or ``"resample"``.
        replacement: What stood in place of the write, in words.
        metric: What was measured.
        level: Level of the interval.
        n_layers: Layers of the model, and `n_heads` its heads, for `grid`.
    """

    table = ("mean", "interval")
    components: tuple[Target, ...]
    clean: Float[Tensor, " batch"]
    effect: Float[Tensor, "component batch"]
    weight: Float[Tensor, " batch"]
    mean: Float[Tensor, " component"]
    interval: Float[Tensor, "component bound"]
    method: str
    replacement: str
    metric: str
    level: float
    n_layers: int
    n_heads: int

    def title(self) -> str:
        """What was replaced by what, what was measured, and how many intervals exclude 0 by chance alone."""
        clean = float(weighted_mean(self.clean[None], self.weight))
        line = (
            f"Change of {self.metric} (clean {clean:.4g}) when {self._what()} is replaced by {self.replacement}; "
            f"{prompts_and_interval(len(self.clean), self.level)}"
        )
        if len(self.clean) < 2 or len(self.components) < 2:
            return line
        return f"{line}; {self.n_excluding_zero} of {len(self.mean)} exclude 0, {self.by_chance:.3g} would by chance"

    def _what(self) -> str:
        return "a component"

    @property
    def by_chance(self) -> float:
        """How many of the intervals would exclude 0 if no ablation had any effect on average."""
        return (1 - self.level) * len(self.components)

    @property
    def n_excluding_zero(self) -> int:
        """How many of the intervals exclude 0."""
        return int(((self.interval[:, 0] > 0) | (self.interval[:, 1] < 0)).sum())

    def p_values(self, seed: int = 0) -> Float[Tensor, " component"]:
        """Of each mean effect being 0 (see `analysis.uncertainty.sign_flip_p_values`)."""
        return sign_flip_p_values(self.effect, self.weight, seed=seed)

    def stands_out(self, rate: float = 0.05, seed: int = 0) -> Bool[Tensor, " component"]:
        """Which effects stand out when at most a share `rate` of those named may do so by chance.

        Benjamini and Hochberg's procedure on `p_values`.
        """
        return false_discovery(self.p_values(seed), rate)

    def grid(self) -> Float[Tensor, "layer head"]:
        """The mean effects laid out by layer and head; NaN for heads that were not ablated.

        Raises:
            ValueError: Some of what was ablated is not a single head.
        """
        laid_out = self.mean.new_full((self.n_layers, self.n_heads), float("nan"))
        for component, mean in zip(self.components, self.mean, strict=True):
            if not isinstance(component, Head):
                raise ValueError(
                    f"only single heads have a place in a grid [layer head]; {label_text(component)} is none"
                )
            laid_out[component.layer, component.head] = mean
        return laid_out


@result
class Sufficiency(Ablation):
    """What is left when everything but a set is ablated; `components` are the sets that were kept.

    Attributes:
        among: What was ablated where it was not kept.
    """

    among: str

    def _what(self) -> str:
        return f"every other one of the {self.among}"


@result
class PairAblation(Result):
    """Every pair of components ablated together, against the sum of each by itself.

    Attributes:
        components: The components.
        clean: The metric of the unchanged run, for each prompt.
        effect: Its change when both are ablated, on average; a single component's on the diagonal.
        interaction: ``effect(a, b) − effect(a) − effect(b)``, on average; 0 on the diagonal.
        interval: Bootstrap interval of the interaction over prompts; NaN for a single prompt, and on the diagonal.
        method: As for `Ablation`, like `replacement`, `metric` and `level`.
    """

    table = ("effect", "interaction", "interval")
    components: tuple[Target, ...]
    clean: Float[Tensor, " batch"]
    effect: Float[Tensor, "component component2"]
    interaction: Float[Tensor, "component component2"]
    interval: Float[Tensor, "component component2 bound"]
    method: str
    replacement: str
    metric: str
    level: float

    def title(self) -> str:
        """What was replaced by what, and what was measured."""
        n = len(self.components)
        line = (
            f"Change of {self.metric} when two components are replaced by {self.replacement}, and its excess over "
            f"the sum of both; {n * (n - 1) // 2} pairs, {prompts_and_interval(len(self.clean), self.level)}"
        )
        return line if len(self.clean) < 2 else f"{line}; {self.by_chance:.3g} intervals would exclude 0 by chance"

    @property
    def by_chance(self) -> float:
        """How many pairs' intervals would exclude 0 if no two components interacted."""
        n = len(self.components)
        return (1 - self.level) * n * (n - 1) / 2


def symmetric(values: Float[Tensor, " pair"], n: int, diagonal: float | Tensor) -> Float[Tensor, "n n"]:
    """Values of the pairs ``(0, 1), (0, 2), …`` as a symmetric matrix."""
    laid_out = values.new_zeros(n, n)
    first, second = torch.triu_indices(n, n, 1, device=values.device)
    laid_out[first, second] = values
    laid_out[second, first] = values
    laid_out.diagonal().copy_(torch.as_tensor(diagonal, dtype=values.dtype, device=values.device).expand(n))
    return laid_out
