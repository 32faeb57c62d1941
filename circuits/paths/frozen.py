"""A run with its attention patterns and norm scales held fixed: then every head is a linear map of the stream.

Head h of layer l writes at position t

    write[t] = 1/post[t] · Σ_s A[t, s] ( (x[s] / scale[s]) V_h + β W_V + b_V ) O_h

with the norms' gains and centring put into ``V_h = centred(γ ⊙ W_V)`` and ``O_h``; `post` is the scale of a norm on the
branch's output, 1 where there is none. Going backwards, a direction ``D[t]`` in the stream after the head becomes the
direction ``mix[s] V_hᵀ / scale[s]`` before it, with ``mix[s] = Σ_t A[t, s] O_h D[t] / post[t]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.block import TransformerBlock
from circuits.cache import ActivationCache
from circuits.components import MLP, Component, Embed, Head, NormBias, PosEmbed, ValueBias
from circuits.config import GPTConfig
from circuits.layers import Norm
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Positions
from circuits.residual.requirements import needed_names as residual_names
from circuits.residual.writes import Constant, head_writes

Suffix = tuple[Head, ...]  # heads of a path from the earliest to the last before the logit


def needed_names(config: GPTConfig) -> list[str]:
    """The activations that `expand_paths` reads: a ``names_filter`` for ``run_with_cache``."""
    wanted = residual_names(config, "head")
    for layer in range(config.n_layers):
        n = block_names(layer)
        wanted += [n.pattern, *([n.ln1_scale] if config.norm else [])]
    return wanted


@dataclass(frozen=True)
class FrozenLayer:
    """The heads of one layer as linear maps.

    Attributes:
        pattern: Attention of the run, ``[batch head query key]``.
        read: ``V``: value weights behind the norm's gain and centring.
        write: ``O``: output weights before the branch norm's gain and centring, contiguous.
        scale: Of the norm that is read through, ``[batch key]``; None without norms.
        post: Of the norm on the output, ``[batch query]``; None without one.
        z: The run's own z: what any direction after the heads has as its total.
        biases: What enters a head beside the stream, in the coordinates of its values: ``b_V`` and ``β W_V``.
        n_leaves: How many of the run's leaves write before this layer.
        leaves: Those leaves as the heads read them (not yet divided by `scale`), ``[batch head leaf (key d_head)]``.
    """

    pattern: Float[Tensor, "batch head query key"]
    read: Float[Tensor, "head d_model d_head"]
    write: Float[Tensor, "head d_head d_model"]
    scale: Float[Tensor, "batch key"] | None
    post: Float[Tensor, "batch query"] | None
    z: Float[Tensor, "batch query head d_head"]
    biases: dict[str, Float[Tensor, "head d_head"]]
    n_leaves: int
    leaves: Float[Tensor, "batch head leaf key_d_head"]


@dataclass(frozen=True)
class FrozenRun:
    """Every layer of a run as linear maps, and the writes that paths start from.

    Attributes:
        layers: The layers.
        leaves: Who writes the leaves, in the order of the forward pass.
        writes: What they write, ``[leaf batch pos d_model]``.
    """

    layers: tuple[FrozenLayer, ...]
    leaves: tuple[Component, ...]
    writes: Float[Tensor, "leaf batch pos d_model"]

    def mix(self, D: Float[Tensor, "batch pos d_model"], head: Head) -> Float[Tensor, "batch pos d_head"]:
        """A direction after one head in the coordinates of the head's values, at every source position."""
        layer = self.layers[head.layer]
        carried = D @ layer.write[head.head].mT
        if layer.post is not None:
            carried = carried / layer.post[..., None]
        return layer.pattern[:, head.head].mT @ carried

    def before(self, D: Float[Tensor, "batch pos d_model"], head: Head) -> Float[Tensor, "batch pos d_model"]:
        """A direction after one head as a direction in the stream that the head reads."""
        layer = self.layers[head.layer]
        mix = self.mix(D, head)
        if layer.scale is not None:
            mix = mix / layer.scale[..., None]
        return mix @ layer.read[head.head].mT

    def direction(self, root: Float[Tensor, "batch pos d_model"], suffix: Suffix) -> Tensor:
        """The direction before the earliest head of a suffix."""
        for head in reversed(suffix):
            root = self.before(root, head)
        return root

    def starts(self, head: Head) -> list[tuple[Component, ...]]:
        """The first components of every path that reaches the stream through this head and no head below it."""
        layer = self.layers[head.layer]
        own: dict[str, tuple[Component, ...]] = {
            "value": (ValueBias(head.layer, head.head),),
            "norm": (NormBias("ln1", head.layer), head),
        }
        return [*((leaf, head) for leaf in self.leaves[: layer.n_leaves]), *(own[kind] for kind in layer.biases)]


