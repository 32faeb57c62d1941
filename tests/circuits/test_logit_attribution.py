"""The rows of a direct logit attribution sum to the logit, over every architecture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from circuits import Embed, Head
from circuits.components import NormBias, UnembedBias
from circuits.residual import decompose, direct_logit_attribution, needed_names
from tests.architectures import configs, make
from tests.batches import SIDES, pad, random_prompts, random_tokens
from tests.runs import PRE, UNITS, run_of, tokens_like

EXACT = 1e-10
over_pre = pytest.mark.parametrize("name", PRE)
over_units = pytest.mark.parametrize("unit", UNITS)


@over_units
@over_pre
def test_rows_sum_to_the_logit_difference(name, unit) -> None:
    model, _, logits, cache = run_of(name)
    batch = len(logits)
    correct, wrong = tokens_like(model, (batch,), 1), tokens_like(model, (batch,), 2)
    rows = torch.arange(batch)
    expected = logits[rows, -1, correct] - logits[rows, -1, wrong]
    found = direct_logit_attribution(model, cache, correct, wrong, unit=unit)
    torch.testing.assert_close(found.values.sum(0), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.total, expected, rtol=1e-9, atol=1e-9)
    assert found.error < EXACT


@over_units
@over_pre
def test_rows_sum_to_the_logit_at_every_position(name, unit) -> None:
    model, tokens, logits, cache = run_of(name)
    correct = tokens_like(model, tokens.shape, 3)
    found = direct_logit_attribution(model, cache, correct, position=None, unit=unit)
    expected = logits.gather(-1, correct[..., None])[..., 0]
    torch.testing.assert_close(found.values.sum(0), expected, rtol=1e-9, atol=1e-9)
    one = direct_logit_attribution(model, cache, correct[:, 5], position=5, unit=unit)
    torch.testing.assert_close(one.values, found.values[..., 5], rtol=EXACT, atol=EXACT)


@over_pre
def test_rows_are_the_writes_read_out_one_by_one(name) -> None:
    model, _, _, cache = run_of(name)
    parts, found = decompose(model, cache, position=-2), direct_logit_attribution(model, cache, 3, 5, position=-2)
    w = model.W_U[:, 3] - model.W_U[:, 5]
    for component, write in zip(parts.components, parts.writes, strict=True):
        if model.ln_final is not None:
            if model.config.norm == "layernorm":
                write = write - write.mean(-1, keepdim=True)
            write = write / cache["ln_final.hook_scale"][:, -2] * model.ln_final.w
        torch.testing.assert_close(found[component], write @ w, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("unit", ["layer", "head"])
@over_pre
def test_rows_split_by_source_sum_to_the_rows(name, unit) -> None:
    model, tokens, _, cache = run_of(name)
    for position in (-1, None):
        found = direct_logit_attribution(model, cache, 3, 5, position, unit=unit, by_source=True)
        torch.testing.assert_close(found.sources.sum(-1), found.values, rtol=EXACT, atol=EXACT)
        assert found.error < EXACT
        whole = direct_logit_attribution(model, cache, 3, 5, position, unit=unit)
        assert found.components == whole.components
        torch.testing.assert_close(found.values, whole.values, rtol=EXACT, atol=EXACT)
    later = torch.triu(torch.ones(tokens.shape[1], tokens.shape[1]), 1).bool()
    assert (found.sources[..., later] == 0).all()


def test_a_value_bias_goes_with_the_attention_weight_of_each_source() -> None:
    model, _, _, cache = run_of("grouped_query")
    u = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    split = direct_logit_attribution(model, cache, u, by_source=True)
    head, value = Head(1, 3), cache["v", 1][:, :, 3 // model.config.group_size]  # the bias is part of v
    expected = cache["pattern", 1][:, 3, -1] * (value @ model.W_O[1, 3] @ u)
    torch.testing.assert_close(split.sources[split.components.index(head)], expected, rtol=EXACT, atol=EXACT)


@over_pre
def test_any_direction_of_any_stream_can_be_attributed(name) -> None:
    model, tokens, _, cache = run_of(name)
    generator = torch.Generator().manual_seed(4)
    d_model = model.config.d_model
    for shape in [(d_model,), (len(tokens), d_model)]:
        u = torch.randn(shape, generator=generator, dtype=torch.float64)
        for layer in (1, None) if model.config.n_layers > 1 else (None,):
            stream = cache["resid_post", -1] if layer is None else cache["resid_pre", layer]
            found = direct_logit_attribution(model, cache, u, layer=layer, unit="layer")
            torch.testing.assert_close(found.values.sum(0), (stream[:, -1] * u).sum(-1), rtol=EXACT, atol=EXACT)
        after = direct_logit_attribution(model, cache, u, after_norm=True)
        final = cache["resid_post", -1] if model.ln_final is None else model.ln_final(cache["resid_post", -1])
        torch.testing.assert_close(after.values.sum(0), (final[:, -1] * u).sum(-1), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["course", "like_llama", "like_gemma2", "parallel_two_norms"])
def test_the_last_position_under_padding_is_that_of_the_unpadded_prompt(name, side) -> None:
    model = run_of(name)[0]
    prompts = random_prompts(model.config)
    tokens, mask = pad(prompts, side)
    filter_ = needed_names(model.config, by_source=True)
    _, cache = model.run_with_cache(tokens, filter_, attention_mask=mask)
    found = direct_logit_attribution(model, cache, 3, 5, by_source=True)
    for row, prompt in enumerate(prompts):
        _, alone = model.run_with_cache(prompt[None], filter_)
        expected = direct_logit_attribution(model, alone, 3, 5, by_source=True)
        torch.testing.assert_close(found.values[:, row], expected.values[:, 0], rtol=EXACT, atol=EXACT)
        start = tokens.shape[1] - len(prompt) if side == "left" else 0
        mine = found.sources[:, row, start : start + len(prompt)]
        torch.testing.assert_close(mine, expected.sources[:, 0], rtol=EXACT, atol=EXACT)
    second = direct_logit_attribution(model, cache, 3, 5, position=-2)
    assert second.position.tolist() == [int(last) - 1 for last in found.position]


def test_gains_of_an_unfolded_final_norm_and_the_unembedding_bias_are_counted() -> None:  # field report 15
    model, _, logits, cache = run_of("all_biases")
    found = direct_logit_attribution(model, cache, 3, 5)
    expected = logits[:, -1, 3] - logits[:, -1, 5]
    torch.testing.assert_close(found.values.sum(0), expected, rtol=EXACT, atol=EXACT)
    assert found.components[-2:] == (NormBias("ln_final"), UnembedBias())
    shift = model.ln_final.b @ (model.W_U[:, 3] - model.W_U[:, 5])
    torch.testing.assert_close(found[NormBias("ln_final")], shift.expand(4))
    torch.testing.assert_close(found[UnembedBias()], (model.b_U[3] - model.b_U[5]).expand(4))
    without = found.values[:-2].sum(0)
    assert (without - expected).abs().min() > 0.01  # leaving them out, as the report says, is visible here
    assert (model.ln_final.w - 1).abs().max() > 0.1


def test_the_logit_before_the_soft_cap_is_attributed_and_said_so() -> None:  # field report 17
    model, tokens, before, cache = run_of("soft_caps")
    found = direct_logit_attribution(model, cache, 3, 5)
    assert "before the soft cap of 1.7" in found.quantity
    assert "before the soft cap" in repr(found)
    torch.testing.assert_close(found.total, before[:, -1, 3] - before[:, -1, 5], rtol=1e-9, atol=1e-9)
    after = model(tokens)[:, -1]
    assert (found.total - (after[:, 3] - after[:, 5])).abs().max() > 0.05


def test_a_shift_of_all_logits_moves_a_logit_and_no_difference() -> None:  # field report 19
    model, _, _, cache = run_of("course")
    with torch.no_grad():
        other = make("course").requires_grad_(False)
        other.unembed.weight -= other.unembed.weight.mean(0)
    single = [direct_logit_attribution(m, cache, 3).total for m in (model, other)]
    lead = [direct_logit_attribution(m, cache, 3, 5).total for m in (model, other)]
    assert (single[0] - single[1]).abs().min() > 1e-3
    torch.testing.assert_close(*lead, rtol=EXACT, atol=EXACT)
    assert "shift of all logits" in direct_logit_attribution.__doc__


def test_float32_attribution_is_exact_to_its_precision_and_needs_no_more_than_it_says() -> None:
    model = make("course", dtype=torch.float32)
    tokens = random_tokens(model.config)
    for unit in UNITS:
        logits, cache = model.run_with_cache(tokens, needed_names(model.config, unit))
        found = direct_logit_attribution(model, cache, 3, 5, unit=unit)
        assert not found.values.requires_grad
        torch.testing.assert_close(
            found.values.sum(0), (logits[:, -1, 3] - logits[:, -1, 5]).detach(), rtol=1e-5, atol=1e-5
        )


def test_bfloat16_models_are_attributed_in_float32() -> None:
    model = make("course").to(torch.bfloat16)
    tokens = random_tokens(model.config)
    _, cache = model.run_with_cache(tokens)
    found = direct_logit_attribution(model, cache, 3, 5)
    assert found.values.dtype == torch.float32
    assert found.error < 0.1


def test_the_table_of_an_attribution_names_components_and_prompts() -> None:
    model, _, _, cache = run_of("course")
    found = direct_logit_attribution(model, cache, 3, 5)
    frame = found.to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "batch", "value"]
    assert frame.query("component == 'L1H2' and batch == 3")["value"].item() == float(found[Head(1, 2)][3])
    assert frame.query("component == 'embed'")["layer"].isna().all()
    split = direct_logit_attribution(model, cache, 3, 5, position=None, by_source=True).to_frame()
    assert list(split.columns) == ["component", "layer", "head", "batch", "pos", "source", "value"]


@given(architecture=configs(), seed=st.integers(0, 99), position=st.sampled_from([0, 3, -1, None]))
def test_rows_sum_to_the_logit_of_any_architecture(architecture, seed, position) -> None:
    model = make(architecture, seed=seed).requires_grad_(False)
    tokens = random_tokens(architecture, batch=2, pos=6, seed=seed)
    logits, cache = model.run_with_cache(tokens)
    if architecture.norm_placement == "post":
        with pytest.raises(ValueError, match="post-norm"):
            direct_logit_attribution(model, cache, 3)
        return
    found = direct_logit_attribution(model, cache, 3, None, position, by_source=True)
    cap = architecture.logit_softcap
    shown = found.total if cap is None else cap * torch.tanh(found.total / cap)
    torch.testing.assert_close(
        shown, logits[..., 3] if position is None else logits[:, position, 3], rtol=1e-9, atol=1e-9
    )
    assert found.error < EXACT
    assert found[Embed()].shape == found.total.shape
