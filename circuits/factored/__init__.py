"""A matrix of low rank, kept as the product of two thin factors."""

from __future__ import annotations

from circuits.factored.matrix import FactoredMatrix
from circuits.factored.spectrum import SVD

__all__ = ["SVD", "FactoredMatrix"]
