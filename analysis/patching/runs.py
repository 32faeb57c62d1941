"""The two runs of a pair: the one that is patched, and the one whose activations are put into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.metrics import KL, Loss, Metric, Prompts, kl_divergence
from analysis.patching.pairs import Pair, Prompted
from analysis.readings import NextTokens, ReadMetric
from circuits.model import HookedGPT
from circuits.rerun.clean import Clean, clean_pass

PATCHED_FROM = "the run patched from"


def both_runs(model: HookedGPT, pair: Pair, names: Iterable[str]) -> tuple[Clean, Clean]:
    """The base and the source run with some activations, in one pass where their shapes allow it."""
    base, source, wanted = pair.base, pair.source, frozenset(names)
    if base.tokens.shape != source.tokens.shape:
        return clean_pass(model, base.tokens, base.mask, wanted), clean_pass(model, source.tokens, source.mask, wanted)
    tokens, batch = torch.cat([base.tokens, source.tokens]), len(base.tokens)
    mask = None if base.mask is None and source.mask is None else torch.cat([_real(base), _real(source)])
    joint = clean_pass(model, tokens, mask, wanted)
    return joint.select_batch(slice(batch)), joint.select_batch(slice(batch, None))


def _real(side: Prompted) -> Tensor:
    return torch.ones_like(side.tokens, dtype=torch.bool) if side.mask is None else side.mask


def reader_of(metric: Metric, pair: Pair) -> ReadMetric:
    """How a run laid out like the base is measured: a loss is that of predicting the clean prompts' tokens.

    The activations after the n-th clean token predict the clean token after it, wherever the run came from; so all
    three runs (unpatched, patched, patched from) are judged by the same answers, over the positions that both have.
    """
    return ReadMetric(metric, _clean_successors(pair) if isinstance(metric, Loss) else None)


def _clean_successors(pair: Pair) -> NextTokens:
    """For each cell of the base but the last the clean token that follows what it stands for."""
    clean, own = pair.clean, pair.clean is pair.base
    columns = torch.arange(pair.column.shape[1], device=pair.column.device).expand_as(pair.column)
    after = (columns if own else pair.column)[:, :-1] + 1
    inside = after < clean.tokens.shape[1]
    after = after.clamp(max=clean.tokens.shape[1] - 1)
    real = inside & _real(clean).gather(1, after)
    return NextTokens(clean.tokens.gather(1, after), real & (pair.there & _real(pair.base))[:, :-1])


def source_value(metric: Metric, pair: Pair, base: Clean, source: Clean, reader: ReadMetric) -> Float[Tensor, " batch"]:
    """The metric on the run patched from; a divergence is that from the base run, where both have a position.

    Raises:
        ValueError: A divergence between runs of different lengths.
    """
    laid_out = torch.where(pair.there[..., None], pair.aligned(source.final), base.final)
    if isinstance(metric, Loss):
        return reader.bind(replace(base, final=laid_out), PATCHED_FROM).clean
    if not isinstance(metric, KL):
        return ReadMetric(metric).bind(source, PATCHED_FROM).clean
    if base.tokens.shape != source.tokens.shape:
        lengths = f"{base.tokens.shape[1]} and {source.tokens.shape[1]}"
        raise ValueError(f"a divergence between runs of {lengths} positions is not defined")
    logits = [base.model.unembed_normalised(final) for final in (base.final, laid_out)]
    return kl_divergence(logits[0], logits[1], base.mask)


def weights_of(metric: Metric, pair: Pair, reader: ReadMetric) -> Float[Tensor, " batch"]:
    """What each prompt counts in a mean."""
    if reader.targets is not None:
        return reader.targets.counted.sum(-1).double()
    nothing = torch.zeros(*pair.base.tokens.shape, 0)
    return metric.weights(Prompts(pair.base.tokens, pair.base.mask, nothing))
