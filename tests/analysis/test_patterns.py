"""Attention patterns and head scores: the rules on patterns written by hand, and on models that follow them."""

import math

import compiled
import pytest
import torch
from small_models import small_model

from analysis.patterns import (
    _scored_queries,
    _targets_by_place,
    _targets_of_repeat,
    attention_on,
    attention_patterns,
    head_scores,
    mean_entropy,
    repeated_tokens,
)
from circuits import GPTConfig, HookedGPT


class Codec:
    """As much of a tokenizer as a start token needs."""

    bos_token_id = 4


SIZES = {"n_layers": 2, "n_heads": 3, "d_head": 5, "d_model": 7, "d_mlp": 11, "n_ctx": 19, "d_vocab": 17}


def small(**changes):
    return HookedGPT(GPTConfig(**{**SIZES, **changes}), seed=1, dtype=torch.float64)


def tokens_of(model, batch=4, pos=13):
    return torch.randint(model.config.d_vocab, (batch, pos), generator=torch.Generator().manual_seed(3))


def test_patterns_are_the_hooks_with_the_layers_stacked():
    model = small()
    tokens = tokens_of(model)
    found = attention_patterns(model, tokens)
    _, cache = model.run_with_cache(tokens)
    assert found.pattern.shape == (4, 2, 3, 13, 13)
    for layer in range(2):
        assert torch.allclose(found.pattern[:, layer], cache["pattern", layer], atol=1e-12)


def test_rows_of_patterns_sum_to_one_and_those_of_padding_to_zero():
    model = small()
    mask = torch.ones(4, 13, dtype=torch.long)
    mask[1, :3] = 0
    sums = attention_patterns(model, tokens_of(model), mask).pattern.sum(-1)
    assert torch.allclose(sums, mask[:, None, None, :].expand_as(sums).double())


def test_scores_of_hand_written_patterns_are_their_definitions():
    n, length = 3, 7
    generator = torch.Generator().manual_seed(0)
    pattern = torch.rand(2, 1, 1, length, length, generator=generator, dtype=torch.float64).tril()
    pattern /= pattern.sum(-1, keepdim=True)
    A = pattern[:, 0, 0]
    real = torch.ones(2, length, dtype=torch.bool)
    targets = _targets_by_place(real)
    duplicate, induction = _targets_of_repeat(length, n)
    rows, half = range(1, length), range(length - n, length)
    expected = {
        "previous": [A[b, t, t - 1] for b in range(2) for t in rows],
        "current": [A[b, t, t] for b in range(2) for t in rows],
        "first": [A[b, t, 0] for b in range(2) for t in rows],
        "duplicate": [A[b, t, t - n] for b in range(2) for t in half],
        "induction": [A[b, t, t - n + 1] for b in range(2) for t in half],
    }
    for name, values in expected.items():
        target = {**targets, "duplicate": duplicate, "induction": induction}[name]
        assert torch.isclose(attention_on(pattern, target), torch.stack(values).mean()).all(), name
    entropy = [-sum(float(p) * math.log(p) for p in A[b, t, : t + 1]) for b in range(2) for t in rows]
    assert math.isclose(mean_entropy(pattern, _scored_queries(real)).item(), sum(entropy) / len(entropy))


def test_compiled_heads_score_one_on_their_rule():
    scores = head_scores(compiled.induction_head(), compiled.tokens(batch=5))
    assert scores.previous[0, 0].item() == pytest.approx(1, abs=1e-12)
    assert scores.induction[1, 0].item() == pytest.approx(1, abs=1e-12)
    assert scores.entropy[0, 0].item() == pytest.approx(0, abs=1e-9)
    # A head whose weights are zero spreads its attention evenly: log(t + 1) nats at position t.
    assert scores.entropy[0, 1].item() == pytest.approx(sum(math.log(t + 1) for t in range(1, 13)) / 12)


