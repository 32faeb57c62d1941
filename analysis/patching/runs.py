"""The two runs of a pair: the one that is patched, and the one whose activations are put into it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.metrics import KL, Metric, Prompts, kl_divergence
from analysis.patching.pairs import Pair, Prompted
from analysis.readings import ReadMetric
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


def source_value(metric: Metric, base: Clean, source: Clean) -> Float[Tensor, " batch"]:
    """The metric on the run patched from; a divergence is that from the base run.

    Raises:
        ValueError: A divergence between runs of different lengths.
    """
    if not isinstance(metric, KL):
        return ReadMetric(metric).bind(source, PATCHED_FROM).clean
    if base.tokens.shape != source.tokens.shape:
        lengths = f"{base.tokens.shape[1]} and {source.tokens.shape[1]}"
        raise ValueError(f"a divergence between runs of {lengths} positions is not defined")
    logits = [run.model.unembed_normalised(run.final) for run in (base, source)]
    return kl_divergence(logits[0], logits[1], base.mask)


def weights_of(metric: Metric, pair: Pair) -> Float[Tensor, " batch"]:
    """What each prompt counts in a mean."""
    nothing = torch.zeros(*pair.base.tokens.shape, 0)
    return metric.weights(Prompts(pair.base.tokens, pair.base.mask, nothing))