def freeze(model: HookedGPT, cache: ActivationCache, at: Positions) -> FrozenRun:
    """Freeze the patterns and norm scales of a run, for directions at positions up to the last of `at`."""
    assert at.index is not None
    everywhere = Positions(None, at.n_pos, at.dtype, at.device)
    end = int(at.index.max()) + 1
    leaves: list[Component] = [Embed()]
    writes = [everywhere.whole(cache[names.EMBED])[:, :end]]
    if model.config.positions == "learned":
        leaves.append(PosEmbed())
        writes.append(everywhere.whole(cache[names.POS_EMBED])[:, :end])
    layers = []
    for block in model.blocks:
        layers.append(_freeze_layer(block, cache, everywhere, end, torch.stack(writes)))
        constants = [row for row in head_writes(block, cache, everywhere) if isinstance(row, Constant)]
        for constant in constants:
            leaves.append(constant.component)
            writes.append(constant.vectors()[0].expand(len(writes[0]), everywhere.n_pos, -1)[:, :end])
        if block.mlp is not None:
            leaves.append(MLP(block.names.layer))
            writes.append(everywhere.whole(cache[block.names.mlp_out])[:, :end])
    return FrozenRun(tuple(layers), tuple(leaves), torch.stack(writes))


def _freeze_layer(
    block: TransformerBlock, cache: ActivationCache, at: Positions, end: int, writes: Float[Tensor, "leaf batch pos d"]
) -> FrozenLayer:
    n, attn = block.names, block.attn
    groups = attn.group_size
    W_V = at.whole(attn.W_V).repeat_interleave(groups, dim=0)
    biases: dict[str, Tensor] = {}
    if attn.b_V is not None:
        biases["value"] = at.whole(attn.b_V).repeat_interleave(groups, dim=0)
    if block.ln1 is not None and block.ln1.b is not None:
        biases["norm"] = torch.einsum("d,hde->he", at.whole(block.ln1.b), W_V)
    read = _through(block.ln1, W_V, at)
    write = _through(block.ln1_post, at.whole(attn.out.weight)[None], at, gain_last=True)[0]
    leaves = torch.einsum("nbpd,hde->bhnpe", writes, read)
    return FrozenLayer(
        pattern=at.whole(cache[n.pattern])[:, :, :end, :end],
        read=read,
        write=write.mT.reshape(attn.n_heads, attn.d_head, -1),
        scale=None if block.ln1 is None else at.whole(cache[n.ln1_scale])[:, :end, 0],
        post=None if block.ln1_post is None else at.whole(cache[n.ln1_post_scale])[:, :end, 0],
        z=at.whole(cache[n.z])[:, :end],
        biases=biases,
        n_leaves=len(writes),
        leaves=leaves.flatten(-2),
    )


def _through(
    norm: Norm | None, weight: Float[Tensor, "n d_model width"], at: Positions, *, gain_last: bool = False
) -> Float[Tensor, "n d_model width"]:
    """A weight behind a norm, ``centred(γ ⊙ W)``; one before it, ``γ ⊙ centred(W)``, with `gain_last`."""
    if norm is None:
        return weight
    gain = at.whole(norm.w)[:, None]
    if not gain_last:
        weight = weight * gain
    if norm.kind == "layernorm":
        weight = weight - weight.mean(1, keepdim=True)
    return weight * gain if gain_last else weight
