"""What ablations return: effects for each component and prompt, with their mean, interval and p-value."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.ablation.targets import Target
from analysis.ablation.tested import Tested
from analysis.ablation.words import counted, when
from analysis.results import Column, label_text, result
from analysis.uncertainty import false_discovery, weighted_mean
from circuits.components import Head


@result
class Ablation(Tested):
    """What each ablation changes; an effect is ablated minus clean.

    Attributes:
        components: What was ablated, one after the other; a tuple was ablated together.
        clean: The metric of the unchanged run, for each prompt.
        effect: Its change.
        weight: What each prompt counts in the mean: the tokens that its value is a mean over, or 1.
        mean: Weighted mean effect.
        interval: Bootstrap interval of that mean over prompts; NaN for a single prompt.
        p: p-value of that mean being 0, by flipping the signs of prompts; 1 for a single prompt.
        method: ``"zero"``, ``"mean"``, ``"resample"``, or ``"knock-out"`` where attention was cut.
        replacement: What stood in place of the write, or from where to where a head may not look, in words.
        metric: What was measured.
        level: Level of the interval.
        n_layers: Layers of the model, and `n_heads` its heads, for `grid`.
    """

    table = ("mean", "interval", "p")
    components: tuple[Target, ...]
    clean: Float[Tensor, " batch"]
    effect: Float[Tensor, "component batch"]
    weight: Float[Tensor, " batch"]
    mean: Float[Tensor, " component"]
    interval: Float[Tensor, "component bound"]
    p: Float[Tensor, " component"]
    method: str
    replacement: str
    metric: str
    level: float
    n_layers: int
    n_heads: int

    def title(self) -> str:
        """What was done, what was measured, and how many effects stand out against how many by chance."""
        clean = float(weighted_mean(self.clean[None], self.weight))
        done = when(self.method, self.replacement, self._what())
        return f"Change of {self.metric} (clean {clean:.4g}) when {done}; {self._how_sure()}"

    def _what(self) -> str:
        return "a component"

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
class PairAblation(Tested):
    """Every pair of components ablated together, against the sum of each by itself.

    The matrices are symmetric; a table has a row for each pair once, and none for the diagonal.

    Attributes:
        components: The components.
        clean: The metric of the unchanged run, for each prompt.
        effect: Its change when both are ablated, on average; a single component's on the diagonal.
        interaction: ``effect(a, b) − effect(a) − effect(b)``, on average; 0 on the diagonal.
        interval: Bootstrap interval of the interaction over prompts; NaN for a single prompt, and on the diagonal.
        p: p-value of the interaction being 0, by flipping the signs of prompts; NaN on the diagonal.
        method: As for `Ablation`, like `replacement`, `metric` and `level`.
    """

    table = ("effect", "interaction", "interval", "p")
    components: tuple[Target, ...]
    clean: Float[Tensor, " batch"]
    effect: Float[Tensor, "component component2"]
    interaction: Float[Tensor, "component component2"]
    interval: Float[Tensor, "component component2 bound"]
    p: Float[Tensor, "component component2"]
    method: str
    replacement: str
    metric: str
    level: float

    def title(self) -> str:
        """What was replaced by what, what was measured, and how many interactions stand out, and would by chance."""
        pairs = counted(len(self._hypotheses()), "pair")
        return (
            f"Change of {self.metric} when each of two components is replaced by {self.replacement}, and its "
            f"excess over the sum of both; {pairs}, {self._how_sure()}"
        )

    def columns(self, *fields: str) -> dict[str, Column]:
        """The columns of `to_frame`: each pair once, in the order of the components."""
        table, axes = super().columns(*fields), self._row_axes(*fields)
        if not {"component", "component2"} <= set(axes):
            return table
        places = np.indices([len(self.labels(axis)) for axis in axes])
        once = (places[axes.index("component")] < places[axes.index("component2")]).ravel()
        return {name: column[once] for name, column in table.items()}

    def stands_out(self, rate: float = 0.05) -> Bool[Tensor, "component component2"]:
        """Which interactions stand out, as a symmetric matrix; otherwise as for `Ablation`."""
        found = false_discovery(self._hypotheses(), rate)
        return symmetric(found.double(), len(self.components), 0.0).bool()

    @property
    def _never_negative(self) -> bool:
        return False  # an interaction has either sign, whatever the metric

    def _hypotheses(self) -> Float[Tensor, " pair"]:
        n = len(self.components)
        first, second = torch.triu_indices(n, n, 1, device=self.p.device)
        return self.p[first, second]


def symmetric(values: Float[Tensor, " pair"], n: int, diagonal: float | Tensor) -> Float[Tensor, "n n"]:
    """Values of the pairs ``(0, 1), (0, 2), …`` as a symmetric matrix."""
    laid_out = values.new_zeros(n, n)
    first, second = torch.triu_indices(n, n, 1, device=values.device)
    laid_out[first, second] = values
    laid_out[second, first] = values
    laid_out.diagonal().copy_(torch.as_tensor(diagonal, dtype=values.dtype, device=values.device).expand(n))
    return laid_out
