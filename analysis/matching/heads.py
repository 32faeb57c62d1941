"""Heads of two models compared by their full circuits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.matching.assignment import best_assignment
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.components import Component, Head
from circuits.finite import check_finite
from circuits.folded import HeadWeights, embedding, head_weights, unembedding
from circuits.model import HookedGPT

CIRCUITS = ("QK", "OV")


@result
class HeadMatching(Result):
    """For each head of the first model, the head of the second that it corresponds to.

    Attributes:
        similarity: With the head it is matched to: 1 is the same circuit, up to scale. NaN where no head was left.
        partner_layer: Layer of that head; −1 where none was left.
        partner_head: Its number.
        best_other: The highest similarity with any other head of the second model: a match means something where this
            is clearly lower.
        pairwise: Of every pair; NaN where one of the two heads is zero.
        components: The heads of the first model.
        circuits: What was compared.
        raw: Whether the bare weights were.
    """

    table = ("partner_layer", "partner_head", "similarity", "best_other")
    similarity: Float[Tensor, " component"]
    partner_layer: Int[Tensor, " component"]
    partner_head: Int[Tensor, " component"]
    best_other: Float[Tensor, " component"]
    pairwise: Float[Tensor, "layer head layer2 head2"]
    components: tuple[Component, ...]
    circuits: tuple[str, ...]
    raw: bool

    def title(self) -> str:
        """What was compared."""
        return f"Heads of two models matched by their full {' and '.join(self.circuits)} circuits"


@torch.no_grad()
def match_heads(
    model: HookedGPT,
    other: HookedGPT,
    circuits: tuple[str, ...] = CIRCUITS,
    *,
    same_layer: bool = False,
    raw: bool = False,
) -> HeadMatching:
    """Which head of `other` each head of `model` is, one to one, by what heads do between tokens.

    The bases of two models have nothing in common, so that comparing `W_QK` with `W_QK` says nothing. Their
    vocabularies are the same: the similarity is the cosine ``⟨M, M'⟩_F / (‖M‖ ‖M'‖)`` of the full circuits
    ``W_E W_OV W_U`` and ``W_E W_QK W_Eᵀ`` (by default without what softmax does not see: their means over the logits
    and over the keys), averaged over the circuits asked for. No d_vocab × d_vocab matrix is formed:
    ``⟨A B, A' B'⟩ = ⟨Aᵀ A', B B'ᵀ⟩``. The assignment is the best one of all heads together.

    Args:
        model: The first model.
        other: The second, over the same vocabulary; of any other shape.
        circuits: ``("QK", "OV")``, or one of the two.
        same_layer: Match heads within a layer only.
        raw: Compare the bare weights.

    Raises:
        ValueError: Vocabularies of different sizes, unknown circuits, different layers under `same_layer`, or weights
            that are not finite.
    """
    require_model(model, other)
    _check(model, other, circuits, same_layer)
    dtype = torch.promote_types(torch.promote_types(model.dtype, other.dtype), torch.float32)
    first, second = (_ends(m, raw, dtype) for m in (model, other))
    similarities = []
    for circuit in circuits:
        left = {"QK": (first.keys.mT @ second.keys), "OV": (first.logits @ second.logits.mT)}[circuit]
        similarities.append(_cosines(first, second, circuit, left))
    pairwise = torch.stack(similarities).mean(0)
    return _matched(model, other, pairwise, circuits, same_layer, raw)


@dataclass(frozen=True)
class _Ends:
    """A model between tokens: what queries and values read, what keys read, what reaches the logits."""

    weights: HeadWeights
    reads: Float[Tensor, "d_vocab d_model"]
    keys: Float[Tensor, "d_vocab d_model"]
    logits: Float[Tensor, "d_model d_vocab"]


def _ends(model: HookedGPT, raw: bool, dtype: torch.dtype) -> _Ends:
    weights = head_weights(model, raw)
    maps = {name: getattr(weights, name).to(dtype) for name in ("W_Q", "W_K", "W_V", "W_O")}
    W_E = embedding(model, raw).to(dtype)
    keys = W_E if raw else W_E - W_E.mean(0)
    return _Ends(dataclasses.replace(weights, **maps), W_E, keys, unembedding(model, raw).to(dtype))


def _cosines(
    first: _Ends, second: _Ends, circuit: str, ends: Float[Tensor, "d_model d_model2"]
) -> Float[Tensor, "layer head layer2 head2"]:
    """Cosines of all pairs; `ends` is the product of the two models' right ends, which all pairs share."""
    starts = first.reads.mT @ second.reads
    inner = _inner_products(_sides(first.weights, circuit), _sides(second.weights, circuit), starts, ends)
    norms = []
    for model in (first, second):
        own = (model.keys.mT @ model.keys) if circuit == "QK" else (model.logits @ model.logits.mT)
        norms.append(_own_norms(*_sides(model.weights, circuit), model.reads.mT @ model.reads, own))
    return inner / (norms[0][:, :, None, None] * norms[1])


