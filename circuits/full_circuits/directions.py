"""Singular directions of `W_OV` and `W_QK`, read out in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.arguments import require_model
from circuits.components import Head, check_component
from circuits.finite import check_result
from circuits.folded import head_weights
from circuits.full_circuits.sources import check_source, read_by_unembedding, read_source
from circuits.model import HookedGPT
from circuits.validity import require_whole


@dataclass(frozen=True, eq=False)
class SingularDirections:
    """What a head's strongest directions stand for.

    The axis ``end`` has two entries: the tokens furthest along the direction, and those furthest against it. The sign
    of a singular pair is arbitrary, but it is one for both sides: what is read at an end is answered at the same end.

    Attributes:
        head: The head.
        circuit: ``"OV"`` (left: what is read, right: what is written) or ``"QK"`` (left: queries, right: keys).
        singular_values: Of the directions, descending.
        left_tokens: Tokens whose embeddings lie furthest along and against each left direction.
        left_values: Their inner products with it.
        right_tokens: OV: the tokens whose logits the right direction moves most; QK: as on the left.
        right_values: By how much.
        note: What was read in.
    """

    head: Head
    circuit: str
    singular_values: Float[Tensor, " direction"]
    left_tokens: Int[Tensor, "direction end token"]
    left_values: Float[Tensor, "direction end token"]
    right_tokens: Int[Tensor, "direction end token"]
    right_values: Float[Tensor, "direction end token"]
    note: str


@torch.no_grad()
def singular_directions(
    model: HookedGPT,
    layer: int,
    head: int,
    circuit: str = "OV",
    n: int = 5,
    tokens: int = 10,
    source: str = "token",
    offset: int | None = None,
    raw: bool = False,
) -> SingularDirections:
    """The first singular directions of ``W_OV`` or ``W_QK`` in tokens (after Millidge and Black 2022).

    Args:
        model: A model.
        layer: The layer.
        head: A query head.
        circuit: ``"OV"`` or ``"QK"``.
        n: How many directions.
        tokens: How many tokens at either end of each.
        source: What embeddings are: ``"token"``, ``"position"`` or ``"mlp0"``.
        offset: Rotary models: query minus key position at which `W_QK` is taken; by default 0.
        raw: The bare weights.

    Raises:
        IndexError: A layer or head that the model does not have.
        TypeError, ValueError: `n` or `tokens` not a whole number of at least 1.
        ValueError: An unknown circuit or source, an offset for the OV circuit,
            or weights that are not finite (where first).
    """
    require_model(model)
    if circuit not in ("OV", "QK"):
        raise ValueError(f"circuit {circuit!r} is not one of 'OV', 'QK'")
    where = Head(layer, head)
    check_component(where, model.config)
    check_source(model, source, layer)
    if circuit == "OV" and offset:
        raise ValueError(f"offset {offset} belongs to the QK circuit; the OV circuit depends on no position")
    n, tokens = require_whole("n", n), require_whole("tokens", tokens)
    weights = head_weights(model, raw, 0 if offset is None else offset, layers=[layer])
    matrix = (weights.OV if circuit == "OV" else weights.QK)[0, head]
    check_result(f"W_{circuit} of {where}", model, matrix.A, matrix.B)
    U, S, Vh = matrix.svd()
    n = min(n, len(S))
    left = read_source(model, source, U[:, :n], raw).mT
    if circuit == "OV":
        right = read_by_unembedding(model, Vh[:n], raw)
    else:
        right = read_source(model, source, Vh[:n].mT, raw).mT
    check_result(f"the readout of {where} in tokens", model, left, right)
    left_tokens, left_values = _ends(left, tokens)
    right_tokens, right_values = _ends(right, tokens)
    return SingularDirections(where, circuit, S[:n], left_tokens, left_values, right_tokens, right_values, weights.note)


def _ends(scores: Float[Tensor, "direction token"], count: int) -> tuple[Tensor, Tensor]:
    """Indices and values of the highest and of the lowest, ``[direction end count]``."""
    count = min(count, scores.shape[-1])
    high, low = scores.topk(count), scores.topk(count, largest=False)
    return torch.stack([high.indices, low.indices], 1), torch.stack([high.values, low.values], 1)
