"""Equality at float64 rounding, quick where it holds and telling where it does not."""

from __future__ import annotations

import torch

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def assert_exact(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same shape, same type, and equal to 1e-10 (infinities where infinities are expected, NaN nowhere)."""
    same_kind = actual.shape == expected.shape and actual.dtype == expected.dtype
    if same_kind and torch.allclose(actual, expected, **EXACT):
        return
    torch.testing.assert_close(actual, expected, **EXACT, msg=lambda text: f"{what}: {text}" if what else text)
    raise AssertionError(f"{what}: {actual} is not {expected}")
