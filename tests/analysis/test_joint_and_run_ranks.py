"""Ranks of full circuits, of a layer's heads together, and of the scores of a run, against dense matrices."""

import architectures
import batches
import compiled
import pytest
import torch

from analysis.ranks import head_ranks, layer_ranks, numerical_rank, score_ranks
from circuits.folded import embedding, head_weights, unembedding

NAMES = architectures.NAMES


def padded(s, length):
    return torch.nn.functional.pad(s[..., :length], (0, max(0, length - s.shape[-1])))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_full_circuits_have_the_spectra_of_the_dense_matrices(name, raw):
    model = architectures.make(name)
    found = head_ranks(model, raw=raw, full=True)
    assert found.circuits == ("QK", "OV", "full QK", "full OV")
    weights, W_E, W_U = head_weights(model, raw), embedding(model, raw), unembedding(model, raw)
    k = found.singular_values.shape[-1]
    for place, dense in ((2, W_E @ weights.QK.AB @ W_E.T), (3, W_E @ weights.OV.AB @ W_U)):
        assert_close(found.singular_values[:, :, place], padded(torch.linalg.svdvals(dense), k))


def test_a_vocabulary_smaller_than_a_head_bounds_the_full_rank():
    model = architectures.make(architectures.config("course").replace(d_vocab=3))
    found = head_ranks(model, raw=True, full=True)
    assert found.numerical_rank[0, 0].tolist() == [5, 5, 3, 3]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_joint_spectra_are_those_of_the_heads_side_by_side(name, raw):
    model = architectures.make(name)
    found, weights = layer_ranks(model, raw=raw), head_weights(model, raw)
    for layer in range(model.config.n_layers):
        QK, OV = weights.QK.AB[layer], weights.OV.AB[layer]
        dense = [torch.cat(list(QK), 1), torch.cat(list(QK)), torch.cat(list(OV), 1), torch.cat(list(OV)), OV.sum(0)]
        for place, matrix in enumerate(dense):
            s = torch.linalg.svdvals(matrix)[: found.bound]
            assert_close(found.singular_values[layer, place], s)


def test_heads_that_share_a_subspace_have_a_small_joint_rank():
    model = architectures.make(architectures.config("course").replace(d_model=31, d_head=5)).requires_grad_(False)
    attn = model.blocks[0].attn
    attn.W_V[1], attn.W_V[2] = attn.W_V[0], 2 * attn.W_V[0]
    found = layer_ranks(model, raw=True)
    ranks = dict(zip(found.circuits, found.numerical_rank[0].tolist(), strict=True))
    assert ranks == {"QK query": 15, "QK key": 15, "OV read": 5, "OV write": 15, "OV sum": 5}
    assert found.separate[0].tolist() == [15] * 5
    assert found.bound == 15


def test_the_compiled_layers_have_the_ranks_of_their_only_head():
    found = layer_ranks(compiled.induction_head(), raw=True)
    assert found.numerical_rank.tolist() == [[12, 12, 7, 7, 7], [7] * 5]
    assert found.separate.tolist() == [[12, 12, 7, 7, 7], [7] * 5]


@pytest.mark.parametrize("name", NAMES)
def test_score_spectra_are_those_of_the_scores_before_cap_and_mask(name):
    """The last query sees every key unless a window hides some: its row of S is its row of scores."""
    model = architectures.make(name)
    tokens = batches.random_tokens(model.config, batch=2, pos=11)
    found = score_ranks(model, tokens)
    uncapped = architectures.make(model.config.replace(attn_softcap=None, window=None))
    if model.config.attn_softcap is None and not any(model.config.window):
        _, cache = uncapped.run_with_cache(tokens, lambda n: n.endswith("attn_scores"))
        for layer in range(model.config.n_layers):
            S = dense_scores(model, tokens, layer)
            lower = torch.ones(11, 11).tril().bool()
            assert_close(S[:, :, lower], cache["attn_scores", layer][:, :, lower])
    for layer in range(model.config.n_layers):
        S = dense_scores(model, tokens, layer)
        s = torch.linalg.svdvals(S)[..., : found.bound]
        assert_close(found.singular_values[:, layer], s)
        assert torch.equal(found.numerical_rank[:, layer], numerical_rank(s, 11, 11))


def dense_scores(model, tokens, layer):
    from analysis.ranks.runs import _matrices, _names

    names = [name for each in range(model.config.n_layers) for name in _names(model.config, each)]
    cache = model.run_with_cache(tokens, names)[1]
    return _matrices(model, cache, layer, None).AB.detach()


def test_the_rank_of_the_scores_is_at_most_d_head():
    model = architectures.make("course")
    found = score_ranks(model, batches.random_tokens(model.config))
    assert found.bound == 5
    assert (found.numerical_rank == 5).all()
    assert (score_ranks(model, batches.random_tokens(model.config, pos=3)).numerical_rank == 3).all()


@pytest.mark.parametrize("side", batches.SIDES)
def test_padding_adds_nothing_to_a_rank(side):
    model = architectures.make("like_gpt2")
    prompts = batches.random_prompts(model.config)
    tokens, mask = batches.pad(prompts, side)
    found = score_ranks(model, tokens, mask)
    for row, prompt in enumerate(prompts):
        alone = score_ranks(model, prompt[None])
        assert_close(found.singular_values[row], padded(alone.singular_values[0], 5))


def test_tables_have_a_row_for_each_matrix():
    model = architectures.make("course")
    assert len(head_ranks(model, full=True).to_frame()) == 2 * 3 * 4
    assert len(layer_ranks(model).to_frame()) == 2 * 5
    assert len(score_ranks(model, batches.random_tokens(model.config)).to_frame()) == 4 * 2 * 3


@pytest.mark.parametrize("measure", [layer_ranks, head_ranks])
def test_nan_in_a_weight_is_named(measure):
    model = architectures.make("course").requires_grad_(False)
    model.blocks[1].attn.W_V[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match="W_V of L1H2 holds NaN"):
        measure(model)
