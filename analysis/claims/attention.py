"""Section 1 of the lecture: multi-head attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.claims import formulas
from analysis.claims.claim import Finding, applies, claim, within
from analysis.claims.conventions import off_attention
from analysis.claims.subject import Subject, difference, largest
from circuits.attention import Attention
from circuits.head_circuits import turned
from circuits.names import block_names


def read_by_attention(on: Subject, layer: int) -> Tensor:
    """What the attention of a layer reads: ``LN₁(X)`` in a pre-norm block, the stream elsewhere."""
    return on.model.blocks[layer].normalised(on.stream(layer))


def attention_layer(on: Subject, layer: int) -> Tensor:
    """The attention layer's output on the run's own input, nothing captured."""
    block, read = on.model.blocks[layer], read_by_attention(on, layer)
    out: Tensor = block.attn((read, read, read), block.names, on.start())
    return out


@claim(
    "1.attention",
    "Section 1, Lecture 4",
    "Each head is scaled dot-product attention: softmax(mask(q kᵀ / √d_head)) v.",
    "largest relative difference of z from the formula",
)
def scaled_dot_product(on: Subject) -> Finding:
    """For every head h, ``Attn^h(X) = A^h X W_V^h`` with ``A^h = softmax(mask(X W_Q^h (X W_K^h)ᵀ / √d_head))``.

    The mask sets the scores of future positions to −∞ before the softmax over keys. The division by √d_head keeps the
    variance of a score at that of one product of coordinates: a sum of d_head independent products of mean 0 and
    variance 1 has variance d_head.
    """
    off = off_attention(on.model.config)
    applies(not off, off)
    worst = 0.0
    for layer, head in on.heads:
        z = formulas.attention_head(read_by_attention(on, layer), on.model.blocks[layer].attn, head)
        worst = largest(worst, difference(on.cache[block_names(layer).z][:, :, head], z))
    return within(worst, on.tolerance, on.sampled)


@claim(
    "1.1",
    "Definition 1.1",
    "Multi-head attention is the concatenation of the heads, times W_O.",
    "largest relative difference of a layer's output from [z¹ | … | zᴴ] W_O (+ b_O)",
)
def multi_head_attention(on: Subject) -> Finding:
    """``MHA(X) = [Attn¹(X) | ⋯ | Attnᴴ(X)] W_O`` with ``W_O ∈ R^{H d_head × d}``; ``+ b_O`` where there is an output
    bias.

    Theorem 5.2 counts b_O, which the definition leaves out.
    """
    worst = 0.0
    for layer in on.layers:
        attn = on.model.blocks[layer].attn
        joined = on.cache[block_names(layer).z].flatten(2) @ attn.W_O.flatten(0, 1)
        worst = largest(worst, difference(attention_layer(on, layer), joined + _output_bias(attn)))
    return within(worst, on.tolerance)


@claim(
    "1.2.sum",
    "Proposition 1.2",
    "Multi-head attention is the sum over heads of A^h X W_OV^h.",
    "largest relative difference of a layer's output from the sum",
)
def additive_heads(on: Subject) -> Finding:
    """``MHA(X) = Σ_h A^h(X) X W_OV^h`` with ``W_OV^h = W_V^h W_O^h``, where ``W_O`` is cut into blocks ``W_O^h`` of
    d_head rows.

    Proof: with ``C^h = A^h X W_V^h``, block multiplication gives ``[C¹ | ⋯ | Cᴴ] W_O = Σ_h C^h W_O^h``. Value biases
    add ``A^h 1 b_V^h W_O^h``, the output bias ``1 b_O``.
    """
    worst = 0.0
    for layer in on.layers:
        attn, X = on.model.blocks[layer].attn, read_by_attention(on, layer)
        pattern = on.cache[block_names(layer).pattern]
        total = _output_bias(attn).expand_as(X)
        for head in range(attn.n_heads):
            OV = on.model.OV[layer, head]
            total = total + pattern[:, head] @ (X @ OV.A @ OV.B)
            if attn.b_V is not None:
                carried = pattern[:, head].sum(-1, keepdim=True)
                total = total + carried * (attn.b_V[head // attn.group_size] @ attn.W_O[head])
        worst = largest(worst, difference(attention_layer(on, layer), total))
    return within(worst, on.tolerance)


def _output_bias(attn: Attention) -> Tensor:
    return attn.out.weight.new_zeros(attn.out.out_features) if attn.b_O is None else attn.b_O


@claim(
    "1.2.rank",
    "Proposition 1.2",
    "The rank of W_OV^h is at most d_head.",
    "singular value d_head + 1 of W_OV, over the largest",
)
def rank_of_OV(on: Subject) -> Finding:
    """``rank(W_OV^h) = rank(W_V^h W_O^h) ≤ d_head``: the rank of a product is at most its inner dimension.

    The d × d product is formed, and its singular values beyond the d_head-th are those of rounding.
    """
    return _rank_beyond(on, "OV")


@claim(
    "1.2.rank-QK",
    "Section 1",
    "The rank of W_QK^h is at most d_head.",
    "singular value d_head + 1 of W_QK, over the largest",
)
def rank_of_QK(on: Subject) -> Finding:
    """``W_QK^h = W_Q^h (W_K^h)ᵀ`` is a bilinear form of rank at most d_head: the attention pattern sees X only through
    d_head directions on either side.
    """
    return _rank_beyond(on, "QK")


def _rank_beyond(on: Subject, circuit: str) -> Finding:
    config = on.model.config
    applies(
        config.d_head < config.d_model,
        f"d_head = {config.d_head} is not below d_model = {config.d_model}: every d × d matrix obeys the bound",
    )
    worst = 0.0
    for layer, head in on.heads:
        factors = getattr(on.model, circuit)[layer, head]
        s = torch.linalg.svdvals(factors.A @ factors.B)
        worst = largest(worst, float(s[config.d_head] / s[0]) if s[0] > 0 else 0.0)
    return within(worst, on.tolerance, on.sampled)


@claim(
    "1.2.scores",
    "Section 1",
    "The scores are X W_QK Xᵀ / √d_head.",
    "largest relative difference of the visible scores from the form",
)
def scores(on: Subject) -> Finding:
    """``S^h = X W_Q^h (X W_K^h)ᵀ / √d_head = X W_QK^h Xᵀ / √d_head``.

    Query and key biases are a row of their own below the weights, with a 1 behind every row of X. Under rotary
    positions the form depends on the offset: ``S[t, s] = x_t W_QK(t − s) x_sᵀ / √d_head`` with
    ``W_QK(Δ) = W_Q R(Δ) W_Kᵀ``, and that is what is compared.
    """
    config = on.model.config
    applies(not config.qk_norm, "queries and keys are normalised, so that scores are not bilinear in X")
    applies(config.attn_softcap is None, "scores are soft-capped, so that they are not bilinear in X")
    scale = config.d_head**-0.5
    applies(
        math.isclose(config.attn_scale, scale, rel_tol=1e-6),
        f"scores are multiplied by {config.attn_scale:.4g}, not 1/√d_head = {scale:.4g}",
    )
    worst = 0.0
    for layer, head in on.heads:
        attn, shared = on.model.blocks[layer].attn, head // config.group_size
        X = torch.nn.functional.pad(read_by_attention(on, layer), (0, 1), value=1.0)
        Q, K = _with_bias(attn.W_Q, attn.b_Q, head), _with_bias(attn.W_K, attn.b_K, shared)
        actual = on.cache[block_names(layer).scores][:, head]
        expected = torch.full_like(actual, -math.inf)
        for offset in range(on.length) if config.positions == "rotary" else (None,):
            form = X @ turned(Q, config, offset) @ (X @ K).mT * scale
            expected = form if offset is None else _put_diagonal(expected, form, offset)
        seen = actual.isfinite()
        worst = largest(worst, difference(actual[seen], expected[seen]))
    rotary = "at each offset, W_QK(Δ) = W_Q R(Δ) W_Kᵀ" if config.positions == "rotary" else ""
    return within(worst, on.tolerance, ", ".join(filter(None, [rotary, on.sampled])))


def _with_bias(W: Tensor, b: Tensor | None, head: int) -> Tensor:
    bias = W.new_zeros(W.shape[-1]) if b is None else b[head]
    return torch.cat([W[head], bias[None]])


def _put_diagonal(into: Tensor, form: Tensor, offset: int) -> Tensor:
    """`into` with the entries of `form` at which the query stands `offset` behind the key."""
    back = torch.arange(form.shape[1], device=form.device)
    return torch.where(back[:, None] - back[None, :] == offset, form, into)
