"""Pairs of factors: which go together, and the pairs that products, sums and multiples of their matrices have.

A pair is `A` `[*batch m r]` and `B` `[*batch r n]`, and stands for `A @ B`, which is formed nowhere here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check(A: Tensor, B: Tensor) -> None:
    """Refuse two factors that make no matrix.

    Raises:
        TypeError: one is not a floating-point tensor.
        ValueError: their shapes, dtypes or devices do not go together.
    """
    for name, factor, axes in (("A", A, "[*batch m r]"), ("B", B, "[*batch r n]")):
        if not isinstance(factor, Tensor):
            raise TypeError(f"expected factor {name} to be a tensor, got {type(factor).__name__}")
        if not factor.is_floating_point():
            raise TypeError(f"expected factor {name} to be floating point, got {factor.dtype}")
        if factor.ndim < 2:
            raise ValueError(f"expected factor {name} of shape {axes}, got {list(factor.shape)}")
    if A.shape[-1] != B.shape[-2]:
        raise ValueError(
            f"expected factors with one inner size, got A {list(A.shape)} (inner {A.shape[-1]}) "
            f"and B {list(B.shape)} (inner {B.shape[-2]})"
        )
    if (A.dtype, A.device) != (B.dtype, B.device):
        raise ValueError(
            f"expected factors of one dtype on one device, got A {A.dtype} on {A.device}, B {B.dtype} on {B.device}"
        )
    try:
        torch.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    except RuntimeError as error:
        raise ValueError(
            f"expected leading axes that broadcast, got A {list(A.shape[:-2])} and B {list(B.shape[:-2])}"
        ) from error


def chained(matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The product of three or four matrices, kept as two factors at the narrowest place between them."""
    inner = [left.shape[-1] for left in matrices[:-1]]
    cut = inner.index(min(inner)) + 1
    return _multiplied(matrices[:cut]), _multiplied(matrices[cut:])


def added(A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """`A @ B + C @ D`, as `[A C]` and `[B; D]`: the inner sizes add up."""
    batch = torch.broadcast_shapes(*(factor.shape[:-2] for factor in (A, B, C, D)))
    A, B, C, D = (factor.expand(*batch, *factor.shape[-2:]) for factor in (A, B, C, D))
    return torch.cat([A, C], dim=-1), torch.cat([B, D], dim=-2)


def scaled(
    A: Tensor, B: Tensor, operation: Callable[[Any, Any], Tensor], scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`operation(A @ B, scale)` of a multiplication or division by numbers, rows `[... m 1]` or columns `[... 1 n]`."""
    shape = scale.shape if isinstance(scale, Tensor) else ()
    if not shape or shape[-1] == 1:
        A = operation(A, scale)
    else:
        B = operation(B, scale)
    dtype = torch.promote_types(A.dtype, B.dtype)
    return A.to(dtype), B.to(dtype)


def _multiplied(matrices: list[Tensor]) -> Tensor:
    """The product of one to three matrices in the cheaper order."""
    if len(matrices) < 3:
        return matrices[0] if len(matrices) == 1 else matrices[0] @ matrices[1]
    X, Y, Z = matrices
    a, b, c, d = X.shape[-2], Y.shape[-2], Z.shape[-2], Z.shape[-1]
    return (X @ Y) @ Z if a * c * (b + d) <= b * d * (c + a) else X @ (Y @ Z)
