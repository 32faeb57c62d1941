"""Weights as the circuits use them: the norms' gains and centring read in on the fly, no new model made.

A pre-norm head reads ``LN(x) W = ((x P) ⊙ γ) W / scale + β W``, where `P` takes the mean off each row (LayerNorm; the
identity for RMSNorm). At a given scale that is one linear map of the stream, ``P diag(γ) W``, and this is what
composition, copying and full circuits depend on. Biases do not belong to it. ``raw=True`` gives the bare weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.arguments import require_model
from circuits.block import TransformerBlock
from circuits.config import GPTConfig
from circuits.factored import FactoredMatrix
from circuits.head_circuits import turned
from circuits.layers import Norm
from circuits.model import HookedGPT
from circuits.validity import require_whole
from circuits.weights import stacked


def read_through(W: Float[Tensor, "*batch d_model n"], norm: Norm | None) -> Float[Tensor, "*batch d_model n"]:
    """``P diag(γ) W``: rows scaled by the norm's gain, then the column means taken off where the norm centres."""
    W = _at_least_float32(W)
    if norm is None:
        return W
    scaled = norm.w.to(W.dtype)[:, None] * W
    return scaled - scaled.mean(-2, keepdim=True) if norm.kind == "layernorm" else scaled


def write_through(W: Float[Tensor, "*batch n d_model"], norm: Norm | None) -> Float[Tensor, "*batch n d_model"]:
    """``W P diag(γ)``: what reaches the stream through a norm on a branch's output, at a given scale."""
    W = _at_least_float32(W)
    if norm is None:
        return W
    return (centred_writes(W) if norm.kind == "layernorm" else W) * norm.w.to(W.dtype)


def centred_writes(W: Float[Tensor, "*batch n d_model"]) -> Float[Tensor, "*batch n d_model"]:
    """``W P``: each row less its mean, which no LayerNorm that reads it sees."""
    return W - W.mean(-1, keepdim=True)


def readers_centre(config: GPTConfig) -> bool:
    """Whether everything that reads the stream takes its mean off first: pre-norm LayerNorm throughout."""
    return config.norm == "layernorm" and config.norm_placement == "pre" and config.final_norm


