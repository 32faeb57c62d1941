"""Where what a component writes stands in a run.

A component is read, and replaced, where it can be told apart: a head at its ``z``, a neuron at its activation, an
attention layer or an MLP at what it adds to the stream, a block as the difference that it makes to the stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.components import MLP, Attn, Block, Component, Embed, Head, Neuron, PosEmbed

# What a component writes, [batch pos ...] or broadcast against that.
Write = Float[Tensor, "#batch #pos *part"]


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
        ValueError: A bias, which is the same on every prompt.
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
    raise ValueError(f"{component} is the same on every prompt: it has no mean or other value to be replaced by")


def needed_names(sites: Mapping[Component, Site]) -> list[str]:
    """The hooks that must be captured for the writes of these sites to be read."""
    found = [name for site in sites.values() for name in (site.name, site.before) if name is not None]
    return list(dict.fromkeys(found))
