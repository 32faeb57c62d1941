"""Paths from the weights alone: with a run's attention they give its logits and its scores exactly."""

from __future__ import annotations

import functools

import pytest
import torch

from circuits import AttnBias, Embed, Head, PosEmbed
from circuits.components import UnembedBias, ValueBias
from circuits.paths import expand_scores, expand_weights, virtual_head
from tests.architectures import config, make
from tests.batches import random_tokens

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ATTENTION_ONLY = {"attn_only": True, "d_mlp": 0, "norm": None, "final_norm": False}
CHANGES = {
    "plain": {},
    "biases": {"bias_qkv": True, "bias_unembed": True, "n_layers": 3},
    "grouped": {"n_heads": 6, "n_kv_heads": 3, "bias_qkv": True, "bias_out": False},
    "rotary": {"positions": "rotary", "d_head": 10, "rotary_dim": 6, "bias_qkv": True},
    "scaled": {"embed_scale": 2.3, "tie_embeddings": True, "attn_scale": 0.7, "window": 4},
}
over_models = pytest.mark.parametrize("name", CHANGES)


@functools.cache
def run_of(name):
    model = make(config("attn_only_no_norm").replace(**ATTENTION_ONLY | CHANGES[name])).requires_grad_(False)
    tokens = random_tokens(model.config)
    return model, tokens, *model.run_with_cache(tokens, lambda name: True)


def rows(tokens, leaf):
    """``[batch pos row]``: which row of a leaf's matrix stands at each position."""
    batch, pos = tokens.shape
    if isinstance(leaf, Embed):
        return torch.nn.functional.one_hot(tokens, 17).double()
    if isinstance(leaf, PosEmbed):
        return torch.eye(19, dtype=torch.float64)[:pos].expand(batch, -1, -1)
    return torch.ones(batch, pos, 1, dtype=torch.float64)


def carried(tokens, cache, components, heads):
    """The rows at the end of a path: moved by the attention of each head in turn."""
    x = rows(tokens, components[0]) if components else torch.ones(*tokens.shape, 1, dtype=torch.float64)
    for head in heads:
        x = cache["pattern", head.layer][:, head.head] @ x
    return x


@over_models
def test_weight_paths_and_attention_sum_to_the_logits(name) -> None:
    model, tokens, logits, cache = run_of(name)
    paths = expand_weights(model)
    total = sum(carried(tokens, cache, p.components, p.heads) @ p.matrix().AB for p in paths)
    torch.testing.assert_close(total, logits, **EXACT)
    assert len({path.components for path in paths}) == len(paths)


@over_models
def test_matrices_of_paths_are_of_rank_d_head_and_equal_the_dense_products(name) -> None:
    model = run_of(name)[0]
    by_name = {path.components: path for path in expand_weights(model)}
    OV = [[model.OV[layer, head].AB for head in range(model.config.n_heads)] for layer in range(2)]
    W_E = model.W_E * model.config.embed_scale
    skip = by_name[Embed(), Head(0, 2)].matrix()
    assert skip.A.shape == (17, model.config.d_head)
    torch.testing.assert_close(skip.AB, W_E @ OV[0][2] @ model.W_U, **EXACT)
    virtual = by_name[Embed(), Head(0, 2), Head(1, 1)].matrix()
    torch.testing.assert_close(virtual.AB, W_E @ OV[0][2] @ OV[1][1] @ model.W_U, **EXACT)
    torch.testing.assert_close(by_name[Embed(),].matrix().AB, W_E @ model.W_U, **EXACT)


@over_models
def test_score_paths_and_attention_sum_to_the_scores(name) -> None:
    model, tokens, _, cache = run_of(name)
    pos = tokens.shape[1]
    head = Head(model.config.n_layers - 1, 2)
    offsets = range(pos) if model.config.positions == "rotary" else [0]
    total = torch.zeros(len(tokens), pos, pos, dtype=torch.float64)
    distance = torch.arange(pos)[:, None] - torch.arange(pos)
    for path in expand_scores(model, head):
        query = carried(tokens, cache, path.query, heads_of(path.query))
        key = carried(tokens, cache, path.key, heads_of(path.key))
        for offset in offsets:
            term = query @ path.matrix(offset).AB @ key.mT
            total += term if len(offsets) == 1 else term * (distance == offset)
    scores = cache["attn_scores", head.layer][:, head.head]
    seen = ~scores.isneginf()
    torch.testing.assert_close(total.expand_as(scores)[seen], scores[seen], **EXACT)


def heads_of(path):
    own = [Head(c.layer, c.head) for c in path if isinstance(c, ValueBias)]
    return own + [c for c in path if isinstance(c, Head)]


def test_a_virtual_head_is_the_product_of_its_two() -> None:
    model = run_of("grouped")[0]
    both = virtual_head(model, Head(0, 4), Head(1, 1))
    one, two = model.OV[0, 4].AB, model.OV[1, 1].AB
    QK = model.QK[1, 1].AB
    torch.testing.assert_close(both.ov.AB, one @ two, **EXACT)
    torch.testing.assert_close(both.query.AB, one @ QK, **EXACT)
    torch.testing.assert_close(both.key.AB, QK @ one.T, **EXACT)
    for matrix in (both.ov, both.query, both.key):
        assert matrix.A.shape[-1] <= model.config.d_head


def test_paths_can_be_kept_to_few_heads() -> None:
    model = run_of("biases")[0]
    direct = expand_weights(model, max_heads=0)
    assert {p.components for p in direct} == {
        (Embed(),),
        (PosEmbed(),),
        *((AttnBias(layer),) for layer in range(3)),
        (UnembedBias(),),
    }
    assert max(len(path.heads) for path in expand_weights(model, max_heads=2)) == 2
    assert str(expand_weights(model, max_heads=1)[2]) == "embed → L0H0"


@pytest.mark.parametrize(
    ("name", "message"), [("attn_only", "layernorm norm"), ("no_norm", "with MLPs"), ("course", "MLPs and a layernorm")]
)
def test_models_whose_paths_depend_on_the_run_are_refused(name, message) -> None:
    with pytest.raises(ValueError, match=message):
        expand_weights(make(name))


def test_questions_that_cannot_mean_anything_are_refused() -> None:
    model = run_of("plain")[0]
    with pytest.raises(IndexError, match="L1H3: head 3 is not in a model of 3 heads"):
        expand_scores(model, Head(1, 3))
    with pytest.raises(ValueError, match="L1H0 writes to the stream no earlier than L1H1"):
        virtual_head(model, Head(1, 0), Head(1, 1))
    with pytest.raises(ValueError, match="no score depends on an offset; got 2"):
        expand_scores(model, Head(1, 0))[0].matrix(2)
    normed = make(config("attn_only_no_norm").replace(qk_norm=True))
    with pytest.raises(ValueError, match="with q/k norms"):
        expand_scores(normed, Head(1, 0))
