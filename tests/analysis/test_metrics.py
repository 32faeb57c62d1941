"""Metrics against their definitions in plain loops, and what a bootstrap interval promises."""

import math

import pytest
import torch
from unchecked import unchecked

from analysis.metrics import (
    Prompts,
    as_metric,
    kl_divergence,
    logit_diff,
    logit_difference,
    loss_per_prompt,
    measured,
)
from analysis.uncertainty import bootstrap_interval, weighted_mean
from circuits.tokens import real_positions

BATCH, POS, VOCAB = 4, 6, 9


def logits(seed=0):
    return torch.randn(BATCH, POS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens():
    return torch.randint(VOCAB, (BATCH, POS), generator=torch.Generator().manual_seed(5))


def left_and_right_padding():
    mask = torch.ones(BATCH, POS, dtype=torch.bool)
    mask[1, :2] = False
    mask[2, 4:] = False
    return mask


@pytest.mark.parametrize("mask", [None, left_and_right_padding()], ids=["full", "padded"])
def test_loss_is_the_mean_over_predicted_tokens(mask):
    z, x = logits(), tokens()
    seen = torch.ones(BATCH, POS, dtype=torch.bool) if mask is None else mask
    for b, value in enumerate(loss_per_prompt(z, x, mask)):
        losses = [-z[b, t].log_softmax(-1)[x[b, t + 1]].item() for t in range(POS - 1) if seen[b, t] and seen[b, t + 1]]
        assert math.isclose(value.item(), sum(losses) / len(losses))


@pytest.mark.parametrize("mask", [None, left_and_right_padding()], ids=["full", "padded"])
def test_kl_is_the_mean_over_real_positions(mask):
    p, q = logits(0), logits(1)
    seen = torch.ones(BATCH, POS, dtype=torch.bool) if mask is None else mask
    for b, value in enumerate(kl_divergence(p, q, mask)):
        terms = []
        for t in range(POS):
            if seen[b, t]:
                a, c = p[b, t].softmax(-1), q[b, t].softmax(-1)
                terms.append((a * (a / c).log()).sum().item())
        assert math.isclose(value.item(), sum(terms) / len(terms))


def test_kl_of_equal_runs_is_zero_and_direction_matters():
    p, q = logits(0), logits(1)
    assert torch.equal(kl_divergence(p, p), torch.zeros(BATCH, dtype=torch.float64))
    assert not torch.allclose(kl_divergence(p, q), kl_divergence(q, p))


def test_position_minus_one_is_the_last_real_token():
    mask = left_and_right_padding()
    assert real_positions(-1, tokens(), mask).tolist() == [5, 5, 3, 5]
    assert real_positions(-2, tokens(), mask).tolist() == [4, 4, 2, 4]
    assert real_positions(0, tokens(), mask).tolist() == [0, 2, 0, 0]
    assert real_positions(-1, tokens(), None).tolist() == [5, 5, 5, 5]
    with pytest.raises(IndexError, match="position 4 is not in row 1, which has 4 tokens"):
        real_positions(4, tokens(), mask)
    with pytest.raises(IndexError, match="position -7 is not in row 0, which has 6 tokens"):
        real_positions(-7, tokens(), None)


def test_logit_difference_reads_two_logits_at_one_position():
    z = logits()
    correct, wrong = torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 6, 7])
    mask = left_and_right_padding()
    found = logit_difference(z, correct, wrong, -1, mask)
    for b, t in enumerate([5, 5, 3, 5]):
        assert found[b] == z[b, t, b] - z[b, t, b + 4]
    one_for_all = measured(logit_diff(2, 3, position=1), z, Prompts(tokens(), None, z), "the clean run")
    assert torch.equal(one_for_all, z[:, 1, 2] - z[:, 1, 3])


def test_losses_of_half_precision_logits_are_taken_in_float32():
    assert loss_per_prompt(logits().bfloat16(), tokens()).dtype == torch.float32


def test_means_of_losses_weight_tokens():
    mask = left_and_right_padding()
    z, x = logits(), tokens()
    loss, prompts = as_metric("loss"), Prompts(x, mask, z)
    values = measured(loss, z, prompts, "the clean run")
    weights = loss.weights(prompts)
    assert weights.tolist() == [5, 3, 3, 5]
    assert math.isclose(
        weighted_mean(values[None], weights).item(), (values * weights).sum().item() / weights.sum().item()
    )
    assert as_metric("kl").weights(prompts).tolist() == [6, 4, 4, 6]
    assert logit_diff(0, 1).weights(prompts).tolist() == [1, 1, 1, 1]


def test_bootstrap_interval_covers_the_mean_about_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(400, 30, generator=generator, dtype=torch.float64)
    interval = bootstrap_interval(samples, torch.ones(30), level=0.9)
    covered = ((interval[:, 0] < 0) & (interval[:, 1] > 0)).double().mean().item()
    assert 0.84 < covered < 0.94


def test_bootstrap_interval_narrows_with_prompts_and_widens_with_level():
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(1, 400, generator=generator, dtype=torch.float64)

    def width(values, level):
        return bootstrap_interval(values, torch.ones(values.shape[1]), level).diff().item()

    assert width(samples, 0.9) < 0.5 * width(samples[:, :25], 0.9)
    assert width(samples, 0.5) < width(samples, 0.99)


def test_bootstrap_is_seeded_and_says_nothing_of_one_prompt():
    values = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(5)
    assert torch.equal(bootstrap_interval(values, weights), bootstrap_interval(values, weights))
    assert not torch.equal(bootstrap_interval(values, weights), bootstrap_interval(values, weights, seed=1))
    assert bootstrap_interval(values[:, :1], weights[:1]).isnan().all()
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, not 95"):
        bootstrap_interval(values, weights, level=95)


def test_equal_values_have_an_interval_of_no_width():
    interval = bootstrap_interval(torch.full((1, 7), 3.0), torch.arange(1, 8).double())
    assert torch.allclose(interval, torch.full((1, 2), 3.0))


def test_bad_metrics_and_answers_are_named():
    z = logits()
    prompts = Prompts(tokens(), None, z)
    with pytest.raises(ValueError, match="no metric is called 'los'; did you mean 'loss'"):
        as_metric("los")
    with pytest.raises(TypeError, match="expected a metric"):
        as_metric(3)
    with pytest.raises(ValueError, match="correct and wrong are equal in row 1"):
        logit_diff(torch.tensor([1, 2]), torch.tensor([3, 2]))
    with pytest.raises(IndexError, match="wrong 9 is not in a vocabulary of 9"):
        measured(logit_diff(1, 9), z, prompts, "the clean run")
    with pytest.raises(ValueError, match=r"correct has shape \[2\], .* each of 4 prompts"):
        measured(logit_diff(torch.tensor([1, 2]), 3), z, prompts, "the clean run")
    with pytest.raises(ValueError, match=r"returned shape \[4, 6\] for ablating L0H1, expected \[batch\] = \[4\]"):
        measured(as_metric(lambda z: z.sum(-1)), z, prompts, "ablating L0H1")
    with pytest.raises(ValueError, match="is NaN for ablating L0H1, in row 0"):
        measured(as_metric(lambda z: z.sum((1, 2)) * math.nan), z, prompts, "ablating L0H1")
    with pytest.raises(TypeError, match="returned 3 for the clean run"):
        measured(as_metric(lambda z: 3), z, prompts, "the clean run")


def test_a_metric_takes_no_text():
    with unchecked(), pytest.raises(TypeError, match=r"'\\n'; a text's id is model.to_single_token"):
        logit_diff(3, "\n")
