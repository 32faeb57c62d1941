"""What stands at the ends of a full circuit: tokens, positions, or tokens as the first MLP leaves them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.folded import centred_writes, read_through
from circuits.layers import Norm
from circuits.model import HookedGPT

SOURCES = ("token", "position", "mlp0")
# Rows that go through the first MLP at once.
_ROWS_AT_ONCE = 2048


def check_source(model: HookedGPT, source: str, layer: int) -> None:
    """Refuse a source that does not exist, or that heads of this layer do not see.

    Raises:
        ValueError: An unknown source, positions that are not learned, or ``"mlp0"`` where there is no such thing.
    """
    config = model.config
    if source not in SOURCES:
        raise ValueError(f"source {source!r} is not one of {', '.join(map(repr, SOURCES))}")
    if source == "position" and config.positions != "learned":
        raise ValueError(f"source 'position' needs learned positions, but positions is {config.positions!r}")
    if source != "mlp0":
        return
    refusals = {
        "the model is attention-only": config.attn_only,
        "a post-norm stream is no sum of the embedding and what MLP 0 writes": config.norm_placement == "post",
        "the heads of layer 0 read before MLP 0 has written": layer == 0,
    }
    for reason, holds in refusals.items():
        if holds:
            raise ValueError(f"source 'mlp0' is not to be had: {reason}")


def read_source(model: HookedGPT, source: str, W: Float[Tensor, "d_model n"], raw: bool) -> Float[Tensor, "source n"]:
    """``E W`` for the rows E of a source, as they enter the stream; E itself is not copied.

    ``"mlp0"`` is the extended embedding ``E + MLP₀(LN(E))``: what the first MLP makes of a token that stands alone.
    """
    if source == "mlp0":
        return torch.cat([rows.to(W.dtype) @ W for rows in _extended(model)])
    E = model.W_E if source == "token" else model.W_pos
    scale = model.config.embed_scale if source == "token" and not raw else 1.0
    return torch.cat([rows.to(W.dtype) @ W for rows in E.detach().split(8 * _ROWS_AT_ONCE)]) * scale


def _extended(model: HookedGPT) -> Iterator[Float[Tensor, "rows d_model"]]:
    block, config = model.blocks[0], model.config
    assert block.mlp is not None
    norm = block.ln1 if config.parallel_blocks == "shared_norm" else block.ln2
    for rows in model.W_E.detach().split(_ROWS_AT_ONCE):
        E = (rows * config.embed_scale)[None]
        out = block.mlp(E if norm is None else norm(E), block.names)
        yield (E + (out if block.ln2_post is None else block.ln2_post(out)))[0]


def read_by_unembedding(model: HookedGPT, W: Float[Tensor, "n d_model"], raw: bool) -> Float[Tensor, "n d_vocab"]:
    """``W W_U``, by default with the final norm's gain and centring and `W_U` centred over the vocabulary."""
    if raw:
        return W @ model.W_U.detach().to(W.dtype)
    logits = _through(W, model.ln_final) @ model.W_U.detach().to(W.dtype)
    return logits - logits.mean(-1, keepdim=True)


def _through(W: Float[Tensor, "n d_model"], norm: Norm | None) -> Float[Tensor, "n d_model"]:
    """``W P diag(γ)``: the small side of ``W · (P diag(γ) W_U)``, so that no copy of `W_U` is made."""
    if norm is None:
        return W
    return (centred_writes(W) if norm.kind == "layernorm" else W) * norm.w.detach().to(W.dtype)


def folded_bias(
    bias: Float[Tensor, " d_head"] | None, W: Float[Tensor, "d_model d_head"], norm: Norm | None, raw: bool
) -> Float[Tensor, " d_head"]:
    """A bias of queries, keys or values with what the shift β of the norm before adds: ``b + β W``."""
    like = read_through(W, None)
    total = like.new_zeros(W.shape[-1]) if bias is None else bias.detach().to(like.dtype)
    if raw or norm is None or norm.b is None:
        return total
    return total + norm.b.detach().to(like.dtype) @ like
