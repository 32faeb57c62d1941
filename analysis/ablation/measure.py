"""`ablate`: how much a number changes when a component's write is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from analysis.ablation.replacements import check_method, mean_writes, resampled_writes
from analysis.ablation.runs import Site, Write, logits_without, site_of
from analysis.ablation.targets import Target, members, targets_of
from analysis.metrics import Metric, Prompts, as_metric, bootstrap_interval, measured, real_positions, weighted_mean
from analysis.results import Result, label_text, result
from circuits.components import Head
from circuits.model import HookedGPT
from circuits.tokens import check_mask, check_tokens


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
        """What was replaced by what, and what was measured."""
        clean = float(weighted_mean(self.clean[None], self.weight))
        prompts = "1 prompt" if len(self.clean) == 1 else f"{len(self.clean)} prompts"
        return (
            f"Change of {self.metric} (clean {clean:.4g}) when a component is replaced by {self.replacement}; "
            f"{prompts}, {self.level:.0%} interval"
        )

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


@torch.no_grad()
def ablate(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    components: str | Sequence[Target] = "heads",
    method: str = "zero",
    metric: str | Metric | Callable[[Tensor], Tensor] = "loss",
    *,
    reference: Int[Tensor, "other pos2"] | None = None,
    reference_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    positions: int | Sequence[int] | None = None,
    per_position: bool = False,
    level: float = 0.95,
    seed: int = 0,
    progress: bool = True,
) -> Ablation:
    """Replace what components write, one target after the other, and measure what changes.

    Heads are replaced at ``z``, which equals replacing their result; neurons at their activation; attention layers and
    MLPs at what they add to the stream; a block as a whole (``"zero"`` leaves the identity, its norms skipped). Where a
    value bias lives decides what ``"zero"`` takes away; ``"mean"`` and ``"resample"`` do not depend on it.

    Args:
        model: A model.
        tokens: Prompts.
        components: ``"heads"``, ``"mlps"``, ``"attns"``, ``"blocks"``, ``"neurons"``, or a list of components and of
            tuples of components to ablate together.
        method: Put nothing there, the mean over `reference`, or what was written on another prompt (of the batch, or of
            `reference`), never the prompt itself.
        metric: ``"loss"`` (nats), ``"kl"`` (from the clean run), ``logit_diff(correct, wrong)`` or a function of the
            logits ``[batch pos d_vocab] -> [batch]``.
        reference: Prompts for means and resampling.
        reference_mask: 1 for tokens, 0 for padding in the reference.
        attention_mask: 1 for tokens, 0 for padding.
        positions: Ablate at these positions only; negative ones count from each prompt's last real token.
        per_position: Take a mean for each position, over the reference prompts, instead of one over all positions.
        level: Level of the bootstrap interval over prompts.
        seed: Seed of resampling and of the bootstrap.
        progress: Show a progress bar on a terminal.

    Raises:
        ValueError: A component, method or metric that there is not; a mean without a reference; resampling from one
            prompt, or with padding; a metric of another shape than ``[batch]`` or NaN, for which component.
        IndexError: A layer, head, neuron or position that does not exist.
    """
    tokens = check_tokens(tokens, model.config)
    mask = check_mask(attention_mask, tokens)
    check_method(method)
    judge, targets = as_metric(metric), targets_of(components, model.config)
    sites = {component: site_of(component) for target in targets for component in members(target)}
    writes: dict[Site, Write | None] = dict.fromkeys(sites.values())
    if method == "mean":
        pos = tokens.shape[1] if per_position else None
        writes = mean_writes(model, sites, reference, reference_mask, pos)
    elif method == "resample":
        _refuse_padding(mask, reference_mask)
        writes = resampled_writes(model, sites, tokens, reference, seed)
    prompts = Prompts(tokens, mask, model(tokens, mask))
    clean = measured(judge, prompts.clean, prompts, "the clean run")
    where = None if positions is None else _places(positions, tokens, mask)
    changed = []
    for target in tqdm(targets, desc=f"ablate {method}", disable=None if progress else True, leave=False):
        instead = {sites[component]: writes[sites[component]] for component in members(target)}
        logits = logits_without(model, tokens, instead, where, mask)
        changed.append(measured(judge, logits, prompts, f"ablating {label_text(target)}"))
    effect, weight = torch.stack(changed) - clean, judge.weights(prompts)
    return Ablation(
        components=targets,
        clean=clean,
        effect=effect,
        weight=weight,
        mean=weighted_mean(effect, weight).to(effect.dtype),
        interval=bootstrap_interval(effect, weight, level, seed=seed),
        method=method,
        replacement=_in_words(method, per_position, reference is not None),
        metric=judge.name,
        level=level,
        n_layers=model.config.n_layers,
        n_heads=model.config.n_heads,
    )


def _places(
    positions: int | Sequence[int], tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None
) -> Bool[Tensor, "batch pos"]:
    chosen = torch.zeros_like(tokens, dtype=torch.bool)
    for position in [positions] if isinstance(positions, int) else positions:
        at = real_positions(position, tokens.shape, mask, tokens.device)
        chosen[torch.arange(len(at), device=at.device), at] = True
    return chosen


def _refuse_padding(*masks: Tensor | None) -> None:
    if any(mask is not None and not bool(mask.all()) for mask in masks):
        raise ValueError("method 'resample' takes writes at the same positions, so it needs prompts without padding")


def _in_words(method: str, per_position: bool, with_reference: bool) -> str:
    if method == "mean":
        return f"its mean over the reference, {'per position' if per_position else 'over all positions'}"
    if method == "resample":
        return f"its write on another prompt of the {'reference' if with_reference else 'batch'}"
    return "nothing"
