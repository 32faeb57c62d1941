"""How large the gauge freedom of a head is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from circuits.arguments import require_model
from circuits.finite import check_finite
from circuits.gauge.freedom import (
    group_of,
    key_bias_matters,
    rotary_planes,
    score_forms,
    still_coordinates,
    widest,
)
from circuits.model import HookedGPT


@dataclass(frozen=True)
class FibreDimension:
    """The dimension of the set of factors that give a head's circuit.

    Attributes:
        dimension: The number of independent directions in which the factors can move.
        of: ``"fibre"`` where the factors have full rank, so that the factor pairs of the product form a smooth set of
            this dimension; otherwise ``"kernel of the differential"``, the directions in which the product stays put to
            first order.
        free_key_bias: Further freedom: coordinates of `b_K` that never change a pattern.
    """

    dimension: int
    of: Literal["fibre", "kernel of the differential"]
    free_key_bias: int = 0


@torch.no_grad()
def fibre_dimension(model: HookedGPT, layer: int, head: int, circuit: str) -> FibreDimension:
    """The dimension of the gauge freedom in the weights of one head, or of all that share its keys and values.

    Full rank: d_head². With ranks a, b of an m × r and an n × r factor, the differential of their product
    has a kernel of dimension ``r (m + n) − m b − n a + a b``: ``2 d_head d_model − d_model (a + b) + a b``.
    Rotary models: twice the complex dimension for the planes of each frequency, plus that of what does not turn;
    ``rotary_dim + (d_head − rotary_dim)²`` for distinct frequencies and full rank. Under query and key norms: the
    dimension of the group that they and their gains leave, for factors of full rank.

    Raises:
        IndexError: A layer or head that the model does not have.
        ValueError: An unknown circuit, or weights that are not finite (where first).
    """
    require_model(model)
    config = model.config
    kv, heads = group_of(config, layer, head)
    attn = model.blocks[layer].attn
    check_finite(dict(attn.named_parameters(prefix=f"blocks.{layer % config.n_layers}.attn")))
    rows = slice(heads.start, heads.stop)
    if circuit == "OV":
        return _of_pairs([(widest(attn.W_V[kv]), widest(attn.W_O[rows]).mT.flatten(0, 1))])
    if circuit != "QK":
        raise ValueError(f"circuit {circuit!r} is not one of 'QK', 'OV'")
    still = still_coordinates(config)
    free_bias = 0 if key_bias_matters(config) or not config.bias_qkv else len(still)
    if config.qk_norm:
        return FibreDimension(_under_norms(list(score_forms(config, attn))), "fibre")
    Q, K = widest(attn.W_Q[rows]).flatten(0, 1), widest(attn.W_K[kv])
    pairs = [(planes.complex(Q), planes.complex(K)) for planes in rotary_planes(config)]
    found = _of_pairs([*pairs, (Q[:, still], K[:, still])])
    return FibreDimension(found.dimension, found.of, free_bias)


def _of_pairs(pairs: list[tuple[Tensor, Tensor]]) -> FibreDimension:
    """Of products ``A Bᴴ`` that do not share columns; complex directions count twice."""
    dimension, full = 0, True
    for A, B in pairs:
        (m, r), n = A.shape, len(B)
        a, b = (int(torch.linalg.matrix_rank(X)) if r else 0 for X in (A, B))
        full &= a == b == r
        dimension += (r * (m + n) - m * b - n * a + a * b) * (2 if A.is_complex() else 1)
    return FibreDimension(dimension, "fibre" if full else "kernel of the differential")


def _under_norms(forms: list[Tensor]) -> int:
    """Dimension of the skew matrices that commute with every form: forms on disjoint coordinates, gains in them."""
    count, seen = 0, set()
    for F in forms:
        coordinates = tuple(F.diagonal().nonzero().flatten().tolist())
        if not coordinates or coordinates in seen:
            continue  # the second form of a plane: taken with the first
        seen.add(coordinates)
        block = [G[list(coordinates)][:, list(coordinates)] for G in forms]
        count += _commuting_skew([G for G in block if bool(G.any())])
    return count


def _commuting_skew(forms: list[Tensor]) -> int:
    if all(torch.equal(F, torch.diag(F.diagonal())) for F in forms):
        gains = torch.stack([F.diagonal() for F in forms])
        same = (gains[:, :, None] == gains[:, None, :]).all(0)
        return int(same.triu(1).sum())
    size = len(forms[0])
    first, second = torch.triu_indices(size, size, 1)
    basis = torch.zeros(len(first), size, size, dtype=torch.float64)
    index = torch.arange(len(first))
    basis[index, first, second], basis[index, second, first] = 1.0, -1.0
    equations = torch.cat([(basis @ F - F @ basis).flatten(1) for F in forms], dim=1)
    return len(first) - int(torch.linalg.matrix_rank(equations))
