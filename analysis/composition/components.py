"""Composition of everything that writes to the stream with everything that reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.composition.cores import (
    KINDS,
    Readers,
    Writers,
    gram_root,
    head_readers,
    head_writers,
    readers,
    scores,
    writers,
)
from analysis.results import Label, Result, result
from circuits.arguments import require_model
from circuits.components import MLP, Component, Embed, Head, PosEmbed
from circuits.config import GPTConfig
from circuits.finite import check_finite, check_result
from circuits.folded import embedding, head_weights, mlp_weights, positional_embedding, unembedding
from circuits.model import HookedGPT

READS = (*KINDS, "mlp", "unembed")


@result
class ComponentComposition(Result):
    """How much of what each component writes is read by each reader after it.

    Attributes:
        score: NaN where the reader does not stand after the writer, or one of the two is zero.
        excess: The score less the baseline.
        writers: Embeddings, heads and MLPs.
        readers: Heads (for Q, K, V), MLPs, or ``"unembed"``.
        baseline: What is expected when one factor is rotated at random, ``1 / √d_model``.
        reads: ``"Q"``, ``"K"``, ``"V"``, ``"mlp"`` or ``"unembed"``.
        raw: Whether the bare weights were measured.
        note: What was read in.
    """

    table = ("score", "excess")
    score: Float[Tensor, "writer reader"]
    excess: Float[Tensor, "writer reader"]
    writers: tuple[Component, ...]
    readers: tuple[Label, ...]
    baseline: float
    reads: str
    raw: bool
    note: str

    def title(self) -> str:
        """What was measured, and the baseline."""
        return f"Composition of every writer into {self.reads} ({self.note}); by chance {self.baseline:.3g}"


class _Written(NamedTuple):
    components: list[Component]
    stage: int
    maps: Writers


class _Read(NamedTuple):
    labels: list[Label]
    stage: int
    maps: Readers


@torch.no_grad()
def component_composition(model: HookedGPT, reads: str, raw: bool = False, offset: int = 0) -> ComponentComposition:
    """``‖W M‖_F / (‖W‖_F ‖M‖_F)`` of every writer W and every reader M after it.

    Writers are `W_E`, `W_pos`, ``W_OV`` of heads and ``W_out`` of MLPs; readers ``W_QK``, ``W_QKᵀ``, ``W_OV`` of heads,
    ``W_in`` of MLPs (beside it ``W_gate``), and `W_U`. Source: Elhage et al. 2021, for pairs of heads.

    Args:
        model: A model.
        reads: ``"Q"``, ``"K"``, ``"V"``, ``"mlp"`` or ``"unembed"``.
        raw: Measure the bare weights.
        offset: Rotary models: query minus key position at which `W_QK` is taken.

    Raises:
        ValueError: Unknown `reads`, ``"mlp"`` of an attention-only model, an offset without rotary positions, or
            weights that are not finite (where first).
    """
    require_model(model)
    if reads not in READS:
        raise ValueError(f"reads {reads!r} is not one of {', '.join(map(repr, READS))}")
    if reads == "mlp" and model.config.attn_only:
        raise ValueError("reads 'mlp' needs MLPs, but the model is attention-only")
    written = list(_writers(model, raw))
    columns: list[Tensor] = []
    labels: list[Label] = []
    for read in _readers(model, reads, raw, offset):
        labels += read.labels
        parts = [
            scores(w.maps, read.maps)
            if w.stage < read.stage
            else read.maps.norms.new_full((len(w.components), len(read.labels)), float("nan"))
            for w in written
        ]
        columns.append(torch.cat(parts))
        if not bool(torch.isfinite(read.maps.norms).all() and all(w.maps.norms.isfinite().all() for w in written)):
            check_finite(dict(model.named_parameters()))
    score = torch.cat(columns, dim=1)
    baseline = 1 / math.sqrt(model.config.d_model)
    return ComponentComposition(
        score=score,
        excess=score - baseline,
        writers=tuple(component for w in written for component in w.components),
        readers=tuple(labels),
        baseline=baseline,
        reads=reads,
        raw=raw,
        note=head_weights(model, raw, offset, layers=[0]).note,
    )


def _stages(config: GPTConfig, layer: int) -> tuple[int, int]:
    """When attention and MLP of a layer read and write: the MLP later, unless both work at once."""
    return 2 * layer + 1, 2 * layer + (1 if config.parallel_blocks else 2)


def _writers(model: HookedGPT, raw: bool) -> Iterator[_Written]:
    config = model.config
    yield _Written([Embed()], 0, _one_writer(model, embedding(model, raw)))
    if config.positions == "learned":
        yield _Written([PosEmbed()], 0, _one_writer(model, positional_embedding(model, raw)))
    for layer in range(config.n_layers):
        attention, mlp = _stages(config, layer)
        heads: list[Component] = [Head(layer, head) for head in range(config.n_heads)]
        yield _Written(heads, attention, head_writers(head_weights(model, raw, layers=[layer])))
        if config.has_mlp:
            yield _Written([MLP(layer)], mlp, _one_writer(model, mlp_weights(model, layer, raw)[1]))


def _readers(model: HookedGPT, reads: str, raw: bool, offset: int) -> Iterator[_Read]:
    config = model.config
    if reads == "unembed":
        yield _Read(["unembed"], 2 * config.n_layers + 1, _one_reader(model, unembedding(model, raw)))
        return
    for layer in range(config.n_layers):
        attention, mlp = _stages(config, layer)
        if reads == "mlp":
            yield _Read([MLP(layer)], mlp, _one_reader(model, mlp_weights(model, layer, raw)[0]))
        else:
            weights = head_weights(model, raw, offset, layers=[layer])
            labels: list[Label] = [Head(layer, head) for head in range(config.n_heads)]
            yield _Read(labels, attention, head_readers(weights, reads))


def _one_writer(model: HookedGPT, W: Float[Tensor, "n d_model"]) -> Writers:
    check_result("a map to the stream", model, W)
    return writers(_reduced(W)[None])


def _one_reader(model: HookedGPT, M: Float[Tensor, "d_model n"]) -> Readers:
    check_result("a map from the stream", model, M)
    return readers(_reduced(M.mT).mT[None])


def _reduced(tall: Float[Tensor, "n d_model"]) -> Float[Tensor, "k d_model"]:
    return gram_root(tall) if len(tall) > tall.shape[1] else tall
