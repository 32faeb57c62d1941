"""Circuits written by hand, whose every number is known beforehand.

`induction_head` is a two-layer attention-only model without normalisation, in float64: a previous-token head and an
induction head, each beside a head that is zero. What it must show stands in the constants below it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from circuits import HookedGPT

V, T = 8, 13
D_HEAD = max(V, T)
# Where the blocks of the stream begin: tok(V) pos(T) prev(V) out(V).
TOK, POS, PREV, OUT = 0, V, V + T, V + T + V
SHARP = 40 * math.sqrt(D_HEAD)

# The predictions with a known answer: those at t = 7 … 11 of `tokens`.
PREDICTED = slice(7, 12)
LOSS = 3.177490e-4
LOSS_WITHOUT_PREVIOUS_TOKEN_HEAD = 2.438197
LOSS_WITHOUT_INDUCTION_HEAD = 2.079442
K_COMPOSITION = 1 / math.sqrt(V - 1)
QK_RANKS, OV_RANKS = (12, 7), (7, 7)


def induction_head() -> HookedGPT:
    """L0H0 copies the previous token into the `prev` block; L1H0 looks for the current token there and copies on."""
    from circuits import GPTConfig, HookedGPT

    config = GPTConfig(
        n_layers=2,
        n_heads=2,
        d_model=OUT + V,
        d_head=D_HEAD,
        n_ctx=T,
        d_vocab=V,
        norm=None,
        attn_only=True,
        bias_out=False,
    )
    model = HookedGPT(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        _embed(model)
        previous, induction = model.blocks[0].attn, model.blocks[1].attn
        for p in range(T):
            previous.W_K[0, POS + p, p] = 1
            if p:
                previous.W_Q[0, POS + p, p - 1] = SHARP
        for i in range(V):
            previous.W_V[0, TOK + i, i] = 1
        for i in range(1, V):
            previous.W_O[0, i, PREV + i] = 1
            induction.W_Q[0, TOK + i, i] = SHARP
            induction.W_K[0, PREV + i, i] = 1
            induction.W_V[0, TOK + i, i] = 1
            induction.W_O[0, i, OUT + i] = 1
    return model


def _embed(model: HookedGPT) -> None:
    for i in range(V):
        model.W_E[i, TOK + i] = 1
        model.W_U[OUT + i, i] = 10
    for p in range(T):
        model.W_pos[p, POS + p] = 1


def tokens(batch: int = 1, seed: int = 0) -> Tensor:
    """Token 0, then a permutation of six other tokens, twice; `[batch 13]`, every row another permutation."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        once = 1 + torch.randperm(V - 1, generator=generator)[:6]
        rows.append(torch.cat([torch.zeros(1, dtype=torch.long), once, once]))
    return torch.stack(rows)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean next-token loss of the predictions at t = 7 … 11, for each row."""
    log_probabilities = logits.log_softmax(-1)[:, PREDICTED]
    targets = tokens[:, 1:][:, PREDICTED]
    return -log_probabilities.gather(-1, targets[..., None])[..., 0].mean(-1)


def accuracy_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Share of the predictions at t = 7 … 11 that are right, for each row."""
    return (logits[:, PREDICTED].argmax(-1) == tokens[:, 1:][:, PREDICTED]).double().mean(-1)
