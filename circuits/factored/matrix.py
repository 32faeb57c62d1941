"""`FactoredMatrix`: a matrix `A @ B` that is never multiplied out unless somebody asks for it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from circuits.factored import factors, spectrum
from circuits.factored.indexing import index_factors
from circuits.factored.spectrum import SVD
from circuits.finite import finite_matrix


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FactoredMatrix:
    """The matrix `A @ B`, `[*batch m n]`, kept as `A` `[*batch m r]` and `B` `[*batch r n]`.

    Leading axes broadcast against each other; `A` and `B` keep the ones they came with. Everything acts as on
    the dense matrix `F.AB`, at the cost of the factors:

    - `F[index]` takes every index that a tensor takes. It stays factored where the last two axes of the result
      are still rows and columns of the matrix, and is a tensor otherwise.
    - `F @ X` and `X @ F` with a matrix (or a stack of them) or another FactoredMatrix stay factored, with the
      smallest inner size; with a vector they give a vector.
    - `F + G`, `F - G` stay factored with the inner sizes added; with a tensor they are dense.
    - `F * t`, `F / t` take numbers and tensors that scale whole matrices `[... 1 1]`, rows `[... m 1]` or
      columns `[... 1 n]`.
    - Linear algebra on 16-bit factors is done, and answered, in float32.

    `==` is identity, as for modules: compare `F.AB`. (What is called `ldim`, `mdim` and `rdim` by TransformerLens are
    m, r and n.)

    Attributes:
        A: left factor, `[*batch m r]`.
        B: right factor, `[*batch r n]`.
        note: what a reader of the repr should know, such as the rotary offset; carried along by every operation.

    Raises:
        TypeError: a factor is not a floating-point tensor.
        ValueError: shapes, dtypes or devices of the factors do not go together.
    """

    A: Tensor
    B: Tensor
    note: str = ""

    def __post_init__(self) -> None:
        factors.check(self.A, self.B)

    # -- what it is ---------------------------------------------------------------------------------------

    @property
    def ldim(self) -> int:
        """Rows, m."""
        return self.A.shape[-2]

    @property
    def mdim(self) -> int:
        """The inner size r, which the rank cannot exceed."""
        return self.A.shape[-1]

    @property
    def rdim(self) -> int:
        """Columns, n."""
        return self.B.shape[-1]

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense matrix, `[*batch m n]`."""
        return torch.Size((*torch.broadcast_shapes(self.A.shape[:-2], self.B.shape[:-2]), self.ldim, self.rdim))

    @property
    def ndim(self) -> int:
        """Number of axes of the dense matrix."""
        return max(self.A.ndim, self.B.ndim)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of both factors."""
        return self.A.dtype

    @property
    def device(self) -> torch.device:
        """Device of both factors."""
        return self.A.device

    @property
    def AB(self) -> Float[Tensor, "*batch {self.ldim} {self.rdim}"]:
        """The dense matrix: m × n numbers, formed on every access."""
        return self.A @ self.B

    @property
    def BA(self) -> Float[Tensor, "*batch {self.mdim} {self.mdim}"]:
        """The r × r matrix `B @ A`, whose eigenvalues are those of a square `A @ B` up to zeros.

        Raises:
            ValueError: the matrix is not square.
        """
        self._require_square("B @ A")
        return self.B @ self.A

    @property
    def T(self) -> FactoredMatrix:
        """Rows and columns exchanged; leading axes stay (unlike `Tensor.T`, which is for two axes only)."""
        return replace(self, A=self.B.mT, B=self.A.mT)

    mT = T

    def to(self, *args: Any, **kwargs: Any) -> FactoredMatrix:
        """Both factors on another device or in another dtype; arguments as for `Tensor.to`."""
        return replace(self, A=self.A.to(*args, **kwargs), B=self.B.to(*args, **kwargs))

    def detach(self) -> FactoredMatrix:
        """The same matrix, cut off from the graph that computed its factors."""
        return replace(self, A=self.A.detach(), B=self.B.detach())

    def __repr__(self) -> str:
        facts = [f"shape={list(self.shape)}", f"inner={self.mdim}", str(self.dtype).removeprefix("torch.")]
        facts += [str(self.device)] * (self.device.type != "cpu") + [self.note] * bool(self.note)
        return f"FactoredMatrix({', '.join(facts)})"

    # -- its parts ----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """`F.AB[index]`, factored where it is still a matrix of rows and columns (typed Any: index decides)."""
        batch = self.shape[:-2]
        A, B = (factor.expand(*batch, *factor.shape[-2:]) for factor in (self.A, self.B))
        part = index_factors(A, B, index)
        return part if isinstance(part, Tensor) else FactoredMatrix(*part, self.note)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # -- products -----------------------------------------------------------------------------------------

    @overload
    def __matmul__(self, other: FactoredMatrix) -> FactoredMatrix: ...
    @overload
    def __matmul__(self, other: Tensor) -> Any: ...
    def __matmul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor | FactoredMatrix):
            return NotImplemented
        if other.ndim == 0 or other.shape[-min(2, other.ndim)] != self.rdim:
            raise ValueError(
                f"expected {self.rdim} rows to the right of {self!r}, got a factor of shape {list(other.shape)}"
            )
        if isinstance(other, FactoredMatrix):
            product = factors.chained([self.A, self.B, other.A, other.B])
            return FactoredMatrix(*product, _joined(self.note, other.note))
        if other.ndim == 1:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        return FactoredMatrix(*factors.chained([self.A, self.B, other]), self.note)

    def __rmatmul__(self, other: Tensor) -> Any:
        if not isinstance(other, Tensor):
            return NotImplemented
        if other.ndim == 0 or other.shape[-1] != self.ldim:
            raise ValueError(
                f"expected {self.ldim} columns to the left of {self!r}, got a factor of shape {list(other.shape)}"
            )
        if other.ndim == 1:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        return FactoredMatrix(*factors.chained([other, self.A, self.B]), self.note)

    # -- sums and multiples -------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self.AB + other
        if not isinstance(other, FactoredMatrix):
            return NotImplemented
        if self.shape[-2:] != other.shape[-2:]:
            raise ValueError(f"expected matrices of one size to add, got {self!r} and {other!r}")
        return FactoredMatrix(*factors.added(self.A, self.B, other.A, other.B), _joined(self.note, other.note))

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # what `sum` starts from
            return self
        return self + other if isinstance(other, Tensor) else NotImplemented

    def __neg__(self) -> FactoredMatrix:
        return replace(self, A=-self.A)

    def __sub__(self, other: Any) -> Any:
        return self + (-other) if isinstance(other, Tensor | FactoredMatrix) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other if isinstance(other, Tensor) else NotImplemented

    def __mul__(self, scale: Any) -> FactoredMatrix:
        return self._scaled(operator.mul, scale)

    __rmul__ = __mul__

    def __truediv__(self, scale: Any) -> FactoredMatrix:
        return self._scaled(operator.truediv, scale)

    def _scaled(self, operation: Callable[[Any, Any], Tensor], scale: Any) -> FactoredMatrix:
        shape = list(scale.shape) if isinstance(scale, Tensor) else []
        if not isinstance(scale, int | float | Tensor) or (len(shape) > 1 and 1 not in shape[-2:]):
            raise TypeError(
                f"expected a number or a tensor of shape [... 1 1], [... m 1] or [... 1 n] to scale {self!r}, "
                f"got {f'shape {shape}' if shape else type(scale).__name__}"
            )
        return FactoredMatrix(*factors.scaled(self.A, self.B, operation, scale), self.note)

    # -- linear algebra -----------------------------------------------------------------------------------

    def svd(self) -> SVD:
        """Thin singular value decomposition: `U @ diag(S) @ Vh` is the matrix.

        QR of `A` and of `B.T`, then the SVD of the r × r core. With `k = min(m, n, r)`: U `[*batch m k]`,
        S `[*batch k]` descending, Vh `[*batch k n]`. Its gradient needs factors of full rank; that of
        `singular_values` and `norm` does not.
        """
        return spectrum.svd(*spectrum.raised(self.A, self.B))

    def singular_values(self) -> Float[Tensor, "*batch k"]:
        """The `k = min(m, n, r)` singular values, descending; several times faster than `svd`."""
        return spectrum.singular_values(*spectrum.raised(self.A, self.B))

    def eigenvalues(self) -> Complex[Tensor, "*batch k"]:
        """Eigenvalues of a square matrix, `k = min(r, m)` of them, complex, in no particular order.

        Where r < m they are those of the r × r matrix `B @ A`; the other m − r eigenvalues of the matrix are zero and
        are not returned.

        Raises:
            ValueError: the matrix is not square, or holds NaN or infinity.
        """
        self._require_square("eigenvalues")
        A, B = spectrum.raised(self.A, self.B)
        values: Tensor = torch.linalg.eigvals(finite_matrix(B @ A if self.mdim < self.ldim else A @ B))
        return values

    def trace(self) -> Float[Tensor, "*batch"]:
        """Sum of the diagonal, `Σ_ij A_ij B_ji`.

        Raises:
            ValueError: the matrix is not square.
        """
        self._require_square("trace")
        A, B = spectrum.raised(self.A, self.B)
        return (A * B.mT).sum((-2, -1))

    def norm(self) -> Float[Tensor, "*batch"]:
        """Frobenius norm, `√Σ M_ij²`."""
        return spectrum.frobenius_norm(*spectrum.raised(self.A, self.B))

    def rank(self, tol: float | None = None) -> Int[Tensor, "*batch"]:
        """Numerical rank: how many singular values s have `s > tol · s_1`; 0 for the zero matrix.

        Args:
            tol: relative to the largest singular value; by default `max(m, n) · eps`, with eps of the dtype that
                linear algebra is done in.
        """
        values = self.detach().singular_values()
        if tol is None:
            tol = max(self.ldim, self.rdim) * torch.finfo(values.dtype).eps
        return (values > tol * values[..., :1]).sum(-1)

    def _require_square(self, what: str) -> None:
        if self.ldim != self.rdim:
            raise ValueError(f"expected a square matrix for its {what}, got {self.ldim} × {self.rdim}: {self!r}")


def _joined(*notes: str) -> str:
    return "; ".join(dict.fromkeys(note for note in notes if note))
