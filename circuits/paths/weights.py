"""Paths from the weights alone, for attention-only models without norms.

There a path needs no run but its attention: its value is ``Π attention ⊗ matrix``, with a matrix from tokens to logits
that the weights alone decide: ``W_E W_U`` (bigrams), ``W_E W_OV W_U`` (skip-trigrams), ``W_E W_OV¹ W_OV² W_U``
(virtual heads). Scores expand likewise, by what the query and the key were made of. Source: Elhage et al. 2021.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.arguments import require_model
from circuits.components import AttnBias, Component, Embed, Head, PosEmbed, UnembedBias, ValueBias, as_head
from circuits.factored import FactoredMatrix
from circuits.finite import check_result
from circuits.layers import rotary_frequencies, rotary_tables, rotate
from circuits.model import HookedGPT
from circuits.validity import require_whole

MOST_PATHS = 100_000


@dataclass(frozen=True)
class WeightPath:
    """One path from a leaf through heads to the logits.

    Attributes:
        components: From the leaf to the last head.
        model: Whose weights; the matrix is built when asked for.
    """

    components: tuple[Component, ...]
    model: HookedGPT = field(repr=False, compare=False)

    @property
    def heads(self) -> tuple[Head, ...]:
        """The heads whose attention carries the path, the earliest first."""
        return _heads(self.components)

    def matrix(self) -> FactoredMatrix:
        """``leaf W_OV … W_OV W_U``, ``[rows d_vocab]``.

        The rows are tokens for the token embedding, positions for the positional one, and a single one for a bias.
        """
        if self.components == (UnembedBias(),):
            b_U = self.model.b_U.detach()
            return FactoredMatrix(b_U.new_ones(1, 1), b_U[None])
        rows, through = _through_heads(self.model, self.components)
        return _checked(self.model, FactoredMatrix(rows, through @ self.model.W_U.detach()))

    def __str__(self) -> str:
        return " → ".join(map(str, self.components))


@dataclass(frozen=True)
class ScorePath:
    """One term of a head's scores: a path to its query times a path to its key.

    Attributes:
        head: The head.
        query: From the leaf to the last head that writes what the query is made of; empty for the bias `b_Q`.
        key: The same for the key and `b_K`.
        model: Whose weights.
    """

    head: Head
    query: tuple[Component, ...]
    key: tuple[Component, ...]
    model: HookedGPT = field(repr=False, compare=False)

    def matrix(self, offset: int = 0) -> FactoredMatrix:
        """``x_query W_QK x_keyᵀ · scale`` with the leaves for x: scores, before any soft cap.

        Args:
            offset: Query position minus key position, which rotary models turn by.

        Raises:
            ValueError: An offset, for a model whose positions are not rotary.
        """
        config = self.model.config
        attn = self.model.blocks[self.head.layer].attn
        shared = self.head.head // config.group_size
        b_Q = None if attn.b_Q is None else attn.b_Q[self.head.head]
        b_K = None if attn.b_K is None else attn.b_K[shared]
        q = self._side(self.query, attn.W_Q[self.head.head], b_Q)
        k = self._side(self.key, attn.W_K[shared], b_K)
        if config.positions == "rotary":
            offset = require_whole("offset", offset, least=-(2**63))
            frequencies = rotary_frequencies(config).to(q.device)
            cos, sin = rotary_tables(frequencies, torch.tensor([offset], device=q.device), q.dtype)
            q = rotate(q, (cos[0, 0], sin[0, 0]), config.rotary_layout)
        elif offset:
            raise ValueError(f"positions are {config.positions!r}, so no score depends on an offset; got {offset}")
        return _checked(self.model, FactoredMatrix(q * config.attn_scale, k.mT))

    def _side(self, path: tuple[Component, ...], W: Tensor, bias: Tensor | None) -> Float[Tensor, "row d_head"]:
        if not path:
            assert bias is not None
            return bias.detach()[None]
        rows, through = _through_heads(self.model, path)
        return rows @ (through @ W.detach())

    def __str__(self) -> str:
        sides = (" → ".join(map(str, path)) or f"b_{kind}" for kind, path in (("Q", self.query), ("K", self.key)))
        return f"{self.head}: {' · '.join(sides)}"


@dataclass(frozen=True)
class VirtualHead:
    """Two heads that act as one.

    Attributes:
        first: The earlier head.
        second: The later head.
        ov: ``W_OV¹ W_OV²``, what the virtual head moves (its pattern is ``A² A¹``), ``[d_model d_model]``.
        query: ``W_OV¹ W_QK²``: the second head's query made from what the first moved.
        key: ``W_QK² W_OV¹ᵀ``: its key made from what the first moved.
    """

    first: Head
    second: Head
    ov: FactoredMatrix = field(repr=False)
    query: FactoredMatrix = field(repr=False)
    key: FactoredMatrix = field(repr=False)


def expand_weights(model: HookedGPT, max_heads: int | None = None) -> tuple[WeightPath, ...]:
    """Every path of an attention-only model without norms: ``logits = Σ_paths (Π attention) · matrix``.

    The leaves are the embeddings and every bias on the way; a value bias is carried by its head's attention row sums.

    Args:
        model: The model.
        max_heads: Leave out paths through more heads than this; a value bias's own head counts as one.

    Raises:
        ValueError: A model with MLPs or norms, whose paths depend on the run; more paths than can be listed.
    """
    require_model(model)
    check_weight_only(model)
    paths = [WeightPath(path, model) for path in _stream_paths(model, model.config.n_layers, max_heads)]
    if model.config.bias_unembed:
        paths.append(WeightPath((UnembedBias(),), model))
    return tuple(paths)


def expand_scores(model: HookedGPT, head: Head | str, max_heads: int | None = None) -> tuple[ScorePath, ...]:
    """Every term of a head's scores, by what its query and its key are made of (Q- and K-composition).

    ``scores[t, s] = Σ (attention to the query) (attention to the key) · matrix``.

    Raises:
        ValueError: As for `expand_weights`; or q/k norms, with which scores are no sum of terms.
        IndexError: A head that the model does not have.
    """
    require_model(model)
    check_weight_only(model)
    head = as_head(head, model.config)
    if model.config.qk_norm:
        raise ValueError("with q/k norms a head's scores are no sum of terms: the norms divide by what the run was")
    sides = list(_stream_paths(model, head.layer, max_heads))
    sides += [()] if model.config.bias_qkv else []
    if len(sides) ** 2 > MOST_PATHS:
        raise ValueError(f"{head} has {len(sides) ** 2:,} score terms, more than {MOST_PATHS:,}; give max_heads")
    return tuple(ScorePath(head, query, key, model) for query in sides for key in sides)


def virtual_head(model: HookedGPT, first: Head | str, second: Head | str) -> VirtualHead:
    """The circuits of two heads in a row, as factored matrices of the raw weights.

    Raises:
        ValueError: `second` is not in a later layer than `first`.
        IndexError: A head that the model does not have.
    """
    require_model(model)
    first, second = as_head(first, model.config), as_head(second, model.config)
    if first.layer >= second.layer:
        raise ValueError(f"{first} writes to the stream no earlier than {second} reads it: no virtual head")
    one, OV = model.OV[first.layer, first.head], model.OV[second.layer, second.head]
    QK = model.QK[second.layer, second.head]
    check_result(f"{first} or {second}", model, *(part for M in (one, OV, QK) for part in (M.A, M.B)))
    return VirtualHead(first, second, one @ OV, one @ QK, QK @ one.T)


def check_weight_only(model: HookedGPT) -> None:
    """Refuse a model whose paths depend on more of a run than its attention.

    Raises:
        ValueError: It has MLPs or norms.
    """
    config = model.config
    parts = [word for word, there in (("MLPs", config.has_mlp), (f"a {config.norm} norm", config.norm)) if there]
    if parts:
        raise ValueError(
            f"the weights alone decide no path of a model with {' and '.join(parts)}: the expansion of a run, "
            "circuits.paths.expand_paths, holds them fixed"
        )


def _stream_paths(model: HookedGPT, below: int, max_heads: int | None) -> list[tuple[Component, ...]]:
    """Every path into the stream before a layer."""
    config = model.config
    most = below if max_heads is None else require_whole("max_heads", max_heads, least=0)
    paths: list[tuple[Component, ...]] = [(Embed(),)] + ([(PosEmbed(),)] if config.positions == "learned" else [])
    for layer in range(below):
        heads = [Head(layer, head) for head in range(config.n_heads)]
        longer = [(*path, head) for path, head in itertools.product(paths, heads) if _n_heads(path) < most]
        if config.bias_qkv and most > 0:
            longer += [(ValueBias(layer, head.head),) for head in heads]
        paths += longer + ([(AttnBias(layer),)] if config.bias_out else [])
        if len(paths) > MOST_PATHS:
            raise ValueError(f"there are more than {MOST_PATHS:,} paths into layer {below}; give max_heads")
    return paths


def _checked(model: HookedGPT, matrix: FactoredMatrix) -> FactoredMatrix:
    check_result("the matrix of the path", model, matrix.A, matrix.B)
    return matrix


def _heads(path: tuple[Component, ...]) -> tuple[Head, ...]:
    """The heads that carry a path; a value bias is carried by its own."""
    own = tuple(Head(c.layer, c.head) for c in path[:1] if isinstance(c, ValueBias))
    return own + tuple(c for c in path if isinstance(c, Head))


def _n_heads(path: tuple[Component, ...]) -> int:
    return len(_heads(path))


def _through_heads(
    model: HookedGPT, path: tuple[Component, ...]
) -> tuple[Float[Tensor, "row inner"], Float[Tensor, "inner d_model"]]:
    """A leaf through heads as two factors, the inner one of d_head size where there is a head."""
    rows = _leaf(model, path[0])
    heads = _heads(path)
    if not heads:
        return rows, torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    W_V = [_value(model, head) for head in heads]
    W_O = [model.blocks[head.layer].attn.W_O[head.head].detach() for head in heads]
    if not isinstance(path[0], ValueBias):
        rows = rows @ W_V[0]
    through = W_O[-1]
    for write, read in zip(reversed(W_O[:-1]), reversed(W_V[1:]), strict=True):
        through = write @ read @ through
    return rows, through


def _value(model: HookedGPT, head: Head) -> Float[Tensor, "d_model d_head"]:
    return model.blocks[head.layer].attn.W_V[head.head // model.config.group_size].detach()


def _leaf(model: HookedGPT, leaf: Component) -> Float[Tensor, "row width"]:
    """The rows that a leaf can take: tokens, positions, or one for a bias (a value bias in its head's coordinates)."""
    if isinstance(leaf, Embed):
        return model.W_E.detach() * model.config.embed_scale
    if isinstance(leaf, PosEmbed):
        return model.W_pos.detach()
    if isinstance(leaf, AttnBias):
        return model.b_O[leaf.layer].detach()[None]
    assert isinstance(leaf, ValueBias)
    return model.b_V[leaf.layer, leaf.head].detach()[None]
