"""The writes to the residual stream, each able to show itself and its inner product with a direction.

A write is one of three things: an activation as it was captured, a linear map of smaller activations (a head's z, an
MLP's neurons), or a constant. The last two may pass through the norm that some architectures (Gemma 2) put on what a
branch adds: ``γ ⊙ centred(x) / scale`` at the run's own scale, so that a head's write is ``γ ⊙ result / scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.block import TransformerBlock
from circuits.cache import ActivationCache
from circuits.components import MLP, Attn, AttnBias, Component, Embed, Head, MLPBias, Neuron, NormBias, PosEmbed
from circuits.layers import Norm, centred
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Positions
from circuits.residual.requirements import Unit


@runtime_checkable
class Write(Protocol):
    """What some components of one kind write at the chosen positions."""

    @property
    def components(self) -> Sequence[Component]:
        """Who writes."""

    def vectors(self) -> Float[Tensor, " component #batch #chosen d_model"]:
        """The writes themselves."""

    def along(self, u: Float[Tensor, "#batch #chosen d_model"]) -> Float[Tensor, " component #batch #chosen"]:
        """Their inner products with a direction."""


@dataclass(frozen=True)
class Branch:
    """What stands between a branch's sum and the stream: nothing, or a norm frozen at the run's own scale."""

    gain: Float[Tensor, " d_model"] | None = None
    kind: str | None = None
    scale: Float[Tensor, "batch chosen 1"] | None = None

    def push(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*broadcast d_model"]:
        """What reaches the stream of a summand of the branch."""
        if self.gain is None or self.scale is None:
            return x
        return self._centred(x) / self.scale * self.gain

    def pull(self, u: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """The direction of the branch's sum whose inner product, divided by `scale`, is that of the write with `u`."""
        return u if self.gain is None else self._centred(u * self.gain)

    def divided(self, values: Float[Tensor, " component #batch #chosen"]) -> Float[Tensor, " component #batch #chosen"]:
        """Inner products with a pulled direction, divided by the scale."""
        return values if self.scale is None else values / self.scale[..., 0]

    def _centred(self, x: Tensor) -> Tensor:
        return centred(x, "layernorm") if self.kind == "layernorm" else x


@dataclass(frozen=True)
class Captured:
    """A write as it was captured."""

    component: Component
    value: Float[Tensor, "batch chosen d_model"]

    @property
    def components(self) -> tuple[Component]:
        """The one component."""
        return (self.component,)

    def vectors(self) -> Float[Tensor, "1 batch chosen d_model"]:
        """The captured value."""
        return self.value[None]

    def along(self, u: Float[Tensor, "#batch #chosen d_model"]) -> Float[Tensor, "1 batch chosen"]:
        """``write · u``."""
        if u.shape[1] == 1:  # one direction for all positions: a product of matrices
            return (self.value @ u.mT)[None, ..., 0]
        return (self.value * u).sum(-1)[None]


@dataclass(frozen=True)
class Mapped:
    """Activations times a weight: ``z_h W_O^h`` for every head of a layer, ``post_i W_out[i]`` for every neuron."""

    components: Sequence[Component]
    value: Float[Tensor, "batch chosen component width"]
    weight: Float[Tensor, "d_model inner"]
    branch: Branch = field(default_factory=Branch)

    def vectors(self) -> Float[Tensor, "component batch chosen d_model"]:
        """The writes, which are large: ``component × batch × chosen × d_model``."""
        weight = self.weight.view(-1, *self.value.shape[2:])
        return self.branch.push(torch.einsum("bpne,dne->nbpd", self.value, weight))

    def along(self, u: Float[Tensor, "#batch #chosen d_model"]) -> Float[Tensor, "component batch chosen"]:
        """``value · (W u)``: the writes are never formed."""
        coefficients = self.coefficients(u)
        if coefficients.shape[1] == 1:  # one direction for all positions: a product of matrices
            coefficients = coefficients.expand(len(self.value), -1, -1, -1)[:, 0]
            values = torch.einsum("bpne,bne->nbp", self.value, coefficients)
        else:
            values = (self.value * coefficients).sum(-1).permute(2, 0, 1)
        return self.branch.divided(values)

    def coefficients(self, u: Float[Tensor, "#batch #chosen d_model"]) -> Tensor:
        """``W u`` of each component, ``[#batch #chosen component width]``."""
        pulled = self.branch.pull(u) @ self.weight
        return pulled.view(*pulled.shape[:-1], *self.value.shape[2:])


