"""HookedGPT: counts, initial values, views, bad tokens, generation."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from unchecked import unchecked

from circuits import FactoredMatrix, GPTConfig, HookedGPT
from circuits.layers import rotary_frequencies, rotary_tables, rotate
from tests.architectures import NAMES, config, make
from tests.batches import pad, random_prompts, random_tokens


def test_the_course_model_has_816640_parameters() -> None:
    assert sum(parameter.numel() for parameter in HookedGPT(GPTConfig.course()).parameters()) == 816_640


def test_the_first_loss_is_that_of_uniform_predictions() -> None:
    model = HookedGPT(GPTConfig.course())
    tokens = random_tokens(model.config, batch=16, pos=64)
    assert abs(model.loss(tokens).item() - math.log(65)) < 0.1


@pytest.mark.parametrize("attn_only", [False, True])
def test_what_writes_to_the_stream_starts_smaller_by_the_root_of_the_number_of_writes(attn_only: bool) -> None:
    model = HookedGPT(GPTConfig.course().replace(attn_only=attn_only, n_layers=8, d_mlp=0 if attn_only else 512))
    writes = 8 if attn_only else 16
    expected = 0.02 / math.sqrt(writes)
    assert model.W_O.std().item() == pytest.approx(expected, rel=0.02)
    assert model.W_Q.std().item() == pytest.approx(0.02, rel=0.02)
    if not attn_only:
        assert model.W_out.std().item() == pytest.approx(expected, rel=0.02)
        assert model.W_in.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_every_initial_weight_is_finite_and_the_seed_decides(name: str) -> None:
    first, again, other = (HookedGPT(config(name), seed=seed) for seed in (0, 0, 1))
    for key, tensor in first.state_dict().items():
        assert torch.isfinite(tensor).all(), key
        assert torch.equal(tensor, again.state_dict()[key])
    assert not torch.equal(first.W_E, other.W_E)
    double = HookedGPT(config(name), seed=0, dtype=torch.float64)
    assert torch.equal(double.W_E.float(), first.W_E)


def test_building_a_model_leaves_torchs_own_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    HookedGPT(config("course"))
    assert torch.equal(torch.rand(3), expected)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_per_head_weights_are_views_and_writing_into_them_changes_the_model(name: str) -> None:
    model = make(name)
    tokens = random_tokens(model.config)
    before = model(tokens)
    attn = model.blocks[0].attn
    c = model.config
    assert attn.W_Q.shape == (c.n_heads, c.d_model, c.d_head)
    assert attn.W_K.shape == attn.W_V.shape == (c.n_kv_heads, c.d_model, c.d_head)
    assert attn.W_O.shape == (c.n_heads, c.d_head, c.d_model)
    with torch.no_grad():
        attn.W_V[0].zero_()
    assert not torch.allclose(model(tokens), before, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        for weight in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O):
            weight.zero_()
    assert not attn.qkv.weight.any()
    assert not attn.out.weight.any()


@pytest.mark.parametrize("name", NAMES)
def test_stacked_weights_are_copies_with_query_heads(name: str) -> None:
    model = make(name)
    c = model.config
    for weight in (model.W_Q, model.W_K, model.W_V):
        assert weight.shape == (c.n_layers, c.n_heads, c.d_model, c.d_head)
    for bias in (model.b_Q, model.b_K, model.b_V):
        assert bias.shape == (c.n_layers, c.n_heads, c.d_head)
    assert model.b_O.shape == (c.n_layers, c.d_model)
    before = model.blocks[0].attn.W_K.clone()
    model.W_K[0].detach().zero_()
    assert torch.equal(model.blocks[0].attn.W_K, before)
    for head in range(c.n_heads):
        assert torch.equal(model.W_K[0, head], model.blocks[0].attn.W_K[head // c.group_size])


@pytest.mark.parametrize("name", NAMES)
def test_one_heads_circuits_are_the_products_of_its_weights(name: str) -> None:
    """Field report 13: query head h reads key head h // group size."""
    model = make(name)
    layer, head = model.config.n_layers - 1, model.config.n_heads - 1
    ov, qk = model.OV[layer, head], model.QK[layer, head]
    assert isinstance(ov, FactoredMatrix)
    torch.testing.assert_close(ov.AB, model.W_V[layer, head] @ model.W_O[layer, head])
    torch.testing.assert_close(qk.AB, model.W_Q[layer, head] @ model.W_K[layer, head].T)
    torch.testing.assert_close(model.W_OV[:, head].AB[layer], ov.AB)
    torch.testing.assert_close(model.W_QK[-1, -1].AB, qk.AB)
    assert model.OV.shape == (model.config.n_layers, model.config.n_heads, model.config.d_model, model.config.d_model)


