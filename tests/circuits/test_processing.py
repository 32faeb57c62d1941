"""Processing steps: log-probabilities unchanged on every architecture where a step is exact, a refusal elsewhere."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given

from circuits import HookedGPT
from circuits.processing import center_unembed, center_writing_weights, fold_ln, fold_value_biases
from tests.architectures import ARCHITECTURES, NAMES, configs, make
from tests.batches import pad, random_prompts, random_tokens

STEPS = {f.__name__: f for f in (fold_ln, center_writing_weights, center_unembed, fold_value_biases)}


def refused(step: str, config) -> bool:
    if step == "fold_ln":
        return config.norm_placement == "post" or (config.gated_mlp and config.norm == "layernorm")
    if step == "center_writing_weights":
        centred = config.norm == "layernorm" and config.norm_placement == "pre" and config.final_norm
        return not centred or config.branch_norm
    return step == "center_unembed" and config.logit_softcap is not None


EXACT = [(step, name) for step in STEPS for name in NAMES if not refused(step, ARCHITECTURES[name])]
REFUSED = [(step, name) for step in STEPS for name in NAMES if refused(step, ARCHITECTURES[name])]


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


@functools.cache
def processed(step: str, name: str) -> HookedGPT:
    return STEPS[step](model_of(name))


def log_probabilities(model: HookedGPT, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, mask).log_softmax(-1)


def assert_same_weights(one: HookedGPT, other: HookedGPT, tolerance: float) -> None:
    assert one.config == other.config
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(("step", "name"), EXACT)
def test_log_probabilities_are_unchanged(step, name):
    """Field report 18: for every step, norm weights far from trivial."""
    model = model_of(name)
    tokens = random_tokens(model.config)
    before, after = log_probabilities(model, tokens), log_probabilities(processed(step, name), tokens)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("step", STEPS)
def test_log_probabilities_are_unchanged_under_padding(step):
    model = model_of("like_gpt2")
    tokens, mask = pad(random_prompts(model.config), "left")
    real = mask.bool()
    before, after = (log_probabilities(m, tokens, mask)[real] for m in (model, processed(step, "like_gpt2")))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("step", "name"), EXACT)
def test_a_step_is_idempotent(step, name):
    once = processed(step, name)
    assert_same_weights(STEPS[step](once), once, 1e-14)


@pytest.mark.parametrize(("step", "name"), EXACT)
def test_nothing_is_shared_with_the_input_and_the_input_is_left_alone(step, name):
    model = make(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    new = STEPS[step](model)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.fill_(7.0)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@pytest.mark.parametrize(("step", "name"), REFUSED)
def test_a_step_that_cannot_be_exact_is_refused(step, name):
    with pytest.raises(ValueError, match=f"{step} cannot be exact"):
        STEPS[step](model_of(name))


@pytest.mark.parametrize("name", [name for step, name in EXACT if step == "fold_ln"])
def test_folded_norms_are_neutral_and_what_reads_through_them_is_centred(name):
    new = processed("fold_ln", name)
    norms = [norm for block in new.blocks for norm in (block.ln1, block.ln2)] + [new.ln_final]
    for norm in norms:
        if norm is not None:
            assert torch.equal(norm.w, torch.ones_like(norm.w))
            assert norm.b is None or not norm.b.any()
    if new.config.norm == "layernorm":
        for block in new.blocks:
            torch.testing.assert_close(
                block.attn.qkv.weight.sum(-1),
                torch.zeros(()).double().expand(block.attn.qkv.weight.shape[0]),
                rtol=0,
                atol=1e-12,
            )


def test_folding_a_shift_turns_on_the_biases_that_take_it():
    model = model_of("no_biases")
    new = processed("fold_ln", "no_biases")
    turned_on = [f for f in ("bias_qkv", "bias_out", "bias_mlp", "bias_unembed") if getattr(new.config, f)]
    assert turned_on == ["bias_qkv", "bias_mlp", "bias_unembed"]
    expected = model.blocks[1].ln1.b @ model.blocks[1].attn.W_V[2]
    torch.testing.assert_close(new.blocks[1].attn.b_V[2], expected)
    assert not new.blocks[0].mlp.b_out.any()


def test_a_norm_without_shift_turns_no_bias_on():
    model = make("no_biases")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.zero_()
    assert fold_ln(model).config == model.config


def test_a_gated_mlp_is_folded_where_its_norm_has_no_shift():
    model = make("gated_silu")
    with torch.no_grad():
        for block in model.blocks:
            block.ln2.b.zero_()
    tokens = random_tokens(model.config)
    torch.testing.assert_close(
        log_probabilities(fold_ln(model), tokens), log_probabilities(model, tokens), rtol=0, atol=1e-10
    )


def test_centred_writes_leave_a_stream_with_mean_zero():
    new = processed("center_writing_weights", "course")
    _, cache = new.run_with_cache(random_tokens(new.config), lambda n: n.endswith(("resid_pre", "resid_post")))
    for name, stream in cache.items():
        assert stream.mean(-1).abs().max() < 1e-14, name


@pytest.mark.parametrize("name", ["tied", "like_gpt2"])
def test_tied_weights_are_untied_only_by_steps_that_change_one_of_them(name):
    untied = {step for step in STEPS if not processed(step, name).config.tie_embeddings}
    assert untied == {"fold_ln", "center_writing_weights", "center_unembed"}
    assert torch.equal(processed("center_writing_weights", name).W_U, model_of(name).W_U)
    assert torch.equal(processed("fold_ln", name).W_E, model_of(name).W_E)


def test_centring_the_unembedding_moves_logits_by_one_amount_per_position():
    """Field report 19: log-probabilities agree and logits do not, as the documentation of the step says."""
    assert "log-probabilities agree and logits do not" in " ".join((center_unembed.__doc__ or "").split())
    model, tokens = model_of("all_biases"), random_tokens(model_of("all_biases").config)
    with torch.no_grad():
        shift = model(tokens) - processed("center_unembed", "all_biases")(tokens)
    assert shift.abs().max() > 0.1
    torch.testing.assert_close(shift, shift[..., :1].expand_as(shift), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, c in ARCHITECTURES.items() if c.bias_qkv])
def test_folded_value_biases_are_zero_and_queries_keep_theirs(name):
    new = processed("fold_value_biases", name)
    assert new.config.bias_out
    assert not new.b_V.any()
    assert torch.equal(new.b_Q, model_of(name).b_Q)
    assert torch.equal(new.b_K, model_of(name).b_K)


def test_steps_follow_each_other_in_any_order():
    model = model_of("like_neox")
    tokens = random_tokens(model.config)
    for order in (list(STEPS.values()), list(STEPS.values())[::-1]):
        new = functools.reduce(lambda m, step: step(m), order, model)
        torch.testing.assert_close(log_probabilities(new, tokens), log_probabilities(model, tokens), rtol=0, atol=1e-10)


def test_tokenizer_and_card_come_along_and_the_steps_are_listed():
    model = make("course")
    model.card, model.tokenizer = {"name": "x", "nested": {"a": 1}}, object()
    new = fold_ln(center_unembed(fold_ln(model)))
    assert new.card == {"name": "x", "nested": {"a": 1}, "processing": ["fold_ln", "center_unembed"]}
    assert new.tokenizer is model.tokenizer
    assert "processing" not in model.card
    new.card["nested"]["a"] = 2
    assert model.card["nested"]["a"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_of_the_weights_is_kept(dtype):
    model = make("like_gpt2", dtype=dtype)
    for step in STEPS.values():
        assert {p.dtype for p in step(model).parameters()} == {dtype}


@pytest.mark.parametrize("step", STEPS)
def test_nan_is_named_with_its_first_place(step):
    model = make("like_gpt2")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[4, 2] = float("nan")
        model.blocks[1].attn.qkv.weight[9, 1] = float("inf")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight is nan at \[4, 2\] \(2 of its entries"):
        STEPS[step](model)


@given(configs())
def test_every_step_keeps_or_refuses_every_combination(config):
    model = make(config).requires_grad_(False)
    tokens = random_tokens(config, batch=2, pos=5)
    before = log_probabilities(model, tokens)
    for step, process in STEPS.items():
        if refused(step, config):
            with pytest.raises(ValueError, match=f"{step} cannot be exact"):
                process(model)
        else:
            torch.testing.assert_close(log_probabilities(process(model), tokens), before, rtol=0, atol=1e-9)
