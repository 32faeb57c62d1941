"""Composition of every pair of heads."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.composition.cores import KINDS, Writers, head_readers, head_writers, scores
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.components import Head
from circuits.finite import check_finite
from circuits.folded import head_weights
from circuits.model import HookedGPT
from circuits.validity import require_whole


@result
class CompositionScores(Result):
    """How much of what each head writes is read by each later head.

    Attributes:
        score: ``[layer head layer2 head2]``: of head 1 (layer, head) into head 2; between 0 and 1. NaN where head 2 is
            not in a later layer, or one of the two is zero.
        excess: The score less the baseline.
        baseline: What is expected when one factor is rotated at random, ``1 / √d_model``.
        kind: ``"Q"``, ``"K"`` or ``"V"``: what head 2 makes of it.
        raw: Whether the bare weights were measured.
        note: What was read in.
    """

    table = ("score", "excess")
    score: Float[Tensor, "layer head layer2 head2"]
    excess: Float[Tensor, "layer head layer2 head2"]
    baseline: float
    kind: str
    raw: bool
    note: str

    def strongest(self, k: int) -> list[tuple[Head, Head, float]]:
        """The k pairs of heads that compose most, with their scores, the highest first."""
        k = require_whole("k", k, least=0)
        scores = self.score.flatten().nan_to_num(float("-inf"))
        values, places = scores.topk(min(k, int(scores.isfinite().sum())))
        index = torch.unravel_index(places, self.score.shape)
        pairs = zip(*(axis.tolist() for axis in index), values.tolist(), strict=True)
        return [(Head(layer, head), Head(layer2, head2), value) for layer, head, layer2, head2, value in pairs]

    def title(self) -> str:
        """What was measured, and the baseline."""
        return f"{self.kind}-composition of every pair of heads ({self.note}); by chance {self.baseline:.3g}"


@torch.no_grad()
def composition_scores(
    model: HookedGPT, kind: str | None = None, raw: bool = False, offset: int = 0
) -> CompositionScores:
    """Composition of head 1 into head 2, all pairs at once (Elhage et al. 2021).

    Q: ``‖W_OV¹ W_QK²‖_F``, K: ``‖W_OV¹ W_QK²ᵀ‖_F``, V: ``‖W_OV¹ W_OV²‖_F``, each over the product of the two Frobenius
        norms.
    With one factor rotated at random the root mean square of the score is ``1 / √d_model``, whatever the ranks; a score
    means something by what it has above that.

    The norms that heads read through are read in (see `circuits.folded`); post-norm models have theirs between writer
    and reader, where they are left out. Everything is done with d_head-sized factors: one product
    ``[heads·d_head, d_model] × [d_model, heads·d_head]`` for each pair of layers.

    Args:
        model: A model.
        kind: ``"Q"``, ``"K"`` or ``"V"``; there is no default, for each is another question.
        raw: Measure the bare weights.
        offset: Rotary models: query minus key position at which `W_QK` is taken.

    Raises:
        ValueError: No kind or an unknown one, an offset without rotary positions, or weights that are not finite
            (where first).
    """
    require_model(model)
    if kind is None:
        raise ValueError(f"say which composition: kind is one of {', '.join(map(repr, KINDS))}")
    if kind not in KINDS:
        raise ValueError(f"composition kind {kind!r} is not one of {', '.join(map(repr, KINDS))}")
    config = model.config
    layers, heads = config.n_layers, config.n_heads
    like = model.embed.weight.new_empty(0, dtype=torch.promote_types(model.dtype, torch.float32))
    score = like.new_full((layers, heads, layers, heads), float("nan"))
    # Writers of all layers in one tensor, so that those before a layer are one factor of one product.
    maps = like.new_empty(layers, heads, min(config.d_head, config.d_model), config.d_model)
    norms = like.new_empty(layers, heads)
    note = ""
    for layer in range(layers):
        weights = head_weights(model, raw, offset, layers=[layer])
        note = weights.note
        written, read = head_writers(weights), head_readers(weights, kind)
        if layer:
            earlier = Writers(maps[:layer].flatten(0, 1), norms[:layer].flatten())
            score[:layer, :, layer] = scores(earlier, read).unflatten(0, (layer, heads))
        maps[layer], norms[layer] = written.maps, written.norms
        if not bool((written.norms.isfinite() & read.norms.isfinite()).all()):
            check_finite(dict(model.named_parameters()))
    baseline = 1 / math.sqrt(config.d_model)
    return CompositionScores(score=score, excess=score - baseline, baseline=baseline, kind=kind, raw=raw, note=note)
