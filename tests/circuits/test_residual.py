"""The stream as a sum of writes, and the rows of a direct logit attribution, over every architecture."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, strategies as st

from circuits import MLP, Attn, AttnBias, Embed, Head, Neuron
from circuits.components import NormBias, UnembedBias
from circuits.residual import decompose, direct_logit_attribution, logit_lens, needed_names
from circuits.residual.requirements import check_unit
from tests.architectures import ARCHITECTURES, NAMES, config, configs, make
from tests.batches import LENGTHS, SIDES, pad, random_prompts, random_tokens

EXACT = 1e-10
PRE = [name for name, c in ARCHITECTURES.items() if c.norm_placement == "pre"]
POST = [name for name in NAMES if name not in PRE]
UNITS = ["layer", "head", "neuron"]
over_pre = pytest.mark.parametrize("name", PRE)
over_units = pytest.mark.parametrize("unit", UNITS)


@functools.cache
def run_of(name):
    """Model, tokens, logits and every activation, of a model with a soft cap its logits before the cap."""
    model = make(name).requires_grad_(False)
    tokens = random_tokens(model.config)
    logits, cache = model.run_with_cache(tokens, names_filter=lambda _: True)
    return model, tokens, uncapped(model, logits), cache


def uncapped(model, logits):
    cap = model.config.logit_softcap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def tokens_like(model, shape, seed):
    return torch.randint(model.config.d_vocab, shape, generator=torch.Generator().manual_seed(seed))


# --- decompose ------------------------------------------------------------------------------------------------------


@over_units
@over_pre
def test_writes_sum_to_every_stream(name, unit) -> None:
    model, _, _, cache = run_of(name)
    for layer in [*range(model.config.n_layers), None]:
        parts = decompose(model, cache, layer, unit)
        stream = cache["resid_post", -1] if layer is None else cache["resid_pre", layer]
        torch.testing.assert_close(parts.writes.sum(0), stream, rtol=EXACT, atol=EXACT)
        assert parts.error < EXACT
        assert len(parts.components) == len(parts.writes) == len(set(parts.components))
        if model.config.has_resid_mid and layer is not None:
            mid = decompose(model, cache, layer, unit, mid=True)
            torch.testing.assert_close(mid.writes.sum(0), cache["resid_mid", layer], rtol=EXACT, atol=EXACT)


@over_pre
def test_rows_of_one_unit_sum_to_those_of_the_coarser(name) -> None:
    model, _, _, cache = run_of(name)
    layers, heads, neurons = (decompose(model, cache, unit=unit) for unit in UNITS)
    for layer in range(model.config.n_layers):
        attention = [heads[c] for c in heads.components if _is_attention(c, layer)]
        torch.testing.assert_close(sum(attention), layers[Attn(layer)], rtol=EXACT, atol=EXACT)
        if model.config.has_mlp:
            mlp = [neurons[c] for c in neurons.components if _is_mlp(c, layer)]
            torch.testing.assert_close(sum(mlp), layers[MLP(layer)], rtol=EXACT, atol=EXACT)


def _is_attention(c, layer):
    return getattr(c, "layer", None) == layer and (
        str(c).startswith(f"L{layer}H") or "attn" in str(c) or "ln1" in str(c)
    )


def _is_mlp(c, layer):
    return getattr(c, "layer", None) == layer and not _is_attention(c, layer)


def test_a_heads_row_is_its_result() -> None:
    model, _, _, cache = run_of("all_biases")
    parts = decompose(model, cache)
    result = cache["result", 1]
    torch.testing.assert_close(parts[Head(1, 2)], result[:, :, 2], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(parts[AttnBias(1)], model.b_O[1].expand(*result.shape[:2], -1))


def test_a_heads_write_through_a_branch_norm_is_gain_times_result_over_scale() -> None:
    model, _, _, cache = run_of("like_gemma2")
    expected = model.blocks[0].ln1_post.w * cache["result", 0][:, :, 4] / cache["blocks.0.ln1_post.hook_scale"]
    torch.testing.assert_close(decompose(model, cache)[Head(0, 4)], expected, rtol=EXACT, atol=EXACT)


def test_a_neurons_row_is_its_activation_times_its_output_weights() -> None:
    model, _, _, cache = run_of("gated_silu")
    expected = cache["post", 1][..., 7:8] * model.W_out[1, 7]
    torch.testing.assert_close(decompose(model, cache, unit="neuron")[Neuron(1, 7)], expected, rtol=EXACT, atol=EXACT)


def test_the_table_of_a_decomposition_has_shares_that_sum_to_one() -> None:
    model, _, _, cache = run_of("course")
    frame = decompose(model, cache, position=-1).to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "batch", "norm", "share"]
    assert frame.groupby("batch")["share"].sum().to_numpy() == pytest.approx(1.0)


def test_an_edited_write_shows_in_the_error() -> None:
    model, tokens, _, _ = run_of("course")
    edit = [("blocks.1.hook_attn_out", lambda x, hook: x + 0.5)]
    _, cache = model.run_with_cache(tokens, fwd_hooks=edit)
    assert decompose(model, cache).error == pytest.approx(0.5)
    assert decompose(model, cache, unit="layer").error < EXACT


# --- direct logit attribution -----------------------------------------------------------------------------------------


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


# --- the logit lens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_lens_ends_with_the_models_logits(name) -> None:
    model, tokens, _, cache = run_of(name)
    lens = logit_lens(model, cache, position=None, incl_mid=True)
    torch.testing.assert_close(lens.logits[-1], model(tokens), rtol=EXACT, atol=EXACT)
    assert len(lens.points) == len(lens.logits)


def test_the_lens_normalises_each_layer_by_its_own_statistics() -> None:  # field report 16
    model, _, _, cache = run_of("course")
    lens = logit_lens(model, cache, incl_mid=True)
    assert lens.points == ("0_pre", "0_mid", "1_pre", "1_mid", "final_post")
    x = cache["resid_mid", 0][:, -1]
    own = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + model.config.norm_eps).sqrt()
    expected = (own * model.ln_final.w + model.ln_final.b) @ model.W_U
    torch.testing.assert_close(lens.logits[1], expected, rtol=EXACT, atol=EXACT)
    frozen = (x - x.mean(-1, keepdim=True)) / cache["ln_final.hook_scale"][:, -1]
    assert (lens.logits[1] - (frozen * model.ln_final.w + model.ln_final.b) @ model.W_U).abs().max() > 0.1


def test_the_lens_names_the_likeliest_token_at_each_depth() -> None:
    model, tokens, _, cache = run_of("course")
    frame = logit_lens(model, cache).to_frame()
    last = frame.query("point == 'final_post'")["token"].tolist()
    assert last == model(tokens)[:, -1].argmax(-1).tolist()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POST)
def test_post_norm_models_are_refused_with_the_reason(name) -> None:
    model, _, _, cache = run_of(name)
    for refused in (lambda: decompose(model, cache), lambda: direct_logit_attribution(model, cache, 3)):
        with pytest.raises(ValueError, match=r"post-norm model's stream is not a sum.*norm_placement 'pre'"):
            refused()


def test_a_cache_that_lacks_activations_says_which_and_how_to_capture_them() -> None:
    model, tokens, _, _ = run_of("course")
    _, cache = model.run_with_cache(tokens, ["hook_embed", "ln_final.hook_scale"])
    with pytest.raises(KeyError, match=r"lacks hook_pos_embed, blocks.0.attn.hook_z.*names_filter="):
        direct_logit_attribution(model, cache, 3)


def test_a_cache_of_another_architecture_is_refused() -> None:
    model = run_of("course")[0]
    with pytest.raises(ValueError, match=r"another architecture: d_model 7 in the cache, 15 in the model"):
        decompose(model, run_of("no_norm")[3])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"correct": 17}, IndexError, "correct: token 17 is not in a vocabulary of 17"),
        ({"correct": 3, "wrong": -1}, IndexError, "wrong: token -1"),
        ({"correct": [3, 4]}, ValueError, r"correct has shape \[2\]; expected one token, or one for each of 4 prompts"),
        ({"correct": torch.ones(4) > 0}, TypeError, "token ids"),
        ({"correct": 3, "position": 13}, IndexError, "position 13 is not in prompt 0, which has 13 tokens"),
        ({"correct": 3, "position": -14}, IndexError, "position -14 is not in prompt 0"),
        ({"correct": 3, "position": [1, 2]}, ValueError, "one for each of 4 prompts"),
        ({"correct": 3, "layer": 1}, ValueError, "layer and after_norm are for directions"),
        ({"correct": torch.ones(8), "layer": 1}, ValueError, r"has shape \[15\], \[4, 15\], not \[8\]"),
        ({"correct": torch.ones(15), "layer": 2}, IndexError, "layer 2 is not in a model of 2 layers"),
        ({"correct": torch.ones(15), "wrong": 3}, TypeError, "difference of two directions"),
    ],
)
def test_a_question_that_cannot_mean_anything_is_refused(arguments, error, message) -> None:
    model, _, _, cache = run_of("course")
    with pytest.raises(error, match=message):
        direct_logit_attribution(model, cache, **arguments)


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="unit 'heads' is not one of 'head', 'layer', 'neuron'"):
        check_unit("heads")


def test_a_position_on_padding_is_refused() -> None:
    model = run_of("course")[0]
    tokens, mask = pad(random_prompts(model.config), "left")
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    with pytest.raises(IndexError, match="position 2 of prompt 1 is padding: its tokens are 4 to 12"):
        direct_logit_attribution(model, cache, 3, position=2)
    with pytest.raises(IndexError, match=f"position -3 of prompt {LENGTHS.index(2)} is padding"):
        direct_logit_attribution(model, cache, 3, position=-3)


def test_nan_in_an_activation_is_named_where_it_first_stands() -> None:
    model, tokens, _, _ = run_of("course")

    def spoil(z, hook):
        z[2, 5, 1] = float("nan")

    _, cache = model.run_with_cache(tokens, fwd_hooks=[("blocks.0.attn.hook_z", spoil)])
    message = "blocks.0.attn.hook_z is nan first at batch 2, position 5"
    with pytest.raises(ValueError, match=message):
        direct_logit_attribution(model, cache, 3)
    with pytest.raises(ValueError, match=message):
        decompose(model, cache)
    with pytest.raises(ValueError, match=r"blocks.0.hook_resid_mid is nan first at batch 2, position 5"):
        logit_lens(model, cache, position=None, incl_mid=True)


def test_nan_in_a_weight_is_named() -> None:
    model = make("course").requires_grad_(False)
    _, cache = model.run_with_cache(random_tokens(model.config))
    model.blocks[1].attn.out.weight[4, 11] = float("inf")
    with pytest.raises(ValueError, match=r"weight blocks.1.attn.out.weight is inf at \[4, 11\]"):
        direct_logit_attribution(model, cache, 3)


def test_needed_names_are_what_the_architecture_has() -> None:
    for name in PRE:
        for unit in UNITS:
            names = needed_names(config(name), unit, by_source=True)
            assert set(names) <= set(run_of(name)[0].hook_names)