def test_a_head_that_does_not_exist_is_refused() -> None:
    model = make("course")
    with pytest.raises(IndexError, match="head 3 is not in a model of 3 heads"):
        model.OV[0, 3]
    with pytest.raises(IndexError, match="layer 2 is not in a model of 2 layers"):
        model.QK[2, 0]


@pytest.mark.parametrize("name", [n for n in NAMES if config(n).positions == "rotary" and not config(n).qk_norm])
def test_the_scores_of_a_rotary_model_are_its_qk_circuit_at_their_offset(name: str) -> None:
    """Field report 14: the offset is part of the question."""
    model = make(name)
    if model.config.bias_qkv:
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.bias.zero_()
    _, cache = model.run_with_cache(random_tokens(model.config), lambda name: True)
    q, k = cache["rot_q", 0], cache["rot_k", 0]
    block, stream = model.blocks[0], cache["resid_pre", 0]
    read = block.ln1(stream)
    for head in range(model.config.n_heads):
        for query, key in ((7, 7), (7, 3), (12, 0)):
            bilinear = read[:, query] @ model.QK.at_offset(query - key)[0, head].AB
            found = (bilinear * read[:, key]).sum(-1)
            expected = (q[:, query, head] * k[:, key, head // model.config.group_size]).sum(-1)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert "Δ=4" in repr(model.QK.at_offset(4)[0, 0])
    with pytest.raises(ValueError, match="depends on no offset"):
        make("course").QK.at_offset(1)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotating_keeps_lengths_and_composes(layout: str) -> None:
    frequencies = rotary_frequencies(config("rotary_partial"))
    x = torch.randn(2, 9, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def at(positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, rotary_tables(frequencies, positions, torch.float64), layout)

    p = torch.arange(9)
    torch.testing.assert_close(at(p).norm(dim=-1), x.norm(dim=-1))
    twice = rotate(at(p), rotary_tables(frequencies, 2 * p, torch.float64), layout)
    torch.testing.assert_close(twice, at(3 * p))
    assert torch.equal(at(p)[..., 6:], x[..., 6:])


def test_weights_that_are_absent_say_why() -> None:
    with pytest.raises(AttributeError, match="no W_in: attn_only is True"):
        make("attn_only").W_in  # noqa: B018 (the access is the test)
    with pytest.raises(AttributeError, match="no W_gate: gated_mlp is False"):
        make("course").W_gate  # noqa: B018
    with pytest.raises(AttributeError, match="no W_pos: positions is 'rotary'"):
        make("rotary").W_pos  # noqa: B018


def test_a_state_dict_that_does_not_fit_is_refused_with_all_its_faults() -> None:
    model = make("course")
    state = dict(model.state_dict())
    state["blocks.0.attn.qkv.weight"] = torch.zeros(3, 4, dtype=torch.float64)
    del state["ln_final.w"]
    state["surprise"] = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="do not fit") as caught:
        HookedGPT.from_state_dict(model.config, state)
    for fault in ("missing tensor ln_final.w", "unexpected tensor surprise", "shape [3, 4], expected [45, 15]"):
        assert fault in str(caught.value)


def test_a_model_built_from_tensors_shares_them() -> None:
    model = make("course")
    twin = HookedGPT.from_state_dict(model.config, model.state_dict())
    assert twin.W_E.data_ptr() == model.W_E.data_ptr()
    assert torch.equal(twin(random_tokens(model.config)), model(random_tokens(model.config)))


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.tensor([[1, 2, 17]]), IndexError, r"token id 17 at batch 0, position 2 is not in a vocabulary of 17"),
        (torch.tensor([[1, -1]]), IndexError, "token id -1 at batch 0, position 1"),
        (torch.zeros(1, 20, dtype=torch.long), ValueError, "20 tokens long, but n_ctx is 19"),
        (torch.zeros(1, 0, dtype=torch.long), ValueError, r"at least one token, but the shape is \[1, 0\]"),
        (torch.zeros(3, dtype=torch.long), ValueError, r"shape \[batch pos\], not \[3\]; for one sequence write"),
        (torch.zeros(1, 3), TypeError, "whole numbers, not torch.float32"),
    ],
)
def test_tokens_that_mean_nothing_are_refused(tokens: torch.Tensor, error: type[Exception], message: str) -> None:
    from circuits.tokens import check_tokens

    with pytest.raises(error, match=message):
        check_tokens(tokens, config("course"))


