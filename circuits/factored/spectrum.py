"""Linear algebra on `M = A @ B` from its factors, at the size of the inner axis.

`A = Q_A R_A` and `B.T = Q_B R_B` give `M = Q_A (R_A R_B.T) Q_B.T`, so the singular values of M are those of
the r × r core (design, section 5). Where r is not smaller than both outer sizes the dense matrix is no
larger than the factors, and is used itself. 16-bit factors are raised to float32 first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from circuits.finite import finite_matrix

# QR works on copies; pieces of this size stay in the cache of a core, which is worth 10-15% of the time.
_PIECE_BYTES = 2**20


class SVD(NamedTuple):
    """`U @ diag(S) @ Vh` is the matrix; the singular values descend.

    U is `[*batch m k]`, S `[*batch k]`, Vh `[*batch k n]` with `k = min(m, n, r)`: the rows of Vh (not
    its columns) are the right singular vectors, as in `torch.linalg.svd`.
    """

    U: Tensor
    S: Tensor
    Vh: Tensor


def raised(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The factors in a precision that linear algebra is done in: float32 at least."""
    dtype = torch.promote_types(A.dtype, torch.float32)
    return A.to(dtype), B.to(dtype)


def svd(A: Tensor, B: Tensor) -> SVD:
    """Thin singular value decomposition of `A @ B`; see `SVD` for the convention."""
    if _dense_is_smaller(A, B):
        return SVD(*torch.linalg.svd(finite_matrix(A @ B), full_matrices=False))
    Q_A, R_A = torch.linalg.qr(A)
    Q_B, R_B = torch.linalg.qr(B.mT)
    U, S, Vh = torch.linalg.svd(finite_matrix(R_A @ R_B.mT), full_matrices=False)
    return SVD(Q_A @ U, S, Vh @ Q_B.mT)


def singular_values(A: Tensor, B: Tensor) -> Tensor:
    """Singular values of `A @ B`, descending, `[*batch min(m, n, r)]`; no vectors are computed."""
    values: Tensor = _SingularValues.apply(A, B)  # type: ignore[no-untyped-call]  # PyTorch leaves `apply` untyped
    return values


def frobenius_norm(A: Tensor, B: Tensor) -> Tensor:
    """`‖A @ B‖_F`, `[*batch]`, exact to rounding also where the columns of A cancel in the product."""
    norm: Tensor = _FrobeniusNorm.apply(A, B)  # type: ignore[no-untyped-call]  # PyTorch leaves `apply` untyped
    return norm


def _dense_is_smaller(A: Tensor, B: Tensor) -> bool:
    return A.shape[-1] >= min(A.shape[-2], B.shape[-1])


def _r_factor(X: Tensor) -> Tensor:
    """R of the QR decomposition, `[*batch r r]`, of a tall X; without Q."""
    rows, columns = X.shape[-2:]
    flat = X.reshape(math.prod(X.shape[:-2]), rows, columns)
    size = max(1, rows * columns * X.element_size())
    step = max(1, _PIECE_BYTES // size if X.device.type == "cpu" else len(flat))
    pieces = [torch.linalg.qr(piece, mode="r").R for piece in flat.split(step)]
    return torch.cat(pieces).reshape(*X.shape[:-2], columns, columns)


def _values_of_core(core: Tensor) -> Tensor:
    """Singular values of a small matrix.

    A float32 core on the CPU goes through the eigenvalues of its Gram matrix in float64, which is faster. Squaring
    in float64 costs no accuracy there: the error it leaves in a singular value s is eps64 · s_1² / s, at
    most the eps32 · s_1 of rounding the core for every s down to eps32 · s_1.
    """
    if core.dtype == torch.float32 and core.device.type == "cpu":
        wide = core.double()
        squares: Tensor = torch.linalg.eigvalsh(wide @ wide.mT).flip(-1)
        return squares.clamp(min=0).sqrt().to(core.dtype)
    values: Tensor = torch.linalg.svdvals(core)
    return values


class _SingularValues(torch.autograd.Function):
    """Values alone going forward; the backward pass takes U and Vh, `dM = U diag(ds) Vh`.

    Differentiating through QR instead would divide by R and give NaN for a factor without full rank.
    """

    @staticmethod
    def forward(A: Tensor, B: Tensor) -> Tensor:
        if _dense_is_smaller(A, B):
            dense: Tensor = torch.linalg.svdvals(finite_matrix(A @ B))
            return dense
        return _values_of_core(finite_matrix(_r_factor(A) @ _r_factor(B.mT).mT))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        A, B = ctx.saved_tensors
        U, _, Vh = svd(A, B)  # autograd sums the gradients below over the axes along which a factor is shared
        right = grad.unsqueeze(-1) * Vh
        return U @ (right @ B.mT), (A.mT @ U) @ right


class _FrobeniusNorm(torch.autograd.Function):
    """`‖R_A B‖` going forward, since Gram matrices lose half the digits where A and B cancel; `dM = M / ‖M‖` back."""

    @staticmethod
    def forward(A: Tensor, B: Tensor) -> Tensor:
        left = A if _dense_is_smaller(A, B) else _r_factor(A)
        norm: Tensor = torch.linalg.matrix_norm(left @ B)
        return norm

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        A, B, norm = ctx.saved_tensors
        scale = torch.where(norm == 0, 0, grad / norm)[..., None, None]
        return scale * A @ (B @ B.mT), scale * (A.mT @ A) @ B
