"""What stands in place of an ablated component: nothing, its mean, or what it wrote on another prompt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.ablation.runs import Site, Write, needed_names
from circuits.components import Component
from circuits.model import HookedGPT
from circuits.tokens import check_mask, check_tokens

_METHODS = ("zero", "mean", "resample")


def check_method(method: str) -> None:
    """Refuse an unknown method.

    Raises:
        ValueError: With the nearest that there is.
    """
    if method not in _METHODS:
        near = difflib.get_close_matches(method, _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"method {method!r} is not one of {', '.join(_METHODS)}{hint}")


def mean_writes(
    model: HookedGPT,
    sites: Mapping[Component, Site],
    reference: Int[Tensor, "batch pos"] | None,
    reference_mask: Tensor | None,
    pos: int | None,
) -> dict[Site, Write | None]:
    """The mean of what each component writes on a reference set, over its real tokens.

    Args:
        model: A model.
        sites: The components and where they stand.
        reference: Prompts.
        reference_mask: 1 for tokens, 0 for padding, which counts in no mean.
        pos: Length of the prompts to ablate, for one mean per position; None for one mean over all positions.

    Raises:
        ValueError: No reference; or one of another length, or with a position that is all padding, where each position
            has its own mean.
    """
    if reference is None:
        raise ValueError("method 'mean' needs reference prompts [batch pos] to take the mean over; reference is None")
    tokens = check_tokens(reference, model.config)
    if pos is not None and tokens.shape[1] != pos:
        raise ValueError(
            f"means per position need a reference of {pos} positions, like the prompts; got {tokens.shape[1]}"
        )
    mask = check_mask(reference_mask, tokens)
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
    if pos is not None and not bool(real.any(0).all()):
        raise ValueError(f"position {int((~real.any(0)).nonzero()[0])} of the reference is padding in every prompt")
    _, cache = model.run_with_cache(tokens, names_filter=needed_names(sites), attention_mask=mask)
    over = (0,) if pos is not None else (0, 1)
    return {site: mean_over_real(site.of(cache), real, over) for site in sites.values()}


def mean_over_real(
    values: Float[Tensor, "batch pos *part"], real: Bool[Tensor, "batch pos"], over: tuple[int, ...]
) -> Float[Tensor, "#batch #pos *part"]:
    """The mean over some of the axes ``(batch, pos)``, padding counting neither in the sum nor in the divisor."""
    weight = real.reshape(*real.shape, *[1] * (values.ndim - 2)).to(values.dtype)
    return (values * weight).sum(over, keepdim=True) / weight.sum(over, keepdim=True)


def resampled_writes(
    model: HookedGPT,
    sites: Mapping[Component, Site],
    tokens: Int[Tensor, "batch pos"],
    reference: Int[Tensor, "other pos2"] | None,
    seed: int,
) -> dict[Site, Write | None]:
    """What each component writes, at the same positions, on another prompt: one draw, the same for every component.

    Args:
        model: A model.
        sites: The components and where they stand.
        tokens: The prompts to ablate.
        reference: Prompts to draw from; None for the other prompts of the batch.
        seed: Seed of the draw.

    Raises:
        ValueError: A single prompt and no reference, or a reference of another length.
    """
    batch, pos = tokens.shape
    generator = torch.Generator().manual_seed(seed)
    if reference is None:
        source, rows = tokens, other_rows(batch, generator)
    else:
        source = check_tokens(reference, model.config)
        if source.shape[1] != pos:
            raise ValueError(
                f"resampling needs a reference of {pos} positions, like the prompts; got {source.shape[1]}"
            )
        rows = torch.randint(len(source), (batch,), generator=generator)
    _, cache = model.run_with_cache(source, names_filter=needed_names(sites))
    return {site: site.of(cache)[rows.to(tokens.device)] for site in sites.values()}


def other_rows(batch: int, generator: torch.Generator) -> Int[Tensor, " batch"]:
    """For each row another one, each used once: a random cycle through all of them.

    Raises:
        ValueError: A single row, which has no other.
    """
    if batch < 2:
        raise ValueError("method 'resample' takes writes from another prompt, but there is only 1; give a reference")
    order = torch.randperm(batch, generator=generator)
    rows = torch.empty_like(order)
    rows[order] = order.roll(1)
    return rows
