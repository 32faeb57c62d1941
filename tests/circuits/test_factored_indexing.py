"""`F[index]` is `F.AB[index]`, for every index that a tensor takes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from circuits.factored import FactoredMatrix


def factored(*batch: int, m: int = 7, r: int = 3, n: int = 5) -> FactoredMatrix:
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(*batch, m, r, generator=generator, dtype=torch.float64)
    return FactoredMatrix(A, torch.randn(*batch, r, n, generator=generator, dtype=torch.float64), note="Δ=0")


def dense(value: Any) -> torch.Tensor:
    return value.AB if isinstance(value, FactoredMatrix) else value


def assert_indexes_like_dense(F: FactoredMatrix, index: Any) -> None:
    """Same values and shape; and where the dense tensor refuses, the same refusal."""
    try:
        expected = F.AB[index]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            F[index]
        return
    part = F[index]
    assert part.shape == expected.shape, index
    torch.testing.assert_close(dense(part), expected, atol=1e-12, rtol=0)


def entries(size: int) -> st.SearchStrategy[Any]:
    """What may stand at one axis; now and then out of range."""
    position = st.integers(-size, size - 1)
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.one_of(
        position,
        st.integers(-size - 1, size),
        st.builds(slice, bound, bound, st.none() | st.integers(1, 3)),
        st.lists(position, max_size=4),
        st.lists(position, min_size=2, max_size=2).map(torch.tensor),
        st.lists(position, min_size=2, max_size=2).map(lambda p: torch.tensor(p)[:, None]),
        st.lists(st.booleans(), min_size=size, max_size=size).map(torch.tensor),
        position.map(torch.tensor),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[FactoredMatrix, Any]:
    batch = draw(st.sampled_from([(), (4,), (4, 2)]))
    shape = (*batch, 7, 5)
    kept = draw(st.integers(0, len(shape)))
    index = [draw(entries(size)) for size in shape[:kept]]
    if draw(st.booleans()):  # the rest of the entries belong to the last axes
        tail = draw(st.integers(0, kept))
        index = index[: kept - tail] + [Ellipsis] + [draw(entries(size)) for size in shape[len(shape) - tail :]]
    for extra in draw(st.lists(st.sampled_from([None, None, True, False, Ellipsis]), max_size=2)):
        index.insert(draw(st.integers(0, len(index))), extra)
    return factored(*batch), tuple(index)


@settings(max_examples=200)
@given(cases())
def test_any_index_gives_what_the_dense_matrix_gives(case: tuple[FactoredMatrix, Any]) -> None:
    F, index = case
    if sum(item is Ellipsis for item in index) > 1:  # PyTorch reads two in its own way; NumPy and we refuse
        with pytest.raises(IndexError):
            F[index]
        return
    assert_indexes_like_dense(F, index)


MATRIX_INDICES = [
    (2,),
    (-1, 0),
    (slice(1, 3),),
    (slice(None, None, 2), 1, slice(-4, None, 2), slice(1, -1)),
    ([3, 0, 3],),
    ([3, 0], [1, 0]),
    (torch.tensor([[3, 0], [1, 1]]),),
    (torch.tensor([True, False, True, True]),),
    (torch.ones(4, 2, dtype=torch.bool),),
    (Ellipsis, [6, 0, 0], slice(None)),
    (Ellipsis, slice(2, 5), torch.tensor([4, -1])),
    (None, Ellipsis),
    (1, None, 0),
    (Ellipsis, torch.arange(7) > 3, slice(None)),
    (True,),
    (),
]


@pytest.mark.parametrize("index", MATRIX_INDICES, ids=str)
def test_a_part_that_is_still_rows_and_columns_stays_factored_and_keeps_its_note(index: tuple[Any, ...]) -> None:
    F = factored(4, 2)
    part = F[index]
    assert isinstance(part, FactoredMatrix)
    assert (part.mdim, part.note) == (3, "Δ=0")
    assert_indexes_like_dense(F, index)


DENSE_INDICES = [
    (0, 1, 3),
    (0, 1, 3, 4),
    (Ellipsis, -1),
    (Ellipsis, -1, slice(None)),
    (Ellipsis, None),
    (Ellipsis, slice(None), None, slice(None)),
    (Ellipsis, [1, 2], [3, 4]),
    (Ellipsis, torch.tensor([[1], [2]]), torch.tensor([0, 3, 4])),
    ([0, 3], slice(None), [1, 6]),
    ([0, 3], 1, slice(None), [1, 2]),
    (torch.tensor([[0], [3]]), 1, slice(None), [1, 2, 4]),
    (Ellipsis, torch.eye(7, 5, dtype=torch.bool)),
    (Ellipsis, torch.tensor([[1, 2], [3, 4]]), slice(None)),
    (True, Ellipsis, [1, 2], slice(None)),
    (False, Ellipsis, 2),
]


@pytest.mark.parametrize("index", DENSE_INDICES, ids=str)
def test_any_other_part_is_the_dense_tensor(index: tuple[Any, ...]) -> None:
    F = factored(4, 2)
    assert isinstance(F[index], torch.Tensor)
    assert_indexes_like_dense(F, index)


@pytest.mark.parametrize("index", [2, [1, 0], [True, False, True, False], range(2), np.int64(1), np.array([0, 3])])
def test_an_index_without_a_tuple_is_taken_as_pytorch_takes_it(index: Any) -> None:
    assert_indexes_like_dense(factored(4), index)


@pytest.mark.parametrize("step", [0, -1])
def test_a_slice_that_pytorch_refuses_is_refused(step: int) -> None:
    for index in (slice(None, None, step), (..., slice(None, None, step)), (0, slice(None, None, step), 1)):
        assert_indexes_like_dense(factored(4), index)


def test_the_last_row_and_column_are_those_of_the_dense_matrix() -> None:
    F = factored()
    torch.testing.assert_close(F[-1], F.AB[-1])
    torch.testing.assert_close(F[:, -1], F.AB[:, -1])
    torch.testing.assert_close(F[-1:].AB, F.AB[-1:])
    torch.testing.assert_close(F[..., -1:].AB, F.AB[..., -1:])


def test_leading_axes_of_only_one_factor_are_indexed_too() -> None:
    A, B = torch.randn(4, 1, 7, 3), torch.randn(2, 3, 5)
    F = FactoredMatrix(A, B)
    assert F.shape == (4, 2, 7, 5)
    torch.testing.assert_close(F[3, 1].AB, (A @ B)[3, 1])
    torch.testing.assert_close(F[:, 1, -1], (A @ B)[:, 1, -1])


def test_slices_are_views_of_the_factors() -> None:
    F = factored(4)
    assert F[2, 1:].A.data_ptr() == F.A[2, 1:].data_ptr()


def test_one_entry_of_a_huge_matrix_does_not_form_it() -> None:
    F = FactoredMatrix(torch.ones(200_000, 2), torch.ones(2, 200_000))
    assert F[-1, -1] == 2
    assert F[[5, 7], [0, 199_999]].tolist() == [2, 2]
    assert F[torch.arange(3)[:, None], torch.arange(4)].shape == (3, 4)
    assert F[:, 3].shape == (200_000,)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (4, "index 4 is out of range for axis 0 of a FactoredMatrix of shape [4, 7, 5]: expected -4 to 3"),
        ((0, -8), "index -8 is out of range for axis 1 (rows)"),
        ((..., [0, 5]), "index 5 is out of range for axis 2 (columns)"),
        ((0, 0, 0, 0), "too many indices"),
        ((..., 0, ...), "only one ellipsis"),
        (torch.tensor([True, False]), "expected a mask of shape [4]"),
        ((..., [0, 1], [0, 1, 2]), "broadcast together, got shapes [[2], [3]]"),
        (torch.tensor([0.0]), "dtype int64, int32 or bool, got torch.float32"),
        (1.5, "int64, int32 or bool"),
        ("head", "got 'head'"),
        ([0, None], "got list"),
    ],
    ids=str,
)
def test_an_index_that_cannot_mean_anything_is_refused_by_name(index: Any, words: str) -> None:
    with pytest.raises(IndexError) as error:
        factored(4)[index]
    assert words in str(error.value)


@example((4,))
@given(st.sampled_from([(), (4,), (4, 2)]))
def test_iterating_gives_the_entries_along_the_first_axis(batch: tuple[int, ...]) -> None:
    F = factored(*batch)
    parts = list(F)
    assert len(parts) == len(F) == F.shape[0]
    torch.testing.assert_close(torch.stack([dense(part) for part in parts]), F.AB)


def test_gradients_flow_through_an_index() -> None:
    A, B = torch.randn(4, 7, 3, requires_grad=True), torch.randn(4, 3, 5, requires_grad=True)
    F = FactoredMatrix(A, B)
    index = ([0, 3], slice(None), [1, 2])
    got = torch.autograd.grad(F[index].square().sum(), [A, B])
    expected = torch.autograd.grad((A @ B)[index].square().sum(), [A, B])
    torch.testing.assert_close(got, expected)
