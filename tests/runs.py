"""One run of each architecture whose stream is a sum of writes, with every activation, shared by the suites."""

from __future__ import annotations

import functools

import torch

from tests.architectures import ARCHITECTURES, NAMES, make
from tests.batches import random_tokens

PRE = [name for name, c in ARCHITECTURES.items() if c.norm_placement == "pre"]
POST = [name for name in NAMES if name not in PRE]
UNITS = ["layer", "head", "neuron"]


@functools.cache
def run_of(name):
    """Model, tokens, logits and every activation; of a model with a soft cap, its logits before the cap."""
    model = make(name).requires_grad_(False)
    tokens = random_tokens(model.config)
    logits, cache = model.run_with_cache(tokens, names_filter=lambda _: True)
    cap = model.config.logit_softcap
    return model, tokens, logits if cap is None else cap * torch.atanh(logits / cap), cache


def tokens_like(model, shape, seed):
    return torch.randint(model.config.d_vocab, shape, generator=torch.Generator().manual_seed(seed))
