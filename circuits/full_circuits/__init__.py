"""Full circuits: what a head does from token to token, as factored matrices over the vocabulary (Elhage et al. 2021).

The full QK circuit ``W_E W_QK W_Eᵀ`` says which token attends to which, the full OV circuit ``W_E W_OV W_U`` what
attending to a token does to the logits. Both are d_vocab × d_vocab and of rank d_head at most; they are never
multiplied out.
"""

from __future__ import annotations

from circuits.full_circuits.circuit import FullCircuit, full_ov, full_qk
from circuits.full_circuits.directions import SingularDirections, singular_directions
from circuits.full_circuits.entries import TopEntries, top_entries

__all__ = [
    "FullCircuit",
    "SingularDirections",
    "TopEntries",
    "full_ov",
    "full_qk",
    "singular_directions",
    "top_entries",
]
