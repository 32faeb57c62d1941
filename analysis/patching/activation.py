"""`activation_patch`: one activation of another run put into a run, over layers, heads and positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from analysis.metrics import Metric, as_metric
from analysis.patching.pairs import Pair, paired
from analysis.patching.plan import PatchOptions, PatchPlan, check_options
from analysis.patching.result import Patching
from analysis.patching.runs import both_runs
from circuits.arguments import require_model, whole_numbers
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.rerun import Intervention, Put
from circuits.rerun.clean import Clean
from circuits.rerun.edits import is_attention_matrix, part_of
from circuits.rerun.stages import clean_names, entries
from circuits.validity import require_flag


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
    positions: int | Sequence[int] | None = None,
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
        metric: As for `ablate`, save for which run is the reference. ``"loss"`` is that of the clean tokens on every
            run, a logit difference reads the same answers in both. ``"kl"`` is KL(unpatched‖patched), in nats, a mean
            over each prompt's positions: the reference is the run that is patched, so the corrupt run in the direction
            ``"denoise"`` and the clean one in ``"noise"``. It is 0 where a patch changes nothing and, where it brings
            the whole other run back, KL(unpatched‖patched from), which the normalised effect calls 1.
        by_position: Patch each position by itself (the query's, for patterns), counted over real tokens; otherwise all
            of them together. A prompt that lacks a position does not count there.
        positions: Patch at these only, counted like that, negative ones from the last; None: at every one.
        direction: ``"denoise"`` puts clean activations into the corrupt run, ``"noise"`` corrupt ones into the clean
            run.
        options: See `PatchOptions`.

    Returns:
        Effects with the axes ``[layer]``, ``[layer pos]``, ``[layer head]`` or ``[layer head pos]``.

    Raises:
        ValueError: A site that the model lacks, prompts that do not correspond, a metric that is about the same on both
            runs (with both numbers), or one that is not one number for each prompt.
        TypeError: An option that there is not, or an argument of the wrong kind.
        IndexError: A position that no prompt has.
    """
    return patch_plan(
        model,
        clean,
        corrupt,
        site,
        metric=metric,
        by_position=by_position,
        positions=positions,
        direction=direction,
        **options,
    ).run()


@torch.no_grad()
def patch_plan(
    model: HookedGPT,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch2 pos2"],
    site: str = "resid_pre",
    *,
    metric: str | Metric | Callable[[Tensor], Tensor],
    by_position: bool = True,
    positions: int | Sequence[int] | None = None,
    direction: str = "denoise",
    **options: Unpack[PatchOptions],
) -> PatchPlan:
    """What `activation_patch` would do with these arguments: ``.cost`` says what it takes, ``.run()`` does it.

    Only the two unpatched runs are made.

    Args and errors as for `activation_patch`.
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
    given = None if positions is None else _positions(pair, positions)
    every = given or tuple(range(int(pair.base.lengths.max())))
    # Each patch with the positions it is put at, and what to call them.
    at = [(position,) for position in every] if by_position else [given]
    heads = [None] if n_heads is None else range(n_heads)
    cells = [pair.patched & _cells(pair, where) for where in at]
    counted = torch.stack([_cells(pair, where).any(1) for where in at])
    sets, labels = [], []
    for layer, head in itertools.product(range(model.config.n_layers), heads):
        name = getattr(block_names(layer), field)
        value = Put(_value(pair, source, name, head))
        of_head = "" if head is None else f" of head {head}"
        sets += [Intervention(name, value, where, head=head) for where in cells]
        labels += [f"patching {name}{of_head}{_at(where)}" for where in at]
    sizes = {"layer": model.config.n_layers, "head": n_heads, "pos": len(at) if by_position else None}
    return PatchPlan(
        model,
        pair,
        sets,
        labels,
        counted.repeat(len(sets) // len(cells), 1),
        as_metric(metric),
        base,
        source,
        {axis: size for axis, size in sizes.items() if size is not None},
        site,
        given,
        options,
    )


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


def _at(positions: Sequence[int] | None) -> str:
    return "" if positions is None else f" at position {', '.join(map(str, positions))}"


def _positions(pair: Pair, positions: int | Sequence[int]) -> tuple[int, ...]:
    """Positions that were asked for, each of them one that a prompt has."""
    asked = tuple(dict.fromkeys(whole_numbers("position", positions)))
    longest = int(pair.base.lengths.max())
    for position in asked:
        if not -longest <= position < longest:
            raise IndexError(f"position {position} is in none of the prompts, the longest of which has {longest}")
    return asked


def _cells(pair: Pair, positions: Sequence[int] | None) -> Bool[Tensor, "batch pos"]:
    """The cells of these positions, in the prompts that have them; None: all cells."""
    if positions is None:
        return torch.ones_like(pair.patched)
    return torch.stack([pair.cells_of(position) for position in positions]).any(0)
