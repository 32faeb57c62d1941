"""Runs in which what some components write is replaced.

A component is replaced where it can be told apart: a head at its ``z``, a neuron at its activation, an attention layer
or an MLP at what it adds to the stream, a block as the difference that it makes to the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.components import MLP, Attn, Block, Component, Embed, Head, Neuron, PosEmbed
from circuits.hooks import FwdHooks, Hook, HookFn
from circuits.model import HookedGPT

# What a component writes, [batch pos ...] or broadcast against that; None for nothing at all.
Write = Float[Tensor, "#batch #pos *part"]
Where = Bool[Tensor, "batch pos"] | None


@dataclass(frozen=True)
class Site:
    """Where a component's write stands.

    Attributes:
        name: The hook where it is replaced.
        part: Its head or neuron on the axis behind ``[batch pos]``; None for everything.
        before: For a block, the hook of the stream that it adds to; its write is the difference.
    """

    name: str
    part: int | None = None
    before: str | None = None

    def of(self, cache: ActivationCache) -> Float[Tensor, "batch pos *part"]:
        """The write in a finished run."""
        written = self.within(cache[self.name])
        return written if self.before is None else written - cache[self.before]

    def within(self, activation: Tensor) -> Tensor:
        """The component's part of an activation, as a view."""
        return activation if self.part is None else activation.select(2, self.part)


def site_of(component: Component) -> Site:
    """Where a component is replaced.

    Raises:
        ValueError: A bias, which no single activation stands for.
    """
    if isinstance(component, Embed):
        return Site(names.EMBED)
    if isinstance(component, PosEmbed):
        return Site(names.POS_EMBED)
    layer = getattr(component, "layer", None)
    if isinstance(layer, int):
        at = names.block_names(layer)
        if isinstance(component, Head):
            return Site(at.z, component.head)
        if isinstance(component, Neuron):
            return Site(at.post, component.index)
        if isinstance(component, MLP):
            return Site(at.mlp_out)
        if isinstance(component, Attn):
            return Site(at.attn_out)
        if isinstance(component, Block):
            return Site(at.resid_post, before=at.resid_pre)
    raise ValueError(f"{component} cannot be ablated: it has no activation of its own")


def needed_names(sites: Mapping[Component, Site]) -> list[str]:
    """The hooks that must be captured for the writes of these sites to be read."""
    found = [name for site in sites.values() for name in (site.name, site.before) if name is not None]
    return list(dict.fromkeys(found))


def logits_without(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    instead: Mapping[Site, Write | None],
    where: Where = None,
    attention_mask: Tensor | None = None,
) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits of a run in which each site holds something else.

    Args:
        model: A model.
        tokens: Prompts.
        instead: For each site what to put there; None for nothing (a head that writes 0, a block that is skipped).
        where: Positions at which to do so; None for all.
        attention_mask: 1 for tokens, 0 for padding.
    """
    hooks: list[tuple[str, HookFn]] = []
    for site, write in instead.items():
        hooks += _block_hooks(site, write, where) if site.before is not None else [_part_hook(site, write, where)]
    edits: FwdHooks = hooks
    return model.run_with_hooks(tokens, fwd_hooks=edits, attention_mask=attention_mask)


def _part_hook(site: Site, write: Write | None, where: Where) -> tuple[str, HookFn]:
    def replace(activation: Tensor, hook: Hook) -> Tensor:
        own = site.within(activation)
        own.copy_(_chosen(torch.zeros_like(own) if write is None else write, own, where))
        return activation

    return site.name, replace


def _block_hooks(site: Site, write: Write | None, where: Where) -> list[tuple[str, HookFn]]:
    """Remember the stream before the block in this very run, and go on with it behind the block."""
    assert site.before is not None
    entering: list[Tensor] = []

    def remember(activation: Tensor, hook: Hook) -> None:
        entering[:] = [activation]

    def replace(activation: Tensor, hook: Hook) -> Tensor:
        before = entering.pop()
        return _chosen(before if write is None else before + write, activation, where)

    return [(site.before, remember), (site.name, replace)]


def _chosen(new: Tensor, old: Tensor, where: Where) -> Tensor:
    """`new` at the chosen positions, `old` elsewhere."""
    new = new.to(old.dtype).expand_as(old)
    if where is None:
        return new
    return torch.where(where.reshape(*where.shape, *[1] * (old.ndim - 2)), new, old)