def test_things_that_are_no_tokens_are_refused() -> None:
    from circuits.tokens import check_tokens

    with pytest.raises(TypeError, match=r"not text; model.to_tokens"):
        check_tokens("hello", config("course"))
    with pytest.raises(TypeError, match="not list"):
        check_tokens([[1, 2]], config("course"))


def test_masks_that_mean_nothing_are_refused() -> None:
    from circuits.tokens import check_mask

    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"shape \[2, 2\], expected that of the tokens, \[2, 3\]"):
        check_mask(torch.ones(2, 2), tokens)
    with pytest.raises(ValueError, match="row 1 of attention_mask is all padding"):
        check_mask(torch.tensor([[1, 1, 1], [0, 0, 0]]), tokens)
    with pytest.raises(TypeError, match=r"only 0 .* and 1"):
        check_mask(torch.tensor([[1, 1, 2], [0, 0, 1]]), tokens)


def test_a_loss_needs_two_positions() -> None:
    with pytest.raises(ValueError, match="at least 2 positions; got 1"):
        make("course").loss(torch.zeros(1, 1, dtype=torch.long))


def test_a_model_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        make("course").to_tokens("hello")


# --- generation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_generating_with_kept_keys_equals_running_the_whole_sequence(name: str) -> None:
    model = make(name)
    prompt = random_tokens(model.config, batch=3, pos=4)
    found = model.generate(prompt, 9, temperature=0)
    expected = prompt
    for _ in range(9):
        expected = torch.cat((expected, model(expected)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_padded_prompts_continue_as_they_would_alone(name: str) -> None:
    model = make(name)
    prompts = random_prompts(model.config, (7, 4, 2))
    tokens, mask = pad(prompts, "left")
    found = model.generate(tokens, 6, temperature=0, attention_mask=mask)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], 6, temperature=0)
        assert torch.equal(found[row, -6:], alone[0, -6:])


def test_the_seed_decides_what_is_drawn_and_top_k_limits_it() -> None:
    model = make("course")
    prompt = random_tokens(model.config, batch=2, pos=4)
    assert torch.equal(model.generate(prompt, 8, seed=3), model.generate(prompt, 8, seed=3))
    assert not torch.equal(model.generate(prompt, 8, seed=3), model.generate(prompt, 8, seed=4))
    assert torch.equal(model.generate(prompt, 8, top_k=1), model.generate(prompt, 8, temperature=0))


def test_a_finished_sequence_repeats_its_last_token() -> None:
    model = make("course")
    prompt = random_tokens(model.config, batch=3, pos=2)
    stop = int(model.generate(prompt, 1, temperature=0)[0, -1])
    found = model.generate(prompt, 10, temperature=0, stop_at=stop)
    assert (found[0, 2:] == stop).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 16}, "4 tokens and 16 more make 20, but n_ctx is 19"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"max_new_tokens": 1, "temperature": -1.0}, "temperature must be at least 0"),
        ({"max_new_tokens": 1, "temperature": float("nan")}, "temperature must be at least 0"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k must be at least 1"),
        ({"max_new_tokens": 1, "attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padded on the left"),
    ],
)
def test_generation_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("course").generate(torch.zeros(1, 4, dtype=torch.long), **options)  # type: ignore[arg-type]


