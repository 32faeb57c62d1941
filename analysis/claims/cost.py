"""Section 6 of the lecture: computational cost."""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from analysis.accounting import crossover_length, flops
from analysis.claims.claim import Finding, above, claim, measurement, within
from analysis.claims.subject import Subject
from circuits.names import block_names

_TOKENS = 8


@claim(
    "6.cost",
    "Section 6",
    "A pass costs O(LTd²) for projections and MLPs and O(LT²d) for scores and aggregation.",
    "operations counted by PyTorch minus the closed form, at two lengths",
)
def cost(on: Subject) -> Finding:
    """Projections ``8 L T d²`` and MLPs ``16 L T d²`` operations (a multiply-add counts two), scores and aggregation
    ``4 L T² d``, the unembedding ``2 T d V``; for other shapes see `analysis.accounting.flops`.

    The matrix products of a real pass are counted at two lengths: the closed form must give both exactly, so that the
    linear and the quadratic part are each right.
    """
    config = on.model.config
    scores = [block_names(layer).scores for layer in range(config.n_layers)]
    off_by, shown = 0, []
    for length in sorted({min(_TOKENS, config.n_ctx), max(1, min(_TOKENS, config.n_ctx) // 2)}):
        tokens = torch.zeros(1, length, dtype=torch.long, device=on.model.device)
        with FlopCounterMode(display=False) as counter:
            on.model.run_with_hooks(tokens, fwd_hooks=[(scores, lambda activation, hook: None)])
        off_by += abs(counter.get_total_flops() - flops(config, tokens=length).total)
        shown.append(f"{counter.get_total_flops():,} at T = {length}")
    return within(float(off_by), 0.0, ", ".join(shown))


@claim(
    "6.dominance",
    "Section 6",
    "The attention term becomes dominant when T is large relative to d.",
    "share of scores and aggregation at ten times the crossover length",
)
def dominance(on: Subject) -> Finding:
    """``4 L T² H d_head`` passes all other work at ``T* = (other work per token) / (4 L H d_head)``; with the lecture's
    conventions ``T* = 6 d + V / (2 L)``. Far above T*, at 10 T*, the share must be near 10/11; at T*/10, near 1/11.
    """
    config = on.model.config
    crossover = crossover_length(config)
    share = {x: float(flops(config, tokens=max(1, round(x * crossover))).share[1]) for x in (0.1, 1, 10)}
    note = f"T* = {crossover:,.0f} = {crossover / config.d_model:.1f} d; at n_ctx = {config.n_ctx:,} the share is "
    return above(share[10], 0.5, note + f"{float(flops(config).share[1]):.1%}")


@claim(
    "6.1",
    "Rule-of-thumb aside 6.1",
    "Training costs about 6 · (non-embedding parameters) · (tokens) operations.",
    "6·N·D over the exact operations of a training step at n_ctx",
)
def rule_of_thumb(on: Subject) -> Finding:
    """``6 N D``: two operations for each weight and token forward, twice that backward. N may hold the unembedding or
    not, and the T² work of attention is left out; exercise 8 says where that matters.
    """
    counted = flops(on.model.config, training=True)
    ratios = [rule / counted.total for rule in (counted.rule_without_unembedding, counted.rule_with_unembedding)]
    note = f"{ratios[1]:.3f} with the unembedding in N; n_ctx = {counted.tokens:,}"
    return measurement(ratios[0] if math.isfinite(ratios[0]) else math.nan, note)
