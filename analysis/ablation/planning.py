"""An ablation settled but not yet run: what it will do, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ablation.replacements import Reference, check_method, replacements
from analysis.ablation.targets import Given, Target, members, targets_of, with_pairs
from analysis.ablation.words import counted, replacement_in_words, when
from analysis.metrics import Metric, Prompts, as_metric
from analysis.options import SweepOptions, check_options
from analysis.readings import ReadMetric
from analysis.results import label_text
from circuits.arguments import require_model
from circuits.components import Component
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.rerun import Intervened, Intervention
from circuits.rerun.cost import Cost
from circuits.rerun.sweep import Outcome, Sweep
from circuits.tokens import check_mask, check_tokens
from circuits.validity import require_flag

AnyMetric = str | Metric | Callable[[Tensor], Tensor]


class Options(SweepOptions, total=False):
    """What every ablation takes beside its components, its method and its metric.

    Attributes:
        reference: Prompts for means and resampling.
        reference_mask: 1 for tokens, 0 for padding in the reference.
        attention_mask: 1 for tokens, 0 for padding.
        positions: Ablate at these positions only, counted over each prompt's real tokens; negative ones from the last.
            None: everywhere; an empty list is refused.
        per_position: Take a mean for each position, over the reference prompts, instead of one over all positions.
        freeze, level, seed, budget, executor, resume, progress: As for every sweep, see
            `analysis.options.SweepOptions`; a title counts effects with ``p ≤ 1 − level``.
    """

    reference: Int[Tensor, "other pos2"] | None
    reference_mask: Tensor | None
    attention_mask: Tensor | None
    positions: int | Sequence[int] | None
    per_position: bool


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A sweep with what its summary needs; printed, it says what would run and what that costs.

    Attributes:
        sweep: The runs.
        targets: What is ablated, one after the other.
        metric: What is measured.
        method: How components are replaced.
        replacement: The same in words.
        options: As they were given.
    """

    sweep: Sweep
    targets: tuple[Target, ...]
    metric: Metric
    method: str
    replacement: str
    options: Options

    @property
    def level(self) -> float:
        """Level of the interval."""
        return self.options.get("level", 0.95)

    @property
    def seed(self) -> int:
        """Seed of the draws."""
        return self.options.get("seed", 0)

    @property
    def cost(self) -> Cost:
        """What running it will take."""
        return self.sweep.cost()

    def __repr__(self) -> str:
        """What, of how many components and prompts, and the cost."""
        n, (batch, pos) = len(self.targets), self.sweep.tokens.shape
        shown = [label_text(target) for target in self.targets]
        shown = shown if n <= 6 else [*shown[:4], "…", shown[-1]]
        return (
            f"Plan: change of {self.metric.name} when {when(self.method, self.replacement)}\n"
            f"  {counted(n, 'target')} ({', '.join(shown)}), {counted(batch, 'prompt')} of {counted(pos, 'position')}\n"
            f"  {self.cost}"
        )

    def run(self) -> Outcome:
        """The values of the metric under every ablation."""
        return self.sweep.run(
            executor=self.options.get("executor"),
            progress=self.options.get("progress", True),
            resume=self.options.get("resume"),
            title=f"ablate {self.method}",
        )

    def weights(self) -> Float[Tensor, " batch"]:
        """What each prompt counts in a mean."""
        nothing = torch.zeros(*self.sweep.tokens.shape, 0)
        return self.metric.weights(Prompts(self.sweep.tokens, self.sweep.mask, nothing))


def plan(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    components: str | Component | Sequence[Given] = "heads",
    method: str = "zero",
    metric: AnyMetric = "loss",
    options: Options | None = None,
    *,
    pairs: bool = False,
) -> Plan:
    """Settle an ablation without running it, to see beforehand what it costs.

    ``print(plan(model, tokens, "heads"))`` says what would run, in how many passes, and what that takes; the numbers
    are in its `cost`. Only means and resampling run anything, the passes over their reference.

    Args:
        model: A model.
        tokens: Prompts.
        components: As for `ablate`, like `method`, `metric` and `pairs`.
        method: Likewise.
        metric: Likewise.
        options: What `ablate` takes by keyword (`analysis.ablation.Options`), as a dictionary.
        pairs: Every component and every two of them.

    Raises:
        TypeError: An option that there is not, or one of the wrong kind.
        ValueError, IndexError: As for `ablate`.
    """
    require_model(model)
    require_flag("pairs", pairs)
    targets = targets_of(components, model.config)
    return planned(model, tokens, with_pairs(targets) if pairs else targets, method, metric, options or {})


@torch.no_grad()
def planned(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    targets: Sequence[Target],
    method: str,
    metric: AnyMetric,
    options: Options,
) -> Plan:
    """`plan` for targets that are known to be components of the model.

    Raises:
        TypeError, ValueError, IndexError: As for `plan`.
    """
    check_method(method)
    _check(options)
    tokens = check_tokens(tokens, model.config)
    reference = _reference(options, model.config)
    per_position, mask = options.get("per_position", False), options.get("attention_mask")
    if method == "resample":
        _refuse_padding(tokens, mask, reference)
    components = dict.fromkeys(component for target in targets for component in members(target))
    edits = replacements(model, components, method, tokens, reference, per_position, options.get("seed", 0))
    where = options.get("positions")
    sets = [[Intervention(component, edits[component], where) for component in members(target)] for target in targets]
    words = replacement_in_words(method, per_position, reference.tokens is not None)
    return cells_of(model, tokens, sets, targets, method, words, metric, options)


def cells_of(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    sets: Sequence[Intervened],
    targets: Sequence[Target],
    method: str,
    replacement: str,
    metric: AnyMetric,
    options: Options,
) -> Plan:
    """A plan of given interventions."""
    _check(options)
    judge = as_metric(metric)
    sweep = Sweep(
        model,
        tokens,
        sets,
        ReadMetric(judge),
        [f"ablating {label_text(target)}" for target in targets],
        attention_mask=options.get("attention_mask"),
        freeze=options.get("freeze", ()),
        budget=options.get("budget"),
    )
    return Plan(sweep, tuple(targets), judge, method, replacement, options)


def _check(options: Options) -> None:
    check_options(options, Options.__annotations__, "ablate")


def _reference(options: Options, config: GPTConfig) -> Reference:
    given, mask = options.get("reference"), options.get("reference_mask")
    if given is not None:
        tokens = check_tokens(given, config)
        return Reference(tokens, check_mask(mask, tokens))
    if mask is not None:
        raise ValueError("reference_mask was given without reference, the prompts whose padding it marks")
    return Reference()


def _refuse_padding(tokens: Tensor, mask: Tensor | None, reference: Reference) -> None:
    if check_mask(mask, tokens) is not None or reference.mask is not None:
        raise ValueError("method 'resample' takes writes at the same positions, so it needs prompts without padding")
