"""`activation_patch`: one activation of another run put into a run, over layers, heads and positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from analysis import options as asked
from analysis.metrics import Metric, as_metric
from analysis.patching.pairs import Pair, paired
from analysis.patching.result import KINDS, Patching, summed_up
from analysis.patching.runs import both_runs, reader_of, source_value, weights_of
from analysis.readings import ReadMetric
from circuits.arguments import require_model
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.rerun import Intervention, Put
from circuits.rerun.clean import Clean
from circuits.rerun.edits import is_attention_matrix, part_of
from circuits.rerun.stages import clean_names, entries
from circuits.rerun.sweep import Outcome, Sweep
from circuits.validity import require_flag


class PatchOptions(TypedDict, total=False):
    """What every patching takes beside its prompts, its sites and its metric.

    Attributes:
        clean_mask: 1 for tokens, 0 for padding in the clean prompts.
        corrupt_mask: Likewise in the corrupt ones.
        alignment: For each column of the clean prompts (or each cell) the column of the corrupt ones that stands for
            it, −1 for none; needed where a prompt's two forms differ in length.
        normalise: Give the effects as a share of the distance between the two runs too (True).
        freeze: Hold ``"patterns"`` or ``"norms"``, or both, at the unpatched run.
        level: Level of the bootstrap intervals over prompts (0.95).
        seed: Seed of the bootstrap (0).
        budget: Bytes that a batch of runs may take; by default a part of what is free.
        executor: A `concurrent.futures` executor that runs the batches; by default they run here. In other processes
            each batch runs the unpatched pass again, which threads share.
        resume: A file that keeps what is done, so that an interrupted sweep goes on where it stopped.
        progress: Show a progress bar on a terminal (True).
    """

    clean_mask: Tensor | None
    corrupt_mask: Tensor | None
    alignment: Sequence[int] | Int[Tensor, "batch pos"] | None
    normalise: bool
    freeze: Iterable[str]
    level: float
    seed: int
    budget: int | None
    executor: Executor | None
    resume: str | Path | None
    progress: bool


@dataclass(frozen=True)
class Site:
    """What can be patched: a field of `BlockNames`, and how many heads it has."""

    field: str
    heads: Callable[[GPTConfig], int] | None = None


SITES = {
    "resid_pre": Site("resid_pre"),
    "resid_mid": Site("resid_mid"),
    "resid_post": Site("resid_post"),
    "attn_out": Site("attn_out"),
    "mlp_out": Site("mlp_out"),
    "head": Site("z", lambda c: c.n_heads),
    "head_q": Site("q", lambda c: c.n_heads),
    "head_k": Site("k", lambda c: c.n_kv_heads),
    "head_v": Site("v", lambda c: c.n_kv_heads),
    "pattern": Site("pattern", lambda c: c.n_heads),
}


@torch.no_grad()
def activation_patch(
    model: HookedGPT,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch2 pos2"],
    site: str = "resid_pre",
    *,
    metric: str | Metric | Callable[[Tensor], Tensor],
    by_position: bool = True,
    direction: str = "denoise",
    **options: Unpack[PatchOptions],
) -> Patching:
    """Put one activation of one run into another, at each layer (and head, and position), and measure what changes.

    0 is the unpatched run and 1 the run patched from: ``(patched − unpatched) / (patched from − unpatched)``, of means
    over prompts. Only what a patch can change is computed; where the two runs are the same by causality (equal tokens
    up to a position), nothing is.

    The loss is that of predicting the clean prompts' tokens, on all three runs and in both directions: at each position
    that both forms have, the clean token that follows it. So patching everything gives 1, and where only the prompts'
    tokens differ, the corrupt run's loss is not that of its own text.

    Args:
        model: A model.
        clean: The clean prompts.
        corrupt: The corrupted prompts, row by row.
        site: ``"resid_pre"``, ``"resid_mid"``, ``"resid_post"``, ``"attn_out"``, ``"mlp_out"``; ``"head"`` (z),
            ``"head_q"``, ``"head_k"``, ``"head_v"`` (before any rotation; k and v over the stored heads) and
            ``"pattern"``.
        metric: As for `ablate`; ``"loss"`` is that of the clean tokens on every run, a logit difference reads the same
            answers in both, ``"kl"`` is from the unpatched run.
        by_position: Patch each position by itself (the query's, for patterns), counted over real tokens; otherwise all
            of them together. A prompt that lacks a position does not count there.
        direction: ``"denoise"`` puts clean activations into the corrupt run, ``"noise"`` corrupt ones into the clean
            run.
        options: See `PatchOptions`.

    Returns:
        Effects with the axes ``[layer]``, ``[layer pos]``, ``[layer head]`` or ``[layer head pos]``.

    Raises:
        ValueError: A site that the model lacks, prompts that do not correspond, a metric that is about the same on both
            runs (with both numbers), or one that is not one number for each prompt.
        TypeError: An option that there is not, or an argument of the wrong kind.
    """
    require_model(model)
    check_options(options)
    field, n_heads = _site(site, model.config)
    require_flag("by_position", by_position)
    pair = _paired(model, clean, corrupt, direction, options)
    if site == "pattern":
        _refuse_other_columns(pair)
    names = [getattr(block_names(layer), field) for layer in range(model.config.n_layers)]
    from_here = {needed for name in names for needed in clean_names(entries(model.config)[name], model.config)}
    base, source = both_runs(model, pair, {*names, *from_here})
    positions = range(int(pair.base.lengths.max())) if by_position else [None]
    heads = [None] if n_heads is None else range(n_heads)
    cells = [pair.patched if position is None else pair.at_position(position) for position in positions]
    counted = torch.stack([_counts(pair, position) for position in positions])
    sets, labels = [], []
    for layer, head in itertools.product(range(model.config.n_layers), heads):
        name = getattr(block_names(layer), field)
        value = Put(_value(pair, source, name, head))
        of_head = "" if head is None else f" of head {head}"
        sets += [Intervention(name, value, where, head=head) for where in cells]
        labels += [f"patching {name}{of_head}{_at(position)}" for position in positions]
    shape = [model.config.n_layers, *([] if n_heads is None else [n_heads]), *([len(positions)] if by_position else [])]
    fields = measured_patches(
        model,
        pair,
        sets,
        labels,
        counted.repeat(len(sets) // len(cells), 1),
        as_metric(metric),
        (base, source),
        shape,
        options,
    )
    kind: Any = KINDS[n_heads is not None, by_position]
    result: Patching = kind(**fields, site=site, direction=direction)
    return result


def measured_patches(
    model: HookedGPT,
    pair: Pair,
    sets: Sequence[Intervention],
    labels: Sequence[str],
    counted: Bool[Tensor, "patch batch"],
    metric: Metric,
    runs: tuple[Clean, Clean],
    shape: Sequence[int],
    options: PatchOptions,
) -> dict[str, Any]:
    """Run patches of the base run and sum them up, as the fields of a result with these axes."""
    reader = reader_of(metric, pair)
    source = source_value(metric, pair, *runs, reader)
    outcome = _patched(model, pair, sets, labels, reader, runs[0], options)
    effect = torch.where(counted, outcome.values - outcome.clean, float("nan"))
    weight = weights_of(metric, pair, reader)
    level = options.get("level", 0.95)
    summary = summed_up(
        effect,
        outcome.clean,
        source,
        weight,
        metric,
        normalise=options.get("normalise", True),
        level=level,
        seed=options.get("seed", 0),
    )
    named = {"metric": metric.name, "level": level, "base": outcome.clean, "source": source}
    return {**summary.laid_out(*shape), **named, "effect": effect.reshape(*shape, -1)}


def _patched(
    model: HookedGPT,
    pair: Pair,
    sets: Sequence[Intervention],
    labels: Sequence[str],
    reader: ReadMetric,
    base: Clean,
    options: PatchOptions,
) -> Outcome:
    """The metric under every patch; one at a position where no prompt differs leaves the run as it is."""
    masks = {id(given.positions): given.positions for given in sets}
    somewhere = {key: not isinstance(mask, Tensor) or bool(mask.any()) for key, mask in masks.items()}
    acting = [i for i, given in enumerate(sets) if somewhere[id(given.positions)]]
    sweep = Sweep(
        model,
        pair.base.tokens,
        [sets[i] for i in acting],
        reader,
        [labels[i] for i in acting],
        attention_mask=pair.base.mask,
        freeze=options.get("freeze", ()),
        budget=options.get("budget"),
        clean=base,
    )
    outcome = sweep.run(
        executor=options.get("executor"),
        progress=options.get("progress", True),
        resume=options.get("resume"),
        title="patch",
    )
    values = outcome.clean.repeat(len(sets), 1)
    values[acting] = outcome.values
    return Outcome(outcome.clean, values)


def check_options(options: PatchOptions) -> None:
    """Refuse an option that there is not, and a value that cannot mean anything.

    Raises:
        TypeError, ValueError: See `analysis.options.check_options`.
    """
    asked.check_options(options, PatchOptions.__annotations__, "patching")


def _paired(model: HookedGPT, clean: Tensor, corrupt: Tensor, direction: str, options: PatchOptions) -> Pair:
    masks = (options.get("clean_mask"), options.get("corrupt_mask"))
    return paired(model.config, clean, corrupt, direction, *masks, options.get("alignment"))


def _site(site: str, config: GPTConfig) -> tuple[str, int | None]:
    if not isinstance(site, str) or site not in SITES:
        raise ValueError(f"site {site!r} is not one of {', '.join(map(repr, SITES))}")
    if site == "resid_mid" and not config.has_resid_mid:
        why = "the model is attention-only" if config.attn_only else "parallel blocks have no stream between the two"
        raise ValueError(f"site 'resid_mid' does not exist: {why}")
    if site == "mlp_out" and not config.has_mlp:
        raise ValueError("site 'mlp_out' does not exist: the model is attention-only")
    chosen = SITES[site]
    return chosen.field, None if chosen.heads is None else chosen.heads(config)


def _value(pair: Pair, source: Clean, name: str, head: int | None) -> Tensor:
    """The source's activation laid out like the base's."""
    value = part_of(source.captured[name], name, head)
    return value if is_attention_matrix(name) else pair.aligned(value)


def _refuse_other_columns(pair: Pair) -> None:
    columns = torch.arange(pair.column.shape[1], device=pair.column.device)
    if pair.base.tokens.shape != pair.source.tokens.shape or bool(((pair.column != columns) & pair.patched).any()):
        raise ValueError(
            "patterns are patched only between runs whose positions are the same, since keys are positions"
        )


def _at(position: int | None) -> str:
    return "" if position is None else f" at position {position}"


def _counts(pair: Pair, position: int | None) -> Bool[Tensor, " batch"]:
    """The prompts that have this position."""
    if position is None:
        return torch.ones_like(pair.base.lengths, dtype=torch.bool)
    return pair.cells_of(position).any(1)
