"""The lecture's formulas, from the weights alone: what a model's own pass is compared with.

Row vectors, one line for each line of the lecture. Nothing here calls the model's forward code.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.attention import Attention
from circuits.block import TransformerBlock
from circuits.config import Activation, GPTConfig
from circuits.layers import MLPLayer, Norm
from circuits.model import HookedGPT

Stream = Float[Tensor, "batch pos d_model"]


def gelu(t: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``σ(t) = t Φ(t)`` with ``Φ(t) = (1 + erf(t / √2)) / 2``."""
    return t * (1 + torch.erf(t / math.sqrt(2))) / 2


def activation(t: Float[Tensor, "*batch"], act: Activation) -> Float[Tensor, "*batch"]:
    """The lecture's GELU, or one of the functions that other models have in its place."""
    if act == "gelu":
        return gelu(t)
    if act == "gelu_new":
        return t * (1 + torch.tanh(math.sqrt(2 / math.pi) * (t + 0.044715 * t**3))) / 2
    return t * torch.sigmoid(t) if act == "silu" else t * (t > 0)


def layer_norm(u: Float[Tensor, "*batch d"], norm: Norm, eps: float) -> Float[Tensor, "*batch d"]:
    """Definition 4.1, ``γ ⊙ (u − ū 1) / sqrt(σ(u)² + ε) + β``."""
    mean = u.sum(-1, keepdim=True) / u.shape[-1]
    variance = ((u - mean) ** 2).sum(-1, keepdim=True) / u.shape[-1]
    shift = 0 if norm.b is None else norm.b
    return norm.w * (u - mean) / torch.sqrt(variance + eps) + shift


def attention_head(X: Stream, attn: Attention, head: int) -> Float[Tensor, "batch pos d_head"]:
    """``Attn^h(X) = A^h X W_V^h`` with ``A^h = softmax(mask(X W_Q^h (X W_K^h)ᵀ / √d_head))``, with biases if any."""
    shared = head // attn.group_size

    def project(W: Tensor, b: Tensor | None, index: int) -> Tensor:
        return X @ W[index] if b is None else X @ W[index] + b[index]

    q, k, v = (
        project(attn.W_Q, attn.b_Q, head),
        project(attn.W_K, attn.b_K, shared),
        project(attn.W_V, attn.b_V, shared),
    )
    scores = q @ k.mT / math.sqrt(attn.d_head)
    future = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool, device=X.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v


def multi_head_attention(X: Stream, attn: Attention) -> Stream:
    """Definition 1.1, ``[Attn¹(X) | … | Attnᴴ(X)] W_O``, and the output bias."""
    heads = torch.cat([attention_head(X, attn, h) for h in range(attn.n_heads)], dim=-1)
    out = heads @ attn.W_O.flatten(0, 1)
    return out if attn.b_O is None else out + attn.b_O


def mlp(u: Stream, layer: MLPLayer, act: Activation) -> Stream:
    """Definition 2.1, ``W₂ σ(W₁ u + b₁) + b₂``; rows on the left here."""
    hidden = u @ layer.W_in + (0 if layer.b_in is None else layer.b_in)
    return activation(hidden, act) @ layer.W_out + (0 if layer.b_out is None else layer.b_out)


def block(X: Stream, module: TransformerBlock, config: GPTConfig) -> Stream:
    """Definition 3.1, ``Y = X + MHA(LN₁(X))``, ``X' = Y + MLP(LN₂(Y))``."""
    assert module.ln1 is not None
    assert module.ln2 is not None
    assert module.mlp is not None
    eps = config.norm_eps
    Y = X + multi_head_attention(layer_norm(X, module.ln1, eps), module.attn)
    return Y + mlp(layer_norm(Y, module.ln2, eps), module.mlp, config.act)


def gpt(tokens: Int[Tensor, "batch pos"], model: HookedGPT) -> Float[Tensor, "batch pos d_vocab"]:
    """Section 5, ``X⁽⁰⁾ = E[x] + P``, L blocks, ``Z = LN_f(X⁽ᴸ⁾) W_U``; and b_U where there is one."""
    X = model.W_E[tokens] + model.W_pos[: tokens.shape[1]]
    for module in model.blocks:
        X = block(X, module, model.config)
    assert model.ln_final is not None
    return layer_norm(X, model.ln_final, model.config.norm_eps) @ model.W_U + model.b_U
