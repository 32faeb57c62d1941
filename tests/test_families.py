"""Field reports 13, 14 and 17 on every family of pretrained models, random weights, no other library.

Reports 20, 21 and 22 (padding, the beginning of a text, rotary positions) are held against transformers itself in
tests/circuits/test_huggingface.py.
"""

from __future__ import annotations

import functools

import architectures
import huggingface
import pytest
import torch

from analysis.composition import composition_scores
from circuits.layers import rotary_frequencies, rotary_tables, rotate
from circuits.pretrained.folder import family_and_config
from circuits.residual import direct_logit_attribution

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]])
MODEL_TYPES = {"GPT2": "gpt2", "GPTNeo": "gpt_neo", "GPTNeoX": "gpt_neox", "GPTJ": "gptj"}
over_families = pytest.mark.parametrize("name", huggingface.NAMES)


@functools.cache
def model_of(name):
    stem, fields = huggingface.SPECS[name]
    _, config = family_and_config({"model_type": MODEL_TYPES.get(stem, stem.lower()), **fields})
    return architectures.make(config)


@torch.no_grad()
@over_families
def test_circuits_and_composition_read_the_kv_head_of_their_group(name):  # field report 13
    model = model_of(name)
    config, size = model.config, model.config.group_size
    for layer, block in enumerate(model.blocks):
        for head in range(config.n_heads):
            ov = block.attn.W_V[head // size] @ block.attn.W_O[head]
            qk = block.attn.W_Q[head] @ block.attn.W_K[head // size].T
            assert (model.OV[layer, head].AB - ov).abs().max() < 1e-10
            assert (model.QK[layer, head].AB - qk).abs().max() < 1e-10
    first, last = config.n_heads - 1, config.n_heads - 2
    writes = model.OV[0, first].AB
    for kind, reads in (("Q", model.QK[2, last].AB), ("K", model.QK[2, last].AB.T), ("V", model.OV[2, last].AB)):
        expected = (writes @ reads).norm() / (writes.norm() * reads.norm())
        assert (composition_scores(model, kind, raw=True).score[0, first, 2, last] - expected).abs() < 1e-10


@torch.no_grad()
@over_families
def test_scores_are_those_of_the_qk_circuit_at_its_offset_with_the_biases_own_terms(name):  # field report 14
    model = model_of(name)
    config = model.config
    if config.qk_norm:
        assert "not applied" in model.QK.note
        return
    layer, head, batch = 1, 2, 1
    _, cache = model.run_with_cache(TOKENS)
    attn = model.blocks[layer].attn
    x = model.blocks[layer].ln1.affine(cache[f"blocks.{layer}.ln1.hook_normalized"])[batch]
    query, key = torch.tensor(9), torch.tensor(7)
    rotary = config.positions == "rotary"
    circuit = model.QK.at_offset(2) if rotary else model.QK
    score = x[query] @ circuit[layer, head].AB @ x[key]
    if attn.b_Q is not None:
        b_q, b_k = attn.b_Q[head], attn.b_K[head // config.group_size]
        k = x[key] @ attn.W_K[head // config.group_size]
        q = x[query] @ attn.W_Q[head]
        if rotary:
            turn = rotary_tables(rotary_frequencies(config), torch.tensor([2]), torch.float64)
            q, b_q = (rotate(v.view(1, 1, -1), turn, config.rotary_layout).flatten() for v in (q, b_q))
        score = score + q @ b_k + b_q @ k + b_q @ b_k
    score = score * config.attn_scale
    if config.attn_softcap is not None:
        score = config.attn_softcap * torch.tanh(score / config.attn_softcap)
    assert (cache["attn_scores", layer][batch, head, query, key] - score).abs() < 1e-10


@torch.no_grad()
@over_families
def test_attributions_sum_to_the_logit_before_any_cap(name):  # field report 17
    model = model_of(name)
    logits, cache = model.run_with_cache(TOKENS)
    attribution = direct_logit_attribution(model, cache, correct=11)
    total, cap = attribution.values.sum(0), model.config.logit_softcap
    capped = total if cap is None else cap * torch.tanh(total / cap)
    assert (capped - logits[:, -1, 11]).abs().max() < 1e-10
    assert ("cap" in attribution.quantity) == (cap is not None)