# --- types and devices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["course", "like_llama", "like_gemma2", "post_norm"])
def test_half_precision_runs_and_stays_near(name: str, dtype: torch.dtype) -> None:
    exact = make(name)
    half = HookedGPT.from_state_dict(exact.config, {k: t.to(dtype) for k, t in exact.state_dict().items()})
    tokens = random_tokens(exact.config)
    logits, cache = half.run_with_cache(tokens, lambda _: True)
    assert logits.dtype == dtype
    assert all(activation.dtype == dtype for activation in cache.values())
    same = HookedGPT.from_state_dict(exact.config, {k: t.double() for k, t in half.state_dict().items()})
    error = (logits.double() - same(tokens)).abs().max() / same(tokens).abs().max()
    # Every step rounds; a few dozen of them stand between the tokens and the logits.
    assert error < 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_of_every_width_are_token_ids(dtype: torch.dtype) -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    with unchecked():  # annotations say Int, which leaves out the unsigned types
        assert torch.equal(model(tokens.to(dtype)), model(tokens))


def test_tokens_elsewhere_and_sparse_tokens_are_refused() -> None:
    model = make("course")
    with pytest.raises(ValueError, match="tokens are on meta, the model on cpu"):
        model(random_tokens(model.config).to("meta"))
    with pytest.raises(TypeError, match="must be a dense tensor"):
        model(random_tokens(model.config).to_sparse())


def test_a_loss_of_nothing_is_refused_and_not_nan() -> None:
    model = make("course")
    tokens = random_tokens(model.config, batch=2, pos=3)
    apart = torch.tensor([[1, 0, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match="no two stand together"):
        model.loss(tokens, apart)
    assert torch.equal(model.loss(tokens, apart, per_token=True), torch.zeros(2, 2, dtype=torch.float64))


def test_the_loss_of_a_model_in_half_precision_has_all_its_digits() -> None:
    model = make("course").to(torch.bfloat16)
    tokens = random_tokens(model.config)
    with torch.no_grad():
        logits = model(tokens).double()
        loss = model.loss(tokens)
    exact = -logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("seed", [None, "1", 1.5, True])
def test_seeds_that_are_no_whole_numbers_are_refused(seed: object) -> None:
    with unchecked(), pytest.raises(TypeError, match="seed must be a whole number"):
        HookedGPT(GPTConfig.course(), seed)  # type: ignore[arg-type]


def test_state_that_holds_no_tensors_is_refused() -> None:
    with unchecked(), pytest.raises(ValueError, match=r"embed\.weight: ndarray, not a tensor"):
        HookedGPT.from_state_dict(GPTConfig.course(), {"embed.weight": np.zeros(3)})  # type: ignore[dict-item]
    with unchecked(), pytest.raises(TypeError, match="expected a mapping from names to tensors, not NoneType"):
        HookedGPT.from_state_dict(GPTConfig.course(), None)  # type: ignore[arg-type]


def test_generating_within_hooks_that_it_cannot_apply_is_refused() -> None:
    model = make("course")
    with (
        model.hooks([("hook_embed", lambda a, hook: a * 0)]),
        pytest.raises(ValueError, match="generate does not apply hooks"),
    ):
        model.generate(random_tokens(model.config, pos=3), 2)


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_is_chosen_from_logits_that_are_nan(temperature: float) -> None:
    model = make("course")
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="the logits hold NaN"):
        model.generate(random_tokens(model.config, pos=3), 2, temperature=temperature)


def test_a_temperature_near_zero_takes_the_likeliest_token() -> None:
    model = make("course")
    tokens = random_tokens(model.config, pos=3)
    assert torch.equal(model.generate(tokens, 2, temperature=1e-300), model.generate(tokens, 2, temperature=0))


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 1.5}, {"top_k": 1.5}, {"seed": None}, {"stop_at": "a"}, {"temperature": "1"}]
)
def test_generation_options_of_the_wrong_type_are_refused(options: dict[str, object]) -> None:
    model = make("course")
    with unchecked(), pytest.raises(TypeError, match=rf"{next(iter(options))} must be a (whole )?number, not"):
        model.generate(random_tokens(model.config, pos=3), **({"max_new_tokens": 2} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_survives_copying_and_pickling(copied: Callable[[HookedGPT], HookedGPT]) -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    assert torch.equal(copied(model)(tokens), model(tokens))


@pytest.mark.parametrize("offset", [None, 1.5, "1", True])
def test_an_offset_is_a_whole_number(offset: object) -> None:
    with unchecked(), pytest.raises(TypeError, match="offset must be a whole number"):
        make("rotary").QK.at_offset(offset)  # type: ignore[arg-type]