@dataclass(frozen=True)
class HeadWeights:
    """The four maps of every head, stacked over layers; keys and values gathered to the query heads.

    Attributes:
        W_Q: What a query reads; likewise `W_K` and `W_V`.
        W_O: What the head writes.
        raw: Whether these are the bare weights.
        note: What was read in, in words.
        offset: Query minus key position of a rotary model's QK; None elsewhere.
    """

    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer head d_model d_head"]
    W_V: Float[Tensor, "layer head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    raw: bool
    note: str
    offset: int | None = None

    @property
    def QK(self) -> FactoredMatrix:
        """``W_Q W_Kᵀ`` of every head, ``[layer head d_model d_model]`` as factors."""
        return FactoredMatrix(self.W_Q, self.W_K.mT, note=self.note)

    @property
    def OV(self) -> FactoredMatrix:
        """``W_V W_O`` of every head, likewise."""
        return FactoredMatrix(self.W_V, self.W_O, note=self.note)


@torch.no_grad()
def head_weights(
    model: HookedGPT, raw: bool = False, offset: int = 0, layers: Sequence[int] | None = None
) -> HeadWeights:
    """The maps of every head with what stands between them and the stream read in.

    Pre-norm: `W_Q`, `W_K`, `W_V` read through the block's first norm. Writes go through the norm on the branch's output
    where there is one, and are centred where every reader centres. The gains of query and key norms are read in too,
    their scales held. In a post-norm model heads read and write the normalised stream itself: nothing to read in.

    Args:
        model: A model.
        raw: The bare weights instead.
        offset: Rotary models: query position minus key position; ``W_QK = W_Q R(offset) W_Kᵀ``.
        layers: Some layers, in this order; by default all of them. The others are not touched.

    Raises:
        TypeError: No model, an offset that is not whole, or `raw` not a truth value.
        ValueError: An offset for a model whose positions are not rotary.
    """
    require_model(model)
    config = model.config
    if not isinstance(raw, bool):
        raise TypeError(f"raw must be True or False, not {raw!r}")
    offset = require_whole("offset", offset, least=-(2**63))
    if offset and config.positions != "rotary":
        raise ValueError(f"offset {offset} means nothing where positions is {config.positions!r}, not 'rotary'")
    maps = [
        _head_maps(model.blocks[layer], config, raw) for layer in (range(config.n_layers) if layers is None else layers)
    ]
    W_Q, W_K, W_V, W_O = (stacked(of_layers) for of_layers in zip(*maps, strict=True))
    rotary = config.positions == "rotary"
    W_Q = turned(W_Q, config, offset)
    return HeadWeights(W_Q, W_K, W_V, W_O, raw, _note(config, raw, offset), offset if rotary else None)


def _head_maps(block: TransformerBlock, config: GPTConfig, raw: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`W_Q W_K W_V W_O` of one layer, keys and values gathered to the query heads."""
    attn = block.attn
    W_Q, W_K, W_V, W_O = (_at_least_float32(W.detach()) for W in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O))
    if not raw:
        if config.norm_placement == "pre":
            W_Q, W_K, W_V = (read_through(W, block.ln1) for W in (W_Q, W_K, W_V))
        if attn.q_norm is not None and attn.k_norm is not None:
            W_Q, W_K = W_Q * attn.q_norm.w, W_K * attn.k_norm.w
        W_O = _written(W_O, block.ln1_post, config)
    if config.group_size > 1:
        W_K, W_V = (W.repeat_interleave(config.group_size, dim=0) for W in (W_K, W_V))
    return W_Q, W_K, W_V, W_O


def _written(W: Float[Tensor, "*batch n d_model"], norm: Norm | None, config: GPTConfig) -> Tensor:
    W = write_through(W, norm)
    return centred_writes(W) if readers_centre(config) else W


@torch.no_grad()
def mlp_weights(
    model: HookedGPT, layer: int, raw: bool = False
) -> tuple[Float[Tensor, "d_model n"], Float[Tensor, "d_mlp d_model"]]:
    """What an MLP reads (`W_in`, beside it `W_gate` where it is gated) and writes (`W_out`), as a head's maps are read.

    Raises:
        ValueError: A model without MLPs.
    """
    require_model(model)
    block, config = model.blocks[layer], model.config
    if block.mlp is None:
        raise ValueError("the model is attention-only: it has no MLP weights")
    reads = torch.cat([W.detach() for W in (block.mlp.W_in, block.mlp.W_gate) if W is not None], dim=1)
    writes = block.mlp.W_out.detach()
    if raw:
        return _at_least_float32(reads), _at_least_float32(writes)
    norm = block.ln1 if config.parallel_blocks == "shared_norm" else block.ln2
    reads = _at_least_float32(reads) if config.norm_placement == "post" else read_through(reads, norm)
    return reads, _written(writes, block.ln2_post, config)


@torch.no_grad()
def unembedding(model: HookedGPT, raw: bool = False) -> Float[Tensor, "d_model d_vocab"]:
    """`W_U` read through the final norm and centred over the vocabulary, since softmax sees no shift of all logits."""
    require_model(model)
    if raw:
        return _at_least_float32(model.W_U.detach())
    W_U = read_through(model.W_U, model.ln_final)
    return W_U - W_U.mean(-1, keepdim=True)


@torch.no_grad()
def embedding(model: HookedGPT, raw: bool = False) -> Float[Tensor, "d_vocab d_model"]:
    """`W_E` as it enters the stream: times `embed_scale`, centred where every reader centres."""
    require_model(model)
    W_E = _at_least_float32(model.W_E.detach())
    if raw:
        return W_E
    return (centred_writes(W_E) if readers_centre(model.config) else W_E) * model.config.embed_scale


@torch.no_grad()
def positional_embedding(model: HookedGPT, raw: bool = False) -> Float[Tensor, "n_ctx d_model"]:
    """`W_pos`, centred where every reader centres.

    Raises:
        ValueError: Positions that are not learned.
    """
    require_model(model)
    if model.pos_embed is None:
        raise ValueError(f"the model has no positional embedding: positions is {model.config.positions!r}")
    W_pos = _at_least_float32(model.W_pos.detach())
    return W_pos if raw or not readers_centre(model.config) else centred_writes(W_pos)


def _note(config: GPTConfig, raw: bool, offset: int) -> str:
    if raw:
        notes = ["raw weights"]
    elif config.norm is None:
        notes = ["no norm to read in"]
    elif config.norm_placement == "post":
        notes = ["post-norm: nothing to read in"]
    else:
        notes = ["norm gains read in"]
        if config.norm == "layernorm":
            notes.append("reads and writes centred" if readers_centre(config) else "reads centred")
    if config.positions == "rotary":
        notes.append(f"QK at rotary offset {offset}")
    if config.qk_norm:
        notes.append("QK without query and key norms" if raw else "QK at fixed scales of the query and key norms")
    return ", ".join(notes)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
