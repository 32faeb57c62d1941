"""`FactoredMatrix` behaves as the dense matrix `A @ B`, at the cost and with the accuracy of its factors."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from circuits.factored import FactoredMatrix

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BATCHES = [(), (4,), (2, 3), (0,)]
# (m, r, n): low rank, wide inner axis, inner size between the outer ones, square
SIZES = [(11, 3, 7), (3, 11, 7), (11, 7, 5), (7, 3, 7), (7, 11, 7)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def factored(
    *batch: int, m: int = 11, r: int = 3, n: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64, note: str = ""
) -> FactoredMatrix:
    return FactoredMatrix(
        random(*batch, m, r, seed=seed, dtype=dtype), random(*batch, r, n, seed=seed + 100, dtype=dtype), note
    )


def assert_equal(got: Any, expected: torch.Tensor) -> None:
    got = got.AB if isinstance(got, FactoredMatrix) else got
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


# -- what it is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_it_describes_the_dense_matrix(batch: tuple[int, ...]) -> None:
    F = factored(*batch)
    assert F.shape == F.AB.shape == (*batch, 11, 7)
    assert (F.ndim, F.dtype, F.device) == (F.AB.ndim, F.AB.dtype, F.AB.device)
    assert (F.ldim, F.mdim, F.rdim) == (11, 3, 7)
    assert_equal(F.T, F.AB.mT)
    assert_equal(F.mT, F.AB.mT)


def test_leading_axes_broadcast_and_a_shared_factor_is_not_copied() -> None:
    F = FactoredMatrix(random(11, 3), random(4, 2, 3, 7))
    assert F.shape == (4, 2, 11, 7)
    assert F.A.shape == (11, 3)
    assert_equal(F, F.A @ F.B)


def test_it_cannot_be_changed_and_equals_only_itself() -> None:
    F = factored()
    with pytest.raises(dataclasses.FrozenInstanceError):
        F.A = F.B  # type: ignore[misc]
    assert F == F
    assert factored() != F
    assert len({F, F.T}) == 2


def test_it_survives_copying_and_pickling() -> None:
    F = factored(2, note="Δ=0")
    for twin in (copy.deepcopy(F), pickle.loads(pickle.dumps(F))):
        assert_equal(twin, F.AB)
        assert twin.note == "Δ=0"


def test_the_repr_tells_shape_inner_size_dtype_and_note() -> None:
    F = factored(2, dtype=torch.float32, note="Δ=0")
    assert repr(F) == "FactoredMatrix(shape=[2, 11, 7], inner=3, float32, Δ=0)"
    assert repr(factored()) == "FactoredMatrix(shape=[11, 7], inner=3, float64)"
    assert "meta" in repr(F.to("meta"))


def test_every_operation_carries_the_note_along() -> None:
    F, G = factored(note="Δ=0"), factored(note="at frozen scales")
    for G_of_F in (F.T, F[1:], -F, 2 * F, F / 2, F.to(torch.float32), F.detach(), F @ random(7, 5), random(5, 11) @ F):
        assert G_of_F.note == "Δ=0"
    assert (F + G).note == "Δ=0; at frozen scales"
    assert (F + F).note == (F @ F.T).note == "Δ=0"


def test_to_and_detach_reach_both_factors() -> None:
    F = FactoredMatrix(random(7, 3).requires_grad_(), random(3, 5).requires_grad_())
    assert F.to(torch.bfloat16).dtype == torch.bfloat16
    assert F.to(torch.float32).B.requires_grad
    assert not F.detach().A.requires_grad
    assert not F.detach().B.requires_grad


# -- products ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_product_with_a_vector_is_a_vector(batch: tuple[int, ...]) -> None:
    F = factored(*batch)
    left, right = random(11), random(7)
    assert (left @ F).shape == (*batch, 7)
    assert (F @ right).shape == (*batch, 11)
    assert_equal(left @ F, left @ F.AB)
    assert_equal(F @ right, F.AB @ right)


@pytest.mark.parametrize("other", [(), (4,), (5, 1)], ids=str)
@pytest.mark.parametrize("columns", [1, 2, 13])
def test_products_with_matrices_stay_factored_and_equal_the_dense_product(other: tuple[int, ...], columns: int) -> None:
    F = factored(4)
    left, right = random(*other, columns, 11), random(*other, 7, columns)
    for product in (left @ F, F @ right):
        assert isinstance(product, FactoredMatrix)
        assert product.mdim == 3
    assert_equal(left @ F, left @ F.AB)
    assert_equal(F @ right, F.AB @ right)


sizes = st.integers(1, 6)


@given(sizes, sizes, sizes, sizes, sizes, st.sampled_from([(), (4,), (3, 1)]), st.sampled_from([(), (1,), (2, 3, 4)]))
def test_products_of_factored_matrices_have_the_smallest_inner_size(
    m: int, r: int, n: int, s: int, p: int, batch: tuple[int, ...], other: tuple[int, ...]
) -> None:
    F, G = factored(*batch, m=m, r=r, n=n), factored(*other, m=n, r=s, n=p, seed=1)
    assert (F @ G).mdim == min(r, n, s)
    assert_equal(F @ G, F.AB @ G.AB)


def test_no_product_forms_a_matrix_of_the_outer_size() -> None:
    wide = 100_000  # wide × wide would be 40 GB
    F = factored(m=wide, r=2, n=wide, dtype=torch.float32)
    assert (F @ F.T @ F).shape == (wide, wide)
    assert ((F + F) @ F).mdim == 2
    assert (F @ torch.ones(wide)).shape == (wide,)
    assert (F - F).norm() < 1e-5 * F.norm()
    assert F.rank() == 2
    assert F.eigenvalues().shape == (2,)
    assert F.trace().shape == ()


# -- sums and multiples -----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [(), (4,), (5, 1)], ids=str)
def test_sums_and_differences_stay_factored(other: tuple[int, ...]) -> None:
    F, G = factored(4), factored(*other, r=2, seed=1)
    for got, expected in ((F + G, F.AB + G.AB), (F - G, F.AB - G.AB), (G - F, G.AB - F.AB), (-F, -F.AB)):
        assert isinstance(got, FactoredMatrix)
        assert_equal(got, expected)
    assert (F + G).mdim == 5
    assert_equal(sum([F, F, G]), 2 * F.AB + G.AB)


def test_sums_with_a_tensor_are_dense() -> None:
    F, X = factored(4), random(5, 1, 11, 7)
    for got, expected in ((F + X, F.AB + X), (X + F, F.AB + X), (F - X, F.AB - X), (X - F, X - F.AB)):
        assert isinstance(got, torch.Tensor)
        assert_equal(got, expected)


@pytest.mark.parametrize(
    "shape", [(), (1,), (4, 1, 1), (5, 1, 1, 1), (11, 1), (4, 11, 1), (7,), (1, 7), (4, 1, 7)], ids=str
)
def test_scaling_by_a_tensor_is_that_of_the_dense_matrix(shape: tuple[int, ...]) -> None:
    F, t = factored(4), random(*shape)
    for got, expected in ((F * t, F.AB * t), (t * F, F.AB * t), (F / t, F.AB / t)):
        assert isinstance(got, FactoredMatrix)
        assert_equal(got, expected)


def test_scaling_by_a_number_keeps_the_dtype_and_by_a_tensor_promotes_as_pytorch_does() -> None:
    F = factored(4, dtype=torch.bfloat16)
    for scale in (2, 0.5, torch.tensor(3.0, dtype=torch.float64), torch.ones(4, 1, 1, dtype=torch.int64)):
        assert (F * scale).dtype == (scale * F).dtype == (F / scale).dtype == torch.bfloat16
    assert (F * random(4, 1, 1)).dtype == (F / random(1, 7)).dtype == torch.float64


# -- linear algebra ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("m", "r", "n"), SIZES)
def test_svd_puts_the_matrix_together_again_with_vh(batch: tuple[int, ...], m: int, r: int, n: int) -> None:
    F = factored(*batch, m=m, r=r, n=n)
    U, S, Vh = F.svd()
    k = min(m, r, n)
    assert (U.shape, S.shape, Vh.shape) == ((*batch, m, k), (*batch, k), (*batch, k, n))
    assert_equal((U * S.unsqueeze(-2)) @ Vh, F.AB)
    assert_equal(U.mT @ U, torch.eye(k, dtype=torch.float64).expand(*batch, k, k))
    assert_equal(Vh @ Vh.mT, torch.eye(k, dtype=torch.float64).expand(*batch, k, k))
    assert F.svd().Vh.shape == Vh.shape


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("m", "r", "n"), SIZES)
def test_spectra_are_those_of_the_dense_matrix(batch: tuple[int, ...], m: int, r: int, n: int) -> None:
    F = factored(*batch, m=m, r=r, n=n)
    k = min(m, r, n)
    assert_equal(F.singular_values(), torch.linalg.svdvals(F.AB)[..., :k])
    assert_equal(F.norm(), torch.linalg.matrix_norm(F.AB))
    assert F.rank().tolist() == torch.full(batch, k).tolist()
    if m == n:
        assert_equal(F.trace(), F.AB.diagonal(dim1=-2, dim2=-1).sum(-1))
        values = F.eigenvalues()
        assert (values.shape, values.dtype) == ((*batch, k), torch.complex128)
        powers = torch.stack([torch.linalg.matrix_power(F.AB, p).diagonal(dim1=-2, dim2=-1).sum(-1) for p in (1, 2, 3)])
        assert_equal(torch.stack([(values**p).sum(-1) for p in (1, 2, 3)]), powers.to(values.dtype))


def test_spectra_of_a_shared_factor_broadcast() -> None:
    F = FactoredMatrix(random(11, 3), random(4, 2, 3, 7))
    assert_equal(F.singular_values(), torch.linalg.svdvals(F.AB)[..., :3])
    assert_equal(F.norm(), torch.linalg.matrix_norm(F.AB))
    U, S, Vh = F.svd()
    assert_equal((U * S.unsqueeze(-2)) @ Vh, F.AB)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_algebra_is_done_in_float32_at_least(dtype: torch.dtype) -> None:
    F = factored(4, m=11, n=11, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exact = F.A.double() @ F.B.double()
    U, S, Vh = F.svd()
    for values in (U, S, Vh, F.singular_values(), F.norm(), F.trace()):
        assert values.dtype == wide
    assert F.eigenvalues().dtype == wide.to_complex()
    tol = {"atol": 1e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close((U * S.unsqueeze(-2)) @ Vh, exact, **tol)
    torch.testing.assert_close(F.singular_values(), torch.linalg.svdvals(exact)[..., :3], **tol)
    torch.testing.assert_close(F.norm(), torch.linalg.matrix_norm(exact), **tol)
    torch.testing.assert_close(F.trace(), exact.diagonal(dim1=-2, dim2=-1).sum(-1), **tol)
    assert F.rank().tolist() == [3] * 4
    assert (F.AB.dtype, (F @ F.T).dtype, F[0].dtype) == (dtype, dtype, dtype)


def test_small_singular_values_keep_the_accuracy_of_their_precision() -> None:
    """Spectrum 1 … 1e-6 in float32; a Gram matrix in float32 would be off by some per cent at the small end."""
    U, V, mix = (torch.linalg.qr(random(size, 8, seed=size)).Q for size in (40, 50, 8))
    known = torch.logspace(0, -6, 8, dtype=torch.float64)
    F = FactoredMatrix((U * known.sqrt() @ mix).float(), (mix.mT @ (V * known.sqrt()).mT).float())
    exact = torch.linalg.svdvals(F.A.double() @ F.B.double())[:8]
    for values in (F.singular_values(), F.svd().S):
        assert (values - exact).abs().max() < 1e-6
        assert ((values - exact).abs() / exact).max() < 1e-3
        assert abs(values[0] - exact[0]) / exact[0] < 1e-6
    assert F.rank() == 7  # 1e-6 is under 50 · eps, 7e-6 is over
    assert F.rank(tol=1e-3) == (known > 1e-3).sum()


def test_norm_of_a_difference_that_cancels_is_zero_to_rounding() -> None:
    F = factored(m=41, n=43, dtype=torch.float32)
    assert (F - F).norm() < 1e-5 * F.norm()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("m", "r", "n"), SIZES)
def test_the_zero_matrix_has_rank_and_norm_zero(m: int, r: int, n: int, dtype: torch.dtype) -> None:
    F = factored(2, m=m, r=r, n=n, dtype=dtype) * torch.tensor([0, 1], dtype=dtype)[:, None, None]
    assert F.rank().tolist() == [0, min(m, r, n)]
    assert F.norm()[0] == 0
    assert not F.singular_values()[0].any()


def test_empty_axes_are_allowed() -> None:
    for m, r, n in ((5, 0, 7), (0, 3, 7), (5, 3, 0)):
        F = factored(2, m=m, r=r, n=n)
        assert F.rank().tolist() == [0, 0]
        assert F.norm().tolist() == [0, 0]
        assert F.svd().S.shape == (2, 0)


# -- gradients --------------------------------------------------------------------------------------------

QUANTITIES = {
    "AB": lambda F: F.AB,
    "vector": lambda F: F @ torch.ones(5, dtype=torch.float64),
    "product": lambda F: (F @ F).AB,
    "sum": lambda F: (F + F.T * 2).AB,
    "singular_values": lambda F: F.singular_values(),
    "svd": lambda F: (F.svd().U * F.svd().S.unsqueeze(-2)) @ F.svd().Vh,
    "norm": lambda F: F.norm(),
    "trace": lambda F: F.trace(),
    "eigenvalues": lambda F: F.eigenvalues().abs().sort().values,
}


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("r", [2, 6])
def test_gradients_are_right_to_second_order(quantity: str, r: int) -> None:
    A, B = (
        random(2, 1, 5, r).requires_grad_(),
        random(3, r, 5, seed=1).requires_grad_(),
    )  # both are shared along an axis

    def of_factors(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return QUANTITIES[quantity](FactoredMatrix(A, B))

    assert torch.autograd.gradcheck(of_factors, (A, B))
    if quantity in ("singular_values", "norm"):
        assert torch.autograd.gradgradcheck(of_factors, (A, B))


def test_singular_values_and_norm_have_finite_gradients_where_factors_lack_rank() -> None:
    A, B = random(7, 3), random(3, 5)
    A[:, 0] = 0
    A[:, 2] = A[:, 1]
    for factor in (A, torch.zeros(7, 3, dtype=torch.float64)):
        factor = factor.clone().requires_grad_()
        F = FactoredMatrix(factor, B)
        for value in (F.norm(), F.singular_values().sum()):
            (grad,) = torch.autograd.grad(value, factor)
            assert grad.isfinite().all()
    A.requires_grad_()
    got = torch.autograd.grad(FactoredMatrix(A, B).singular_values()[0], A)
    expected = torch.autograd.grad(torch.linalg.svdvals(A @ B)[0], A)
    torch.testing.assert_close(got, expected)


# -- what is refused --------------------------------------------------------------------------------------

X32 = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("A", "B", "kind", "words"),
    [
        (X32, torch.zeros(5, 7), ValueError, ["inner 3", "inner 5"]),
        (torch.zeros(2, 4, 3), torch.zeros(5, 3, 7), ValueError, ["leading axes that broadcast", "[2]", "[5]"]),
        (torch.zeros(3), X32, ValueError, ["factor A of shape [*batch m r]", "[3]"]),
        (X32, torch.zeros(3), ValueError, ["factor B of shape [*batch r n]", "[3]"]),
        (X32.long(), torch.zeros(3, 7), TypeError, ["factor A", "torch.int64"]),
        (X32, torch.zeros(3, 7, dtype=torch.complex64), TypeError, ["factor B", "torch.complex64"]),
        (X32, torch.zeros(3, 7).double(), ValueError, ["one dtype", "torch.float32", "torch.float64"]),
        ([[1.0]], X32, TypeError, ["A"]),
    ],
    ids=str,
)
def test_factors_that_do_not_go_together_are_refused(A: Any, B: Any, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as error:
        FactoredMatrix(A, B)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("operation", "kind", "words"),
    [
        (lambda F: F.eigenvalues(), ValueError, "square matrix for its eigenvalues, got 11 × 7"),
        (lambda F: F.trace(), ValueError, "square matrix for its trace, got 11 × 7"),
        (lambda F: F.BA, ValueError, "square matrix for its B @ A, got 11 × 7"),
        (lambda F: F @ F, ValueError, "expected 7 rows"),
        (lambda F: F @ torch.ones(11), ValueError, "expected 7 rows"),
        (lambda F: torch.ones(3, 7) @ F, ValueError, "expected 11 columns"),
        (lambda F: torch.tensor(1.0) @ F, ValueError, "expected 11 columns"),
        (lambda F: F + F.T, ValueError, "one size"),
        (lambda F: F + 1, TypeError, "unsupported operand"),
        (lambda F: F @ 2, TypeError, "unsupported operand"),
        (lambda F: F * F, TypeError, "to scale"),
        (lambda F: F * torch.ones(11, 7), TypeError, "got shape [11, 7]"),
        (lambda F: (F * float("nan")).svd(), ValueError, "NaN or infinity at leading index [0]"),
        (lambda F: (F * float("inf")).singular_values(), ValueError, "finite entries"),
    ],
)
def test_what_means_nothing_is_refused(operation: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as error:
        operation(factored(4))
    assert words in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_eigenvalues_of_what_is_not_finite_are_refused(value):
    """Some builds of LAPACK end the whole process on a NaN; 1e30 overflows only in the product."""
    with pytest.raises(ValueError, match="finite entries"):
        FactoredMatrix(torch.full((5, 3), value), torch.full((3, 5), value)).eigenvalues()
