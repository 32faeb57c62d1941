"""What travels beside the stream in one forward pass: the tap, the positions, who may see whom, and earlier keys.

Blocks take a `Run` and know nothing else about the pass they are part of; generation and the recomputation of a suffix
are the same blocks with another `Run`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.config import GPTConfig
from circuits.hooks import NO_TAP, Tap
from circuits.layers import rotary_frequencies, rotary_tables

Window = int | None


@runtime_checkable
class Past(Protocol):
    """Keys and values of positions before those of the pass."""

    def extend(
        self, layer: int, k: Float[Tensor, "batch pos kv_head d_head"], v: Float[Tensor, "batch pos kv_head d_head"]
    ) -> tuple[Float[Tensor, "batch key kv_head d_head"], Float[Tensor, "batch key kv_head d_head"]]:
        """The keys and values of every position so far, ending with the given ones."""
        ...


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys each query may see.

    Attributes:
        allowed: True where query may see key.
        blind: True for queries that see nothing (padding on the left); None where every query sees something.
    """

    allowed: Bool[Tensor, "#batch 1 query key"]
    blind: Bool[Tensor, "#batch 1 query 1"] | None

    @property
    def sdpa_mask(self) -> Bool[Tensor, "#batch 1 query key"]:
        """`allowed`, but a blind query sees everything: its output is discarded, and a softmax of nothing is NaN."""
        return self.allowed if self.blind is None else self.allowed | self.blind


@runtime_checkable
class Spread(Protocol):
    """How sequences that stand end to end are laid out as a batch for their attention, and back."""

    @property
    def run(self) -> Run:
        """The attention's own pass over that batch."""
        ...

    def out(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch pos head d_head]`` from those of the single row."""
        ...

    def back(self, z: Tensor) -> Tensor:
        """`z` of the single row, from that of the batch."""
        ...


@dataclass(frozen=True)
class Run:
    """One forward pass beside its stream.

    Attributes:
        positions: Position of each token, as the embeddings and rotations count it.
        rotary: Cosine and sine tables of these positions, or None.
        key_mask: True for keys that are tokens, False for padding; None where all are tokens.
        n_past: How many positions `past` holds.
        tap: Where named activations are shown and changed.
        past: Earlier keys and values, or None.
        read: Indices of the positions that anybody still reads after the attention of this pass; None: all of them.
            Keys and values are made from every position, queries and whatever follows from these alone.
        queries: Where each query stands among the keys; None: from `n_past` on, one for each position.
        parts: Runs whose sequences stand end to end in the single row of this one. Only attention tells them apart.
        spread: The same sequences as one batch, each over all positions, for one attention in place of one for each
            part; None where that is not to be.
    """

    positions: Int[Tensor, "#batch pos"]
    rotary: tuple[Tensor, Tensor] | None
    key_mask: Bool[Tensor, "batch key"] | None = None
    n_past: int = 0
    tap: Tap = NO_TAP
    past: Past | None = None
    read: Int[Tensor, " query"] | None = None
    queries: Int[Tensor, "#batch query"] | None = None
    parts: tuple[Run, ...] = ()
    spread: Spread | None = None
    _seen: dict[Window, Visibility] = field(default_factory=dict, repr=False)

    def plain_causal(self, window: Window) -> bool:
        """Whether a query sees exactly the keys up to its own position, so that no mask need be formed."""
        n = self.positions.shape[-1]
        causal = self.n_past == 0 and self.queries is None
        return causal and self.key_mask is None and (window is None or window >= n)

    def wanted(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch query d_model"]:
        """Those positions of `x` that are read after the attention."""
        return x if self.read is None else x[:, self.read]

    @property
    def query_rotary(self) -> tuple[Tensor, Tensor]:
        """The tables of the positions whose queries are made."""
        assert self.rotary is not None
        cos, sin = self.rotary
        return (cos, sin) if self.read is None else (cos[:, self.read], sin[:, self.read])

    def unpacked(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each of `parts`, ``[batch pos head d_head]``, from those of the single row."""
        keys = [part.positions.shape for part in self.parts]
        queries = [part.positions.shape if part.queries is None else part.queries.shape for part in self.parts]
        return list(zip(_split(q, queries), _split(k, keys), _split(v, keys), strict=True))

    def visibility(self, window: Window) -> Visibility:
        """Who sees whom under this window; formed once a pass for each window."""
        if window not in self._seen:
            self._seen[window] = self._visibility(window)
        return self._seen[window]

    def _visibility(self, window: Window) -> Visibility:
        device = self.positions.device
        n_keys = self.n_past + self.positions.shape[-1]
        key = torch.arange(n_keys, device=device)
        query = key[self.n_past :, None] if self.queries is None else self.queries[:, None, :, None]
        allowed = key <= query
        allowed = allowed[None, None] if allowed.ndim == 2 else allowed
        if window is not None:
            allowed = allowed & (key > query - window)
        if self.key_mask is None:
            return Visibility(allowed, None)
        allowed = allowed & self.key_mask[:, None, None, :]
        return Visibility(allowed, ~allowed.any(-1, keepdim=True))


def _split(x: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    if len(shapes) == 1:
        return [x[0].unflatten(0, shapes[0])]
    pieces = x[0].split([rows * pos for rows, pos in shapes])
    return [piece.unflatten(0, shape) for piece, shape in zip(pieces, shapes, strict=True)]


def token_positions(
    batch: int, pos: int, attention_mask: Bool[Tensor, "batch key"] | None, device: torch.device
) -> Int[Tensor, "#batch key"]:
    """Positions counted over real tokens, so that padding on either side shifts nothing; padding in front has 0."""
    if attention_mask is None:
        return torch.arange(pos, device=device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)


def make_run(
    config: GPTConfig,
    positions: Int[Tensor, "#batch pos"],
    dtype: torch.dtype,
    *,
    key_mask: Bool[Tensor, "batch key"] | None = None,
    n_past: int = 0,
    tap: Tap = NO_TAP,
    past: Past | None = None,
) -> Run:
    """A `Run` with the rotary tables that the architecture needs."""
    rotary = None
    if config.positions == "rotary":
        rotary = rotary_tables(rotary_frequencies(config).to(positions.device), positions, dtype)
    return Run(positions, rotary, key_mask, n_past, tap, past)
