"""What stands in place of an ablated component: nothing, its mean, or what it wrote on another prompt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.ablation.writes import Site, Write, needed_names, site_of
from circuits.arguments import seeded
from circuits.components import Component
from circuits.model import HookedGPT
from circuits.rerun import Edit, Put, Zero
from circuits.tokens import check_mask, check_tokens

_METHODS = ("zero", "mean", "resample")
# Rows × positions of the reference that are run at once.
_CELLS_AT_ONCE = 4096


def check_method(method: str) -> None:
    """Refuse an unknown method.

    Raises:
        TypeError: Not a text.
        ValueError: With the nearest that there is.
    """
    if not isinstance(method, str):
        raise TypeError(f"method must be one of {', '.join(map(repr, _METHODS))}, not {method!r}")
    if method not in _METHODS:
        near = difflib.get_close_matches(method, _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"method {method!r} is not one of {', '.join(_METHODS)}{hint}")


@dataclass(frozen=True)
class Reference:
    """Prompts that means are taken over and writes are drawn from; None: the prompts themselves, for resampling."""

    tokens: Int[Tensor, "other pos2"] | None = None
    mask: Tensor | None = None


def replacements(
    model: HookedGPT,
    components: Iterable[Component],
    method: str,
    tokens: Int[Tensor, "batch pos"],
    reference: Reference,
    per_position: bool,
    seed: int,
) -> dict[Component, Edit]:
    """What to put in place of each component.

    Raises:
        ValueError: A method that there is not, a mean without a reference, resampling without another prompt.
    """
    check_method(method)
    components = list(components)
    if method == "zero":
        return {component: Zero() for component in components}
    sites = {component: site_of(component) for component in components}
    if method == "mean":
        writes = mean_writes(model, sites, reference, tokens.shape[1] if per_position else None)
    else:
        writes = resampled_writes(model, sites, tokens, reference, seed)
    return {component: Put(writes[site]) for component, site in sites.items()}


def mean_writes(
    model: HookedGPT, sites: Mapping[Component, Site], reference: Reference, pos: int | None
) -> dict[Site, Write]:
    """The mean of what each component writes on a reference set, over its real tokens.

    Args:
        model: A model.
        sites: The components and where they stand.
        reference: Prompts; padding counts in no mean.
        pos: Length of the prompts to ablate, for one mean per position; None for one mean over all positions.

    Raises:
        ValueError: No reference; or one of another length, or with a position that is all padding, where each position
            has its own mean.
    """
    if reference.tokens is None:
        raise ValueError("method 'mean' needs reference prompts [batch pos] to take the mean over; reference is None")
    tokens = check_tokens(reference.tokens, model.config)
    if pos is not None and tokens.shape[1] != pos:
        raise ValueError(
            f"means per position need a reference of {pos} positions, like the prompts; got {tokens.shape[1]}"
        )
    mask = check_mask(reference.mask, tokens)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if pos is not None and not bool(real.any(0).all()):
        raise ValueError(f"position {int((~real.any(0)).nonzero()[0])} of the reference is padding in every prompt")
    over = (0,) if pos is not None else (0, 1)
    sums: dict[Site, Tensor] = {}
    for rows in torch.arange(len(tokens)).split(max(_CELLS_AT_ONCE // tokens.shape[1], 1)):
        padding = None if mask is None else mask[rows]
        _, cache = model.run_with_cache(tokens[rows], names_filter=needed_names(sites), attention_mask=padding)
        for site in sites.values():
            part = sum_over_real(site.of(cache), real[rows], over)
            sums[site] = sums[site] + part if site in sums else part
    counts = real.sum(over, keepdim=True)
    return {site: total / counts.reshape(*counts.shape, *[1] * (total.ndim - 2)) for site, total in sums.items()}


def sum_over_real(
    values: Float[Tensor, "batch pos *part"], real: Bool[Tensor, "batch pos"], over: tuple[int, ...]
) -> Float[Tensor, "#batch #pos *part"]:
    """The sum over some of the axes ``(batch, pos)``, padding left out."""
    weight = real.reshape(*real.shape, *[1] * (values.ndim - 2))
    return torch.where(weight, values, 0).sum(over, keepdim=True)


def resampled_writes(
    model: HookedGPT,
    sites: Mapping[Component, Site],
    tokens: Int[Tensor, "batch pos"],
    reference: Reference,
    seed: int,
) -> dict[Site, Write]:
    """What each component writes, at the same positions, on another prompt: one draw, the same for every component.

    Another prompt is one whose tokens differ: never the prompt itself, nor a duplicate of it. From a reference each
    prompt draws by itself, every other prompt being equally likely; of the batch, each is used once where that is
    possible (see `other_rows`).

    Args:
        model: A model.
        sites: The components and where they stand.
        tokens: The prompts to ablate.
        reference: Prompts to draw from; without any, the other prompts of the batch.
        seed: Seed of the draw.

    Raises:
        ValueError: No other prompt to draw from, for which row; a reference of another length.
    """
    pos = tokens.shape[1]
    generator = seeded(seed)
    if reference.tokens is None:
        source, rows = tokens, other_rows(tokens, generator)
    else:
        source = check_tokens(reference.tokens, model.config)
        if source.shape[1] != pos:
            raise ValueError(
                f"resampling needs a reference of {pos} positions, like the prompts; got {source.shape[1]}"
            )
        rows = _drawn(tokens, source, generator)
    _, cache = model.run_with_cache(source, names_filter=needed_names(sites))
    return {site: site.of(cache)[rows.to(tokens.device)] for site in sites.values()}


def _drawn(
    tokens: Int[Tensor, "batch pos"], source: Int[Tensor, "other pos"], generator: torch.Generator
) -> Int[Tensor, " batch"]:
    """For each prompt a row of the reference that is not the prompt itself."""
    other = (tokens[:, None] != source.to(tokens.device)).any(-1).double().cpu()
    if not bool(other.any(1).all()):
        row = int((~other.any(1)).nonzero()[0])
        raise ValueError(f"every prompt of the reference is row {row} itself; method 'resample' needs another one")
    return torch.multinomial(other, 1, generator=generator)[:, 0]


def other_rows(tokens: Int[Tensor, "batch pos"], generator: torch.Generator) -> Int[Tensor, " batch"]:
    """For each row of a batch another one whose tokens differ.

    The rows are put in random order, duplicates behind each other, and each takes the row that stands as many places
    before it as the commonest prompt has duplicates; so each row is used once, and without duplicates this is a random
    cycle. Where more than half of the rows are one prompt that is impossible, and each row draws by itself.

    Raises:
        ValueError: A single row, or rows that are all the same.
    """
    batch = len(tokens)
    if batch < 2:
        raise ValueError(
            "method 'resample' takes writes from another prompt, but there is only 1; give a reference (at the command "
            "line, --task or --pairs)"
        )
    _, prompt, count = tokens.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    most = int(count.max())
    if most == batch:
        raise ValueError(
            f"all {batch} prompts are the same, so there is none but row 0 itself to take its place; method 'resample' "
            "needs prompts whose tokens differ, here or in a reference"
        )
    if 2 * most > batch:
        return _drawn(tokens, tokens, generator)
    order = torch.randperm(batch, generator=generator)
    first = torch.empty_like(count).scatter_reduce_(0, prompt[order], torch.arange(batch), "amin", include_self=False)
    order = order[first[prompt[order]].argsort(stable=True)]
    rows = torch.empty_like(order)
    rows[order] = order.roll(most)
    return rows
