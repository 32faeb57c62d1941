"""A model's weights: those outside the blocks, and those of the blocks stacked over layers.

The views of one layer stand on its modules (``model.blocks[l].attn.W_Q``). What is stacked here is built on demand and
is a copy: writing into it changes nothing. Absent biases read as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuits import lens_names
from circuits.block import Blocks, TransformerBlock
from circuits.components import Head
from circuits.config import GPTConfig
from circuits.head_circuits import HeadCircuits
from circuits.products import linear


def stacked(parts: Sequence[Float[Tensor, "*shape"]]) -> Float[Tensor, " n *shape"]:
    """The parts along a new first axis (a copy), with the axes in memory as they were.

    A weight is stored ``[out in]`` and shown as ``[in out]``: copying it the other way round takes ten times as long,
    and QR, which works on columns, would turn it back.
    """
    if parts[0].ndim > 1 and parts[0].stride(-2) == 1:
        return torch.stack([part.mT for part in parts]).mT
    return torch.stack(list(parts))


class Unembedding(nn.Module):
    """`W_U` and `b_U`; the weight is absent where it is tied to the embedding's.

    Args:
        config: The architecture.
        embed: The token embedding, whose weight is used where the two are tied.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: GPTConfig, embed: nn.Embedding, **factory: Any) -> None:
        super().__init__()
        self._embed = (embed,)  # in a tuple: it is no part of this module, and its weight no second parameter
        shapes = {
            "weight": None if config.tie_embeddings else (config.d_vocab, config.d_model),
            "bias": (config.d_vocab,) if config.bias_unembed else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory)))

    @property
    def matrix(self) -> Float[Tensor, "d_vocab d_model"]:
        """The weight in use, its own or the embedding's."""
        return self._embed[0].weight if self.weight is None else self.weight

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        """``X W_U + b_U`` of a final stream that is normalised already: the logits before any soft cap."""
        return linear(x, self.matrix, self.bias)


def unfilled_embedding(rows: int, width: int, **factory: Any) -> nn.Embedding:
    """An embedding whose weight nobody draws: `nn.Embedding` does, which on the meta device loads torch's compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width, **factory))


class StackedWeights(nn.Module):
    """The weights of all layers, with DESIGN's names and shapes. `HookedGPT` is one."""

    config: GPTConfig
    embed: nn.Embedding
    pos_embed: nn.Embedding | None
    blocks: Blocks
    unembed: Unembedding

    # --- outside the blocks ---

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The token embedding (the parameter itself), before any `embed_scale`."""
        return self.embed.weight

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The positional embedding (the parameter itself)."""
        if self.pos_embed is None:
            raise AttributeError("W_pos")
        return self.pos_embed.weight

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding, a view of its parameter (of the embedding's, where they are tied)."""
        return self.unembed.matrix.T

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The unembedding bias; zeros where there is none."""
        bias = self.unembed.bias
        return self.embed.weight.new_zeros(self.config.d_vocab) if bias is None else bias

    # --- stacked over layers ---

    def _stack(self, get: Callable[[TransformerBlock], Tensor | None], *absent: int) -> Tensor:
        """One tensor per block, stacked; zeros of shape `absent` where a block has none."""
        parts = [get(block) for block in self.blocks]
        like = next(self.parameters())
        return stacked([like.new_zeros(absent) if part is None else part for part in parts])

    def _per_query_head(self, stacked: Tensor) -> Tensor:
        size = self.config.group_size
        return stacked if size == 1 else stacked.repeat_interleave(size, dim=1)

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Query weights: a copy, stacked. To change the model write into ``blocks[l].attn.W_Q``, a view."""
        return self._stack(lambda b: b.attn.W_Q)

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Key weights, gathered to the query heads (a copy)."""
        return self._per_query_head(self._stack(lambda b: b.attn.W_K))

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Value weights, gathered to the query heads (a copy)."""
        return self._per_query_head(self._stack(lambda b: b.attn.W_V))

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """Output weights (a copy)."""
        return self._stack(lambda b: b.attn.W_O)

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """Query biases (a copy); zeros where there are none."""
        return self._stack(lambda b: b.attn.b_Q, self.config.n_heads, self.config.d_head)

    @property
    def b_K(self) -> Float[Tensor, "layer head d_head"]:
        """Key biases, gathered to the query heads (a copy); zeros where there are none."""
        return self._per_query_head(self._stack(lambda b: b.attn.b_K, self.config.n_kv_heads, self.config.d_head))

    @property
    def b_V(self) -> Float[Tensor, "layer head d_head"]:
        """Value biases, gathered to the query heads (a copy); zeros where there are none."""
        return self._per_query_head(self._stack(lambda b: b.attn.b_V, self.config.n_kv_heads, self.config.d_head))

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """Output biases (a copy); zeros where there are none."""
        return self._stack(lambda b: b.attn.b_O, self.config.d_model)

    def __getattr__(self, name: str) -> Any:
        # Also reached when a property raises AttributeError: say why the weight is absent, not only that it is.
        if name in ("W_in", "W_gate", "W_out", "b_in", "b_out"):
            reason = "attn_only is True" if self.config.attn_only else "gated_mlp is False"
            raise AttributeError(f"this model has no {name}: {reason}")
        if name == "W_pos":
            raise AttributeError(f"this model has no W_pos: positions is {self.config.positions!r}")
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in lens_names.MODEL:
                raise
            raise AttributeError(lens_names.absent(type(self).__name__, name, lens_names.MODEL)) from None

    @property
    def all_head_labels(self) -> list[str]:
        """The text of every head, ``"L0H0"`` to the last, in the order of ``[layer head]``."""
        return [str(Head(layer, head)) for layer in range(self.config.n_layers) for head in range(self.config.n_heads)]

    def _mlps(self, what: str, *absent: int) -> Tensor:
        if self.config.attn_only or (what == "W_gate" and not self.config.gated_mlp):
            raise AttributeError(what)
        return self._stack(lambda b: getattr(b.mlp, what), *absent)

    @property
    def W_in(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """MLP input weights (a copy)."""
        return self._mlps("W_in")

    @property
    def W_gate(self) -> Float[Tensor, "layer d_model d_mlp"]:
        """MLP gate weights (a copy)."""
        return self._mlps("W_gate")

    @property
    def W_out(self) -> Float[Tensor, "layer d_mlp d_model"]:
        """MLP output weights (a copy)."""
        return self._mlps("W_out")

    @property
    def b_in(self) -> Float[Tensor, "layer d_mlp"]:
        """MLP input biases (a copy); zeros where there are none."""
        return self._mlps("b_in", self.config.d_mlp)

    @property
    def b_out(self) -> Float[Tensor, "layer d_model"]:
        """MLP output biases (a copy); zeros where there are none."""
        return self._mlps("b_out", self.config.d_model)

    @property
    def QK(self) -> HeadCircuits:
        """``W_QK = W_Q W_Kᵀ`` of every head, raw; of a rotary model, at offset 0 (see `HeadCircuits.at_offset`)."""
        return HeadCircuits(self, "QK", offset=0 if self.config.positions == "rotary" else None)

    @property
    def OV(self) -> HeadCircuits:
        """``W_OV = W_V W_O`` of every head, raw."""
        return HeadCircuits(self, "OV")

    @property
    def W_QK(self) -> HeadCircuits:
        """Another name of `QK`."""
        return self.QK

    @property
    def W_OV(self) -> HeadCircuits:
        """Another name of `OV`."""
        return self.OV
