"""What results of ablations share: effects with p-values, counted against chance."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from analysis.metrics import KL
from analysis.results import Result
from analysis.uncertainty import against_chance, chance_level, false_discovery, n_significant, prompts_and_interval


class Tested(Result):
    """Base of results whose effects have a p-value each.

    The p-values decide what counts as an effect, not whether an interval excludes 0: with few prompts intervals are too
    narrow (see `analysis.uncertainty.bootstrap_interval`), while p ≤ α happens by chance in at most a share α of cases.
    A divergence has no chance to be counted against: it is never negative, and any change at all gives it a small p.
    """

    clean: Float[Tensor, " batch"]
    p: Tensor
    metric: str
    level: float

    def p_values(self) -> Tensor:
        """Of each mean effect being 0, laid out like the effects (see `analysis.uncertainty.sign_flip_p_values`)."""
        return self.p

    def stands_out(self, rate: float = 0.05) -> Bool[Tensor, ...]:
        """Which effects stand out when at most a share `rate` of those named may do so by chance.

        Benjamini and Hochberg's procedure on `p_values`.

        Raises:
            TypeError, ValueError: A rate that is no number between 0 and 1.
        """
        return false_discovery(self._hypotheses(), rate)

    @property
    def n_significant(self) -> int:
        """How many effects have ``p ≤ 1 − level``."""
        return n_significant(self._hypotheses(), self.level)

    @property
    def by_chance(self) -> float:
        """How many would have ``p ≤ 1 − level``, on average and at most, if none of them were an effect."""
        return chance_level(self.level) * len(self._hypotheses())

    def _hypotheses(self) -> Float[Tensor, " test"]:
        """The p-values, one for each effect that was tested."""
        return self.p

    def _how_sure(self) -> str:
        """The end of a title: how many prompts, and how many effects against how many by chance."""
        n = len(self.clean)
        said = prompts_and_interval(n, self.level)
        tests = self._hypotheses()
        if len(tests) < 2:
            return said
        if self._never_negative:
            return f"{said}; {self.metric} is never negative, so p is small for any change at all"
        return f"{said}; {against_chance(tests, self.level, n)}"

    @property
    def _never_negative(self) -> bool:
        """Whether chance cannot make an effect negative, so that flipping signs tests nothing."""
        return self.metric == KL().name
