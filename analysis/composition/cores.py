"""Reading and writing maps reduced to what a Frobenius norm of their product depends on.

``‖X Y‖_F`` does not change when the rows of X or the columns of Y are rotated. So ``W_OV = W_V W_O`` may be replaced by
``R_V W_O``, with R_V the d_head × d_head triangle of a QR decomposition of W_V, and ``W_QK`` by ``W_Q R_Kᵀ``; a tall
map by the square root of its Gram matrix. No d_model × d_model product of one pair is ever formed for a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.folded import HeadWeights

KINDS = ("Q", "K", "V")
# Rows of a tall matrix that are raised to float64 at once.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Writers:
    """Maps into the stream, ``[writer n d_model]``, and their Frobenius norms."""

    maps: Float[Tensor, "writer n d_model"]
    norms: Float[Tensor, " writer"]


@dataclass(frozen=True)
class Readers:
    """Maps out of the stream, ``[reader d_model n]``, and their Frobenius norms."""

    maps: Float[Tensor, "reader d_model n"]
    norms: Float[Tensor, " reader"]


def writers(maps: Float[Tensor, "writer n d_model"]) -> Writers:
    """Writers with the norms of their maps."""
    return Writers(maps, torch.linalg.matrix_norm(maps))


def readers(maps: Float[Tensor, "reader d_model n"]) -> Readers:
    """Readers with the norms of their maps."""
    return Readers(maps, torch.linalg.matrix_norm(maps))


def head_writers(weights: HeadWeights) -> Writers:
    """The heads of one layer as writers: ``R_V W_O`` for ``W_OV``."""
    return writers(triangle(weights.W_V[0]) @ weights.W_O[0])


def head_readers(weights: HeadWeights, kind: str) -> Readers:
    """The heads of one layer as readers: of queries (``W_QK``), keys (``W_QKᵀ``) or values (``W_OV``)."""
    W_Q, W_K, W_V, W_O = weights.W_Q[0], weights.W_K[0], weights.W_V[0], weights.W_O[0]
    reads, then = {"Q": (W_Q, W_K), "K": (W_K, W_Q), "V": (W_V, W_O.mT)}[kind]
    return readers(reads @ triangle(then).mT)


def triangle(tall: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch k n"]:
    """R of the QR decomposition: ``Rᵀ R = Xᵀ X``, k = min(m, n), to full precision."""
    R: Tensor = torch.linalg.qr(tall, mode="r").R
    return R


def gram_root(tall: Float[Tensor, "m n"]) -> Float[Tensor, "n n"]:
    """C with ``Cᵀ C = Xᵀ X``, for X too tall for QR; the Gram matrix is summed and taken apart in float64."""
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for rows in tall.split(_ROWS_AT_ONCE):
        wide = rows.double()
        gram += wide.mT @ wide
    values, vectors = torch.linalg.eigh(gram)
    root: Tensor = values.clamp(min=0).sqrt()[:, None] * vectors.mT
    return root.to(tall.dtype)


def scores(written: Writers, read: Readers) -> Float[Tensor, "writer reader"]:
    """``‖W M‖_F / (‖W‖_F ‖M‖_F)`` for every pair of a writer W and a reader M, from one matrix product.

    NaN where one of the two is zero.
    """
    w, n, d_model = written.maps.shape
    r, _, m = read.maps.shape
    product = written.maps.reshape(w * n, d_model) @ read.maps.transpose(0, 1).reshape(d_model, r * m)
    # Squares summed in two steps: many times as fast as a norm over two axes that do not lie side by side.
    norms = product.square_().view(w, n, r, m).sum(3).sum(1).sqrt()
    return norms / (written.norms[:, None] * read.norms)