def test_repeats_found_by_equality_are_the_repeats_made():
    """The same numbers whether the period is known or found, where no token stands twice in a half."""
    model = small(d_vocab=29)
    made = head_scores(model, n=7, batch=5, seed=3)
    found = head_scores(model, made.tokens)
    for name in made.table:
        assert torch.allclose(getattr(made, name), getattr(found, name), atol=1e-12), name


def test_random_sequences_repeat_without_repeats_inside():
    tokens = repeated_tokens(small(d_vocab=29), n=7, batch=11, seed=0)
    assert tokens.shape == (11, 14)
    assert torch.equal(tokens[:, :7], tokens[:, 7:])
    assert all(len(set(row.tolist())) == 7 for row in tokens)
    assert torch.equal(tokens, repeated_tokens(small(d_vocab=29), n=7, batch=11, seed=0))
    assert not torch.equal(tokens, repeated_tokens(small(d_vocab=29), n=7, batch=11, seed=1))


def test_a_model_with_a_start_token_gets_it_once():
    model = small()
    model.tokenizer = Codec()
    tokens = repeated_tokens(model, n=9, batch=3)
    assert (tokens == 4).sum().item() == 3
    assert (tokens[:, 0] == 4).all()
    assert head_scores(model).tokens.shape == (8, 19)


def test_a_vocabulary_too_small_for_distinct_tokens_still_gets_sequences():
    tokens = repeated_tokens(small(d_vocab=3), n=8, batch=2)
    assert torch.equal(tokens[:, :8], tokens[:, 8:])


def test_padding_changes_no_score():
    model = small()
    tokens = tokens_of(model, batch=1, pos=9)
    for left in (True, False):
        pad = torch.zeros(1, 3, dtype=torch.long)
        padded = torch.cat([pad, tokens] if left else [tokens, pad], dim=1)
        mask = torch.ones_like(padded)
        mask[:, slice(0, 3) if left else slice(9, None)] = 0
        expected, found = head_scores(model, tokens), head_scores(model, padded, attention_mask=mask)
        for name in expected.table:
            assert torch.allclose(getattr(expected, name), getattr(found, name), atol=1e-10, equal_nan=True), name


def test_tokens_without_repeats_have_no_repeat_scores():
    scores = head_scores(small(), torch.arange(9)[None])
    assert scores.duplicate.isnan().all()
    assert scores.induction.isnan().all()
    assert not scores.previous.isnan().any()


def test_scores_leave_a_tidy_table():
    frame = head_scores(small()).to_frame()
    assert list(frame.columns) == "layer head previous current first duplicate induction entropy".split()
    assert len(frame) == 6


def test_impossible_requests_are_named():
    with pytest.raises(ValueError, match="n 10 twice is a sequence of 20 tokens, but n_ctx is 19"):
        head_scores(small(), n=10)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        head_scores(small(), torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="n 1 and batch 8"):
        head_scores(small(), n=1)


def test_scores_say_that_no_token_repeats_inside_a_sequence_unless_one_must():
    assert head_scores(small_model()).source == "8 sequences of 6 different random tokens, twice"
    assert "6 different" in repr(head_scores(small_model()))
    assert head_scores(small_model(d_vocab=4)).source == "8 sequences of 6 random tokens, twice"


def test_repr_of_patterns_previews_the_largest_weights_and_no_masked_one():
    found = attention_patterns(small_model(), torch.tensor([[3, 1, 16, 0, 3]]))
    lines = repr(found).splitlines()
    assert lines[0].startswith("AttentionPatterns of 1 prompt;")
    rows = [line.split() for line in lines if line.split()[0].isdigit()]
    assert len(rows) == 6
    assert all(int(query) >= 1 and int(key) <= int(query) for _, _, _, query, key, _ in rows)
    largest = found.pattern[..., 1:, :].max().item()
    assert float(rows[0][-1]) == pytest.approx(largest, rel=1e-3)