@dataclass(frozen=True)
class Constant:
    """A bias: the same at every position, unless a branch norm scales it."""

    component: Component
    vector: Float[Tensor, " d_model"]
    branch: Branch = field(default_factory=Branch)

    @property
    def components(self) -> tuple[Component]:
        """The one component."""
        return (self.component,)

    def vectors(self) -> Float[Tensor, " 1 #batch #chosen d_model"]:
        """The bias."""
        return self.branch.push(self.vector[None, None])[None]

    def along(self, u: Float[Tensor, "#batch #chosen d_model"]) -> Float[Tensor, " 1 #batch #chosen"]:
        """``bias · u``."""
        return self.branch.divided((self.branch.pull(u) @ self.vector)[None])


def stream_writes(
    model: HookedGPT, cache: ActivationCache, unit: Unit, stop: int, at: Positions, *, mid: bool = False
) -> list[Write]:
    """Every write to the stream before block `stop`, in the order in which they are made.

    Args:
        model: A pre-norm model.
        cache: Holds what `requirements.write_names` lists.
        unit: ``"layer"``: attention and MLP of each layer; ``"head"``: heads, with the biases apart; ``"neuron"``:
            heads and the MLPs' neurons.
        stop: The number of whole blocks.
        at: At which positions.
        mid: Add the attention of block `stop`.
    """
    writes: list[Write] = [Captured(Embed(), at.select(cache[names.EMBED]))]
    if model.config.positions == "learned":
        writes.append(Captured(PosEmbed(), at.select(cache[names.POS_EMBED])))
    for layer in range(stop + mid):
        block, n = model.blocks[layer], block_names(layer)
        if unit == "layer":
            writes.append(Captured(Attn(layer), at.select(cache[n.attn_out])))
        else:
            writes += head_writes(block, cache, at)
        if block.mlp is None or layer == stop:
            continue
        if unit == "neuron":
            writes += _neuron_writes(block, cache, at)
        else:
            writes.append(Captured(MLP(layer), at.select(cache[n.mlp_out])))
    return writes


def head_writes(block: TransformerBlock, cache: ActivationCache, at: Positions) -> list[Write]:
    """The heads of a layer, its output bias, and the shift of its branch norm."""
    n, attn = block.names, block.attn
    branch = _branch(block.ln1_post, n.ln1_post_scale, cache, at)
    heads = [Head(n.layer, head) for head in range(attn.n_heads)]
    writes: list[Write] = [Mapped(heads, at.select(cache[n.z]), at.whole(attn.out.weight), branch)]
    return writes + _biases(AttnBias(n.layer), attn.b_O, branch, NormBias("ln1_post", n.layer), block.ln1_post, at)


def _neuron_writes(block: TransformerBlock, cache: ActivationCache, at: Positions) -> list[Write]:
    n, mlp = block.names, block.mlp
    assert mlp is not None
    branch = _branch(block.ln2_post, n.ln2_post_scale, cache, at)
    post = at.select(cache[n.post])[..., None]
    neurons = [Neuron(n.layer, index) for index in range(post.shape[2])]
    writes: list[Write] = [Mapped(neurons, post, at.whole(mlp.down.weight), branch)]
    return writes + _biases(MLPBias(n.layer), mlp.b_out, branch, NormBias("ln2_post", n.layer), block.ln2_post, at)


def _branch(norm: Norm | None, scale_name: str, cache: ActivationCache, at: Positions) -> Branch:
    if norm is None:
        return Branch()
    return Branch(at.whole(norm.w), norm.kind, at.select(cache[scale_name]))


def _biases(
    component: Component, bias: Tensor | None, branch: Branch, shift: Component, norm: Norm | None, at: Positions
) -> list[Write]:
    """The rows of a branch that no activation goes into."""
    rows: list[Write] = []
    if bias is not None:
        rows.append(Constant(component, at.whole(bias), branch))
    if norm is not None and norm.b is not None:
        rows.append(Constant(shift, at.whole(norm.b)))
    return rows