def _sides(weights: HeadWeights, circuit: str) -> tuple[Tensor, Tensor]:
    """Left and right factor of each head, ``[layer head d_model d_head]``."""
    return (weights.W_Q, weights.W_K) if circuit == "QK" else (weights.W_V, weights.W_O.mT)


def _inner_products(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], starts: Tensor, ends: Tensor
) -> Tensor:
    """``⟨Aᵀ starts A', Bᵀ ends B'⟩_F`` for heads with factors A, B and A', B', a layer of the first model at a time."""
    (A, B), (A2, B2) = first, second
    layers, heads, _, r = A.shape
    layers2, heads2, _, r2 = A2.shape
    right_A, right_B = (X.permute(2, 0, 1, 3).flatten(1) for X in (A2, B2))
    rows = []
    for layer in range(layers):
        left_A, left_B = (X[layer].transpose(1, 2).flatten(0, 1) for X in (A, B))
        product = ((left_A @ starts) @ right_A) * ((left_B @ ends) @ right_B)
        rows.append(product.view(heads, r, layers2, heads2, r2).sum((1, 4)))
    return torch.stack(rows)


def _own_norms(A: Tensor, B: Tensor, starts: Tensor, ends: Tensor) -> Float[Tensor, "layer head"]:
    squared = ((A.mT @ starts @ A) * (B.mT @ ends @ B)).sum((-2, -1))
    norms: Tensor = squared.clamp(min=0).sqrt()
    return norms


def _matched(
    model: HookedGPT,
    other: HookedGPT,
    pairwise: Float[Tensor, "layer head layer2 head2"],
    circuits: tuple[str, ...],
    same_layer: bool,
    raw: bool,
) -> HeadMatching:
    layers, heads, layers2, heads2 = pairwise.shape
    for each in (model, other):
        if not bool(pairwise.isfinite().all()):
            check_finite(dict(each.named_parameters()))
    table = pairwise.flatten(2).flatten(0, 1).double().cpu()
    gain = table.nan_to_num(0.0)
    if same_layer:
        own = torch.arange(layers).repeat_interleave(heads)[:, None] == torch.arange(layers2).repeat_interleave(heads2)
        gain = torch.where(own, gain, -1e3)
        table = torch.where(own, table, float("nan"))
    flipped = len(gain) > gain.shape[1]
    partner = torch.full((layers * heads,), -1)
    found = torch.from_numpy(best_assignment((gain.mT if flipped else gain).contiguous().numpy()))
    if flipped:
        partner[found] = torch.arange(len(found))
    else:
        partner = found
    there = partner >= 0
    similarity = table.gather(1, partner.clamp(min=0)[:, None])[:, 0].masked_fill(~there, float("nan"))
    others = table.scatter(1, partner.clamp(min=0)[:, None], float("nan")).nan_to_num(float("-inf")).amax(1)
    return HeadMatching(
        similarity=similarity.to(pairwise.dtype),
        partner_layer=torch.where(there, partner // heads2, -1),
        partner_head=torch.where(there, partner % heads2, -1),
        best_other=others.masked_fill(others.isinf(), float("nan")).to(pairwise.dtype),
        pairwise=pairwise,
        components=tuple(Head(layer, head) for layer in range(layers) for head in range(heads)),
        circuits=circuits,
        raw=raw,
    )


def _check(model: HookedGPT, other: HookedGPT, circuits: tuple[str, ...], same_layer: bool) -> None:
    first, second = model.config, other.config
    if first.d_vocab != second.d_vocab:
        raise ValueError(
            f"heads are compared between the tokens that both models know: d_vocab is {first.d_vocab} in one and "
            f"{second.d_vocab} in the other"
        )
    unknown = [circuit for circuit in circuits if circuit not in CIRCUITS]
    if unknown or not circuits:
        raise ValueError(f"circuits {circuits!r} are not one or both of 'QK', 'OV'")
    shapes = [(config.n_layers, config.n_heads) for config in (first, second)]
    if same_layer and shapes[0] != shapes[1]:
        raise ValueError(
            f"same_layer needs as many layers and heads in both models, got {shapes[0][0]} × {shapes[0][1]} and "
            f"{shapes[1][0]} × {shapes[1][1]}"
        )
