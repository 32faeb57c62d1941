"""Padding and the future must not matter, over every architecture (field report 20)."""

from __future__ import annotations

import functools

import pytest
import torch

from circuits import HookedGPT
from tests.architectures import NAMES, make
from tests.batches import LENGTHS, POS, SIDES, pad, random_prompts, random_tokens, real_part
from tests.exactly import assert_exact

architectures = pytest.mark.parametrize("name", NAMES)
sides = pytest.mark.parametrize("side", SIDES)


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


# --- padding --------------------------------------------------------------------------------------------------------


@architectures
@sides
def test_padding_changes_no_logit_and_no_activation_of_a_real_token(name: str, side: str) -> None:
    model = model_of(name)
    prompts = random_prompts(model.config)
    tokens, mask = pad(prompts, side)
    logits, cache = model.run_with_cache(tokens, names_filter=lambda _: True, attention_mask=mask)
    assert_exact(model(tokens, attention_mask=mask)[mask.bool()], logits[mask.bool()])
    for item, prompt in enumerate(prompts):
        real = mask[item].bool()
        alone, cache_alone = model.run_with_cache(prompt[None], names_filter=lambda _: True)
        assert_exact(logits[item][real], alone[0])
        for hook_name, value in cache_alone.items():
            assert_exact(real_part(hook_name, cache[hook_name][item], real), value[0], hook_name)


@architectures
@sides
def test_padding_counts_nothing_in_the_loss(name: str, side: str) -> None:
    model = model_of(name)
    prompts = random_prompts(model.config)
    tokens, mask = pad(prompts, side)
    per_token = model.loss(tokens, attention_mask=mask, per_token=True)
    total = torch.zeros((), dtype=torch.float64)
    for item, prompt in enumerate(prompts):
        alone = model.loss(prompt[None], per_token=True)[0]
        pairs = (mask[item, 1:] * mask[item, :-1]).bool()
        assert_exact(per_token[item][pairs], alone)
        total += alone.sum()
    assert_exact(model.loss(tokens, attention_mask=mask), total / (sum(LENGTHS) - len(LENGTHS)))


@architectures
@sides
def test_what_stands_under_the_padding_does_not_matter(name: str, side: str) -> None:
    model = model_of(name)
    tokens, mask = pad(random_prompts(model.config), side)
    others = torch.where(mask.bool(), tokens, random_tokens(model.config, seed=5))
    assert not torch.equal(others, tokens)
    real = mask.bool()
    assert torch.equal(model(tokens, attention_mask=mask)[real], model(others, attention_mask=mask)[real])


@architectures
@sides
def test_padding_is_attended_to_by_nobody_and_makes_no_nan(name: str, side: str) -> None:
    model = model_of(name)
    tokens, mask = pad(random_prompts(model.config), side)
    logits, cache = model.run_with_cache(tokens, names_filter=lambda _: True, attention_mask=mask)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(model(tokens, attention_mask=mask)).all()
    for hook_name, value in cache.items():
        if hook_name.endswith("hook_attn_scores"):
            assert (value.masked_select(~mask.bool()[:, None, None, :]) == -torch.inf).all()
        else:
            assert torch.isfinite(value).all(), hook_name
        if hook_name.endswith("hook_pattern"):
            assert (value.masked_select(~mask.bool()[:, None, None, :]) == 0).all()
            blind = value.sum(-1) == 0
            assert (value.sum(-1)[~blind] - 1).abs().max() < 1e-12
            if side == "left":
                assert torch.equal(blind, ~mask.bool()[:, None].expand_as(blind))


@architectures
def test_a_mask_of_ones_is_no_mask(name: str) -> None:
    model = model_of(name)
    tokens = random_tokens(model.config)
    ones = torch.ones_like(tokens)
    assert_exact(model(tokens, attention_mask=ones), model(tokens))
    assert_exact(model.loss(tokens, attention_mask=ones), model.loss(tokens))


# --- the future -----------------------------------------------------------------------------------------------------


@architectures
@pytest.mark.parametrize("cut", [1, 8])
def test_later_tokens_change_nothing_before_them(name: str, cut: int) -> None:
    model = model_of(name)
    tokens = random_tokens(model.config)
    others = tokens.clone()
    others[:, cut:] = (others[:, cut:] + 1) % model.config.d_vocab
    fast, fast_others = model(tokens), model(others)
    assert_exact(fast[:, :cut], fast_others[:, :cut])
    assert (fast[:, cut:] - fast_others[:, cut:]).abs().amax() > 1e-3
    _, cache = model.run_with_cache(tokens, names_filter=lambda _: True)
    _, cache_others = model.run_with_cache(others, names_filter=lambda _: True)
    early = torch.arange(POS) < cut
    for hook_name, value in cache.items():
        for item in range(len(tokens)):
            shown = real_part(hook_name, value[item], early)
            assert_exact(shown, real_part(hook_name, cache_others[hook_name][item], early), hook_name)


@architectures
def test_earlier_tokens_matter_where_they_can_be_seen(name: str) -> None:
    # Guards the tests above: a model that mixed nothing would be causal, too.
    model = model_of(name)
    tokens = random_tokens(model.config)
    others = tokens.clone()
    others[:, -2] = (others[:, -2] + 1) % model.config.d_vocab
    assert (model(tokens)[:, -1] - model(others)[:, -1]).abs().amax() > 1e-4
