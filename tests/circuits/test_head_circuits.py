"""`model.QK` and `model.OV` on every architecture: as the dense matrices, and as the scores of a run."""

from __future__ import annotations

import functools

import pytest
import torch

from circuits import HookedGPT
from circuits.head_circuits import turned
from tests.architectures import ARCHITECTURES, NAMES, make
from tests.batches import random_tokens

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


def dense(model: HookedGPT, kind: str, layer: int, head: int) -> torch.Tensor:
    attn, kv = model.blocks[layer].attn, head // model.config.group_size
    if kind == "QK":
        return attn.W_Q[head] @ attn.W_K[kv].T
    return attn.W_V[kv] @ attn.W_O[head]


@pytest.mark.parametrize("kind", ["QK", "OV"])
@pytest.mark.parametrize("name", NAMES)
def test_circuits_act_as_their_dense_matrices(name, kind):
    """Field reports 11 to 13: vectors, last rows and columns, one SVD convention, grouped queries."""
    model, circuits = model_of(name), getattr(model_of(name), kind)
    vector = torch.randn(7 if name != "course" else 15, generator=torch.Generator().manual_seed(0)).double()
    for layer in range(model.config.n_layers):
        for head in range(model.config.n_heads):
            F, M = circuits[layer, head], dense(model, kind, layer, head)
            torch.testing.assert_close(F.AB, M, **EXACT)
            torch.testing.assert_close(vector @ F, vector @ M, **EXACT)
            torch.testing.assert_close(F @ vector, M @ vector, **EXACT)
            torch.testing.assert_close(F[-1], M[-1], **EXACT)
            torch.testing.assert_close(F[:, -1], M[:, -1], **EXACT)
            U, S, Vh = F.svd()
            torch.testing.assert_close(U @ torch.diag(S) @ Vh, M, **EXACT)
    stacked = torch.stack(
        [
            torch.stack([dense(model, kind, layer, head) for head in range(model.config.n_heads)])
            for layer in range(model.config.n_layers)
        ]
    )
    torch.testing.assert_close(circuits.AB, stacked, **EXACT)


@pytest.mark.parametrize("name", [n for n, c in ARCHITECTURES.items() if not c.qk_norm])
def test_circuits_and_biases_are_the_scores_at_every_offset(name):
    """Field report 14: where positions are rotary the offset is part of the question."""
    model, config = model_of(name), model_of(name).config
    uncapped = HookedGPT.from_state_dict(config.replace(attn_softcap=None, window=None), model.state_dict())
    tokens = random_tokens(config, batch=1, pos=6)
    _, cache = uncapped.run_with_cache(tokens)
    for layer, block in enumerate(uncapped.blocks):
        pre = config.norm_placement == "pre" and block.ln1 is not None
        x = block.ln1.affine(cache[f"blocks.{layer}.ln1.hook_normalized"]) if pre else cache["resid_pre", layer]
        for head in range(config.n_heads):
            scores = cache["attn_scores", layer][0, head]
            for query in range(6):
                for key in range(query + 1):
                    expected = by_circuit(model, layer, head, x[0, query], x[0, key], query - key)
                    torch.testing.assert_close(scores[query, key].detach(), expected.detach(), **EXACT)


def by_circuit(model, layer, head, x, y, offset):
    """A score from W_QK at an offset and the terms of both biases."""
    config, attn, kv = model.config, model.blocks[layer].attn, head // model.config.group_size
    rotary = config.positions == "rotary"
    QK = (model.QK.at_offset(offset) if rotary else model.QK)[layer, head]
    product = x @ QK @ y
    if attn.b_Q is not None:
        W_Q, b_Q = (turned(W, config, offset if rotary else None) for W in (attn.W_Q[head], attn.b_Q[head][None]))
        W_K, b_K = attn.W_K[kv], attn.b_K[kv]
        product = product + b_Q[0] @ (y @ W_K) + (x @ W_Q) @ b_K + b_Q[0] @ b_K
    return config.attn_scale * product


@pytest.mark.parametrize("name", [n for n, c in ARCHITECTURES.items() if c.positions == "rotary"])
def test_the_offset_of_a_rotary_circuit_is_said(name):
    """Field report 14: never without a word."""
    QK = model_of(name).QK
    assert "rotary offset Δ=0" in repr(QK)
    assert "rotary offset Δ=4" in repr(QK.at_offset(4)[0, 1])
    assert (QK.at_offset(4)[0, 1].AB - QK[0, 1].AB).abs().max() > 1e-3


def test_stacked_weights_are_copies_whatever_their_layout():
    model = make("course").requires_grad_(False)
    before = model.W_Q.clone()
    stacked = model.W_Q
    stacked[0, 0] = 0
    assert torch.equal(model.W_Q, before)
    assert torch.equal(model.W_Q[1, 2], model.blocks[1].attn.W_Q[2])
