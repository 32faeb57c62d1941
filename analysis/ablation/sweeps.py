"""The ablations: one after the other, in pairs, growing, all but a set; attention cut; blocks in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ablation.planning import AnyMetric, Options, Plan, cells_of, planned
from analysis.ablation.result import Ablation, PairAblation, Sufficiency, symmetric
from analysis.ablation.targets import Given, Target, members, targets_of, with_pairs
from analysis.ablation.words import KNOCK_OUT, cut_in_words
from analysis.results import label_text
from analysis.uncertainty import bootstrap_interval, sign_flip_p_values, weighted_mean
from circuits.arguments import require_model, whole_numbers
from circuits.components import Component, Head, check_component
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.rerun import CutKeys, Intervention
from circuits.tokens import check_tokens
from circuits.validity import require_flag


@overload
def ablate(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    components: str | Component | Sequence[Given] = ...,
    method: str = ...,
    metric: AnyMetric = ...,
    *,
    pairs: Literal[False] = ...,
    **options: Unpack[Options],
) -> Ablation: ...


@overload
def ablate(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    components: str | Component | Sequence[Given] = ...,
    method: str = ...,
    metric: AnyMetric = ...,
    *,
    pairs: Literal[True],
    **options: Unpack[Options],
) -> PairAblation: ...


def ablate(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    components: str | Component | Sequence[Given] = "heads",
    method: str = "zero",
    metric: AnyMetric = "loss",
    *,
    pairs: bool = False,
    **options: Unpack[Options],
) -> Ablation | PairAblation:
    """Replace what components write, one target after the other, and measure what changes.

    Heads are replaced at ``z``, which equals replacing their result; neurons at their activation; attention layers and
    MLPs at what they add to the stream; a block as a whole (``"zero"`` leaves the identity, its norms skipped). Where a
    value bias lives decides what ``"zero"`` takes away; ``"mean"`` and ``"resample"`` do not depend on it. Only what an
    ablation can change is computed (`circuits.rerun`); `analysis.ablation.plan` says beforehand what that costs.

    Args:
        model: A model.
        tokens: Prompts.
        components: ``"heads"``, ``"mlps"``, ``"attns"``, ``"blocks"``, ``"neurons"``, or a list of components and
            of tuples of components to ablate together; a component may be given as its text, ``"L2H3"``.
        method: Put nothing there, the mean over `reference`, or what was written on another prompt (of the batch, or of
            `reference`): one whose tokens differ, never the prompt itself nor a duplicate of it.
        metric: ``"loss"`` (nats), ``"kl"`` (from the clean run), ``logit_diff(correct, wrong)`` or a function of the
            logits ``[batch pos d_vocab] -> [batch]``.
        pairs: Ablate every pair of them together instead, and report what that does beyond the sum of both.
        options: See `analysis.ablation.Options`.

    Raises:
        TypeError: An argument or option of the wrong kind, by name.
        ValueError: A component, method or metric that there is not; a mean without a reference; resampling where no
            other prompt is, for which row, or with padding; no position; a metric of another shape than ``[batch]``,
            NaN or infinite, for which component.
        IndexError: A layer, head, neuron or position that does not exist.
    """
    require_model(model)
    require_flag("pairs", pairs)
    targets = targets_of(components, model.config)
    if pairs:
        return _pairs(model, tokens, targets, method, metric, options)
    return measured_ablation(planned(model, tokens, targets, method, metric, options), targets)


def ablate_in_order(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    order: Sequence[Given],
    method: str = "zero",
    metric: AnyMetric = "loss",
    **options: Unpack[Options],
) -> Ablation:
    """Ablate the first, then the first two, then the first three …: row k has k + 1 of them ablated together.

    Args and errors as for `ablate`.
    """
    require_model(model)
    flat = [members(target) for target in targets_of(order, model.config, "order")]
    grown = tuple(tuple(c for target in flat[: k + 1] for c in target) for k in range(len(flat)))
    return measured_ablation(planned(model, tokens, grown, method, metric, options), grown)


def ablate_all_but(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    kept: Sequence[Given],
    among: str | Component | Sequence[Given] = "heads",
    method: str = "zero",
    metric: AnyMetric = "loss",
    **options: Unpack[Options],
) -> Sufficiency:
    """Ablate everything except a set: does the circuit suffice by itself?

    Args:
        model: A model.
        tokens: Prompts.
        kept: Sets to keep, one after the other; a tuple is kept together.
        among: What is ablated where it is not kept.
        method: As for `ablate`, like `metric` and `options`. The usual choice is ``"mean"`` with a `reference`: with
            ``"zero"`` what was kept must do without even the average of the rest.
        metric: Likewise.
        options: Likewise.

    Raises:
        ValueError: What is kept is not among what is ablated, or is all of it; otherwise as for `ablate`.
    """
    require_model(model)
    universe = [c for target in targets_of(among, model.config, "among") for c in members(target)]
    sets = targets_of(kept, model.config, "kept")
    ablated = []
    for target in sets:
        strangers = [component for component in members(target) if component not in universe]
        if strangers:
            raise ValueError(f"{strangers[0]} is kept, but is not among what is ablated ({among!r})")
        ablated.append(tuple(component for component in universe if component not in members(target)))
        if not ablated[-1]:
            raise ValueError(f"{label_text(target)} is everything there is among {among!r}: nothing is left to ablate")
    what = among if isinstance(among, str) else ", ".join(map(str, universe))
    return Sufficiency(**_fields(planned(model, tokens, ablated, method, metric, options), sets), among=what)


def knock_out_attention(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    keys: int | Sequence[int],
    queries: int | Sequence[int] | None = None,
    heads: str | Component | Sequence[Given] = "heads",
    metric: AnyMetric = "loss",
    **options: Unpack[Options],
) -> Ablation:
    """Cut edges of attention: a head may not look from these positions at those; the rest of its row is renormalised.

    Args:
        model: A model.
        tokens: Prompts.
        keys: Columns of `tokens` that may not be looked at.
        queries: Positions that may not look (negative ones count back from the last real token); None: all.
        heads: ``"heads"`` for each by itself, or a list of heads and of tuples of heads to cut together.
        metric: As for `ablate`, like `options`; `method` and what goes with it do not apply.
        options: Likewise.

    Raises:
        TypeError: Keys that are no whole numbers; otherwise as for `ablate`.
        ValueError: No key, one that is not in the prompts, or something that is no head.
    """
    require_model(model)
    tokens, keys = check_tokens(tokens, model.config), whole_numbers("key", keys)
    outside = [key for key in keys if not 0 <= key < tokens.shape[1]]
    if outside:
        raise ValueError(f"keys must be columns 0 to {tokens.shape[1] - 1} of the prompts, not {outside}")
    targets = targets_of(heads, model.config, "heads")
    sets = []
    for target in targets:
        for head in members(target):
            if not isinstance(head, Head):
                raise ValueError(f"only heads look anywhere; {head} is none")
            check_component(head, model.config)
        own = [h for h in members(target) if isinstance(h, Head)]
        sets.append([_cut(h, keys, queries) for h in own])
    words = cut_in_words(keys, None if queries is None else whole_numbers("position", queries))
    return measured_ablation(cells_of(model, tokens, sets, targets, KNOCK_OUT, words, metric, options), targets)


def _cut(head: Head, keys: Sequence[int], queries: int | Sequence[int] | None) -> Intervention:
    return Intervention(block_names(head.layer).scores, CutKeys(keys), queries, head=head.head)


def measured_ablation(settled: Plan, targets: Sequence[Target]) -> Ablation:
    """Run a plan and sum up its effects."""
    return Ablation(**_fields(settled, targets))


def _fields(settled: Plan, targets: Sequence[Target]) -> dict[str, Any]:
    outcome = settled.run()
    effect, weight = outcome.values - outcome.clean, settled.weights()
    return {
        "components": tuple(targets),
        "clean": outcome.clean,
        "effect": effect,
        "weight": weight,
        "mean": weighted_mean(effect, weight).to(effect.dtype),
        "interval": bootstrap_interval(effect, weight, settled.level, seed=settled.seed),
        "p": sign_flip_p_values(effect, weight, seed=settled.seed),
        "method": settled.method,
        "replacement": settled.replacement,
        "metric": settled.metric.name,
        "level": settled.level,
        "n_layers": settled.sweep.model.config.n_layers,
        "n_heads": settled.sweep.model.config.n_heads,
    }


def _pairs(
    model: HookedGPT,
    tokens: Tensor,
    targets: Sequence[Target],
    method: str,
    metric: AnyMetric,
    options: Options,
) -> PairAblation:
    n = len(targets)
    first, second = torch.triu_indices(n, n, 1).tolist()
    settled = planned(model, tokens, with_pairs(targets), method, metric, options)
    outcome = settled.run()
    effect, weight = outcome.values - outcome.clean, settled.weights()
    beyond = effect[n:] - effect[:n][first] - effect[:n][second]
    mean = weighted_mean(effect, weight).to(effect.dtype)
    ends = bootstrap_interval(beyond, weight, settled.level, seed=settled.seed)
    nowhere: Float[Tensor, ""] = effect.new_tensor(float("nan"))
    return PairAblation(
        components=tuple(targets),
        clean=outcome.clean,
        effect=symmetric(mean[n:], n, mean[:n]),
        interaction=symmetric(weighted_mean(beyond, weight).to(effect.dtype), n, 0.0),
        interval=torch.stack([symmetric(end, n, nowhere) for end in ends.mT], dim=-1),
        p=symmetric(sign_flip_p_values(beyond, weight, seed=settled.seed), n, float("nan")),
        method=method,
        replacement=settled.replacement,
        metric=settled.metric.name,
        level=settled.level,
    )
