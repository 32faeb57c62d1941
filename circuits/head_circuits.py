"""`W_QK` and `W_OV` of every head as factored matrices, raw, one head at a time without stacking the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.config import GPTConfig
from circuits.factored import FactoredMatrix
from circuits.layers import rotary_frequencies, rotary_tables, rotate
from circuits.validity import require_whole

if TYPE_CHECKING:
    from circuits.weights import StackedWeights


def turned(
    W_Q: Float[Tensor, "*batch d_model d_head"], config: GPTConfig, offset: int | None
) -> Float[Tensor, "*batch d_model d_head"]:
    """``W_Q R(Δ)``: query weights turned by the offset Δ = query position − key position, as rotary positions do."""
    if not offset:
        return W_Q
    frequencies = rotary_frequencies(config).to(W_Q.device)
    cos, sin = rotary_tables(frequencies, torch.tensor([offset], device=W_Q.device), W_Q.dtype)
    return rotate(W_Q, (cos[0, 0], sin[0, 0]), config.rotary_layout)


class HeadCircuits:
    """`W_QK` or `W_OV` of every head: a `FactoredMatrix` with leading axes ``[layer head]``, stacked only when needed.

    ``model.OV[2, 3]`` is one head and touches no other weight; any other index, and every other attribute of a
    `FactoredMatrix`, works on the stacked whole.

    Attributes:
        kind: ``"QK"`` or ``"OV"``.
        offset: Query position minus key position, for the QK of a rotary model; None elsewhere.
    """

    def __init__(self, model: StackedWeights, kind: Literal["QK", "OV"], offset: int | None = None) -> None:
        self._model = model
        self.kind = kind
        self.offset = offset

    def at_offset(self, offset: int) -> HeadCircuits:
        """The QK circuit ``W_Q R(Δ) W_Kᵀ`` between positions Δ = query − key apart.

        Raises:
            TypeError: An offset that is no whole number.
            ValueError: Not the QK circuit of a rotary model, which alone depends on an offset.
        """
        if self.offset is None:
            raise ValueError(
                f"{self.kind} of a model with positions {self._model.config.positions!r} depends on no offset"
            )
        return HeadCircuits(self._model, self.kind, require_whole("offset", offset, least=-(2**63)))

    @property
    def note(self) -> str:
        """What the matrices leave out of the scores, for the reader of a repr."""
        notes = [] if self.offset is None else [f"rotary offset Δ={self.offset}"]
        if self.kind == "QK" and self._model.config.qk_norm:
            notes.append("q/k norms not applied")
        return ", ".join(notes)

    def head(self, layer: int, head: int) -> FactoredMatrix:
        """One head's matrix ``[d_model d_model]``.

        Raises:
            IndexError: A layer or head that the model does not have.
        """
        config = self._model.config
        for axis, index, size in (("layer", layer, config.n_layers), ("head", head, config.n_heads)):
            if not -size <= index < size:
                raise IndexError(f"{axis} {index} is not in a model of {size} {axis}s (0 to {size - 1})")
        head %= config.n_heads
        attn = self._model.blocks[layer].attn
        shared = head // config.group_size
        if self.kind == "OV":
            return FactoredMatrix(attn.W_V[shared], attn.W_O[head])
        return FactoredMatrix(turned(attn.W_Q[head], config, self.offset), attn.W_K[shared].mT, note=self.note)

    def stacked(self) -> FactoredMatrix:
        """All heads at once, ``[layer head d_model d_model]`` as factors (copies of the weights)."""
        model = self._model
        if self.kind == "OV":
            return FactoredMatrix(model.W_V, model.W_O)
        return FactoredMatrix(turned(model.W_Q, model.config, self.offset), model.W_K.mT, note=self.note)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) >= 2 and all(type(i) is int for i in index[:2]):
            one = self.head(index[0], index[1])
            return one[index[2:]] if len(index) > 2 else one
        return self.stacked()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying, pickling and notebooks look for; a factored matrix has none of it
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.stacked(), name)

    def __matmul__(self, other: Any) -> Any:
        return self.stacked() @ (other.stacked() if isinstance(other, HeadCircuits) else other)

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.stacked()

    def __repr__(self) -> str:
        config = self._model.config
        shape = [config.n_layers, config.n_heads, config.d_model, config.d_model]
        note = f", {self.note}" if self.note else ""
        return f"{self.kind}({shape} through d_head {config.d_head}, raw weights{note})"
