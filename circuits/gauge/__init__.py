"""The freedom in the factors of `W_QK` and `W_OV`: moving along it, choosing a point of it, and its dimension.

A head computes with the products ``W_QK = W_Q W_Kᵀ`` and ``W_OV = W_V W_O`` alone. ``W_Q → W_Q R``, ``W_K → W_K R⁻ᵀ``
leaves the first as it is, ``W_V → W_V R``, ``W_O → R⁻¹ W_O`` the second, with the biases along; so single columns of
these factors mean nothing before a choice is made. Under grouped-query attention the heads that share keys and values
share R.
"""

from __future__ import annotations

from circuits.gauge.canonical import canonical
from circuits.gauge.dimension import FibreDimension, fibre_dimension
from circuits.gauge.transform import transform_ov, transform_qk

__all__ = ["FibreDimension", "canonical", "fibre_dimension", "transform_ov", "transform_qk"]
