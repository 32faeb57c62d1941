"""Hooks are arguments of a pass: looking changes nothing, changes reach everything downstream, nothing stays."""

from __future__ import annotations

import threading

import pytest
import torch
from unchecked import unchecked

from circuits.names import hook_names
from tests.architectures import NAMES, config, make
from tests.batches import random_tokens

PRE_NORM = [name for name in NAMES if config(name).norm is not None and config(name).norm_placement == "pre"]
SEQUENTIAL_PRE_NORM = [name for name in PRE_NORM if config(name).has_resid_mid]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_the_same_whatever_is_captured(name: str) -> None:
    """Field reports 1 and 2: split inputs and per-head results change nothing, grouped queries included."""
    model = make(name)
    tokens = random_tokens(model.config)
    plain = model(tokens)
    for names_filter in (None, lambda _: True, "blocks.0.hook_q_input", ["blocks.0.attn.hook_result"]):
        logits, _ = model.run_with_cache(tokens, names_filter)
        torch.testing.assert_close(logits, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_name_is_captured_once_and_in_order(name: str) -> None:
    """Field report 3: one value per name; and the list of names is the order of the pass."""
    model = make(name)
    seen: list[str] = []

    def note(activation: torch.Tensor, hook: object) -> None:
        seen.append(hook.name)  # type: ignore[attr-defined]

    model.run_with_hooks(random_tokens(model.config), [(lambda _: True, note)])
    assert sorted(seen) == sorted(model.hook_names)
    assert model.hook_names == hook_names(model.config)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_edit_of_any_name_reaches_the_logits(name: str) -> None:
    """Field reports 6 and 8: no hook point is ignored, norms and scores included."""
    model = make(name)
    tokens = random_tokens(model.config)
    clean = model(tokens)
    noise = torch.Generator().manual_seed(3)

    def shake(activation: torch.Tensor, hook: object) -> torch.Tensor:
        return activation * (1.5 + torch.rand(activation.shape, generator=noise, dtype=activation.dtype))

    for hook_name in model.hook_names:
        changed = model.run_with_hooks(tokens, [(hook_name, shake)])
        assert not torch.allclose(changed, clean, rtol=1e-6, atol=1e-6), hook_name


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_an_edit_that_changes_nothing_changes_no_logit(name: str) -> None:
    model = make(name)
    tokens = random_tokens(model.config, batch=2, pos=7)
    clean = model(tokens)
    for hook_name in model.hook_names:
        same = model.run_with_hooks(tokens, [(hook_name, lambda activation, hook: activation)])
        torch.testing.assert_close(same, clean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_no_edit_of_scores_or_pattern_leaks_the_future(name: str) -> None:
    model = make(name)
    tokens = random_tokens(model.config)
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % model.config.d_vocab
    for stem in ("hook_attn_scores", "hook_pattern"):
        everywhere = [(lambda n, stem=stem: n.endswith(stem), lambda x, hook: torch.ones_like(x))]
        first = model.run_with_hooks(tokens, everywhere)
        second = model.run_with_hooks(other, everywhere)
        torch.testing.assert_close(first[:, :7], second[:, :7], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SEQUENTIAL_PRE_NORM)
def test_resid_mid_set_to_zero_leaves_the_mlp_alone(name: str) -> None:
    """Field report 8: an edit between attention and MLP reaches the skip path too."""
    model = make(name)
    last = model.config.n_layers - 1
    zero = [(f"blocks.{last}.hook_resid_mid", lambda x, hook: torch.zeros_like(x))]
    _, cache = model.run_with_cache(random_tokens(model.config), fwd_hooks=zero)
    assert torch.equal(cache["resid_post", last], cache["mlp_out", last])


@pytest.mark.parametrize("name", NAMES)
def test_a_head_with_an_edited_input_is_normalised_for_itself(name: str) -> None:
    """The edited head alone changes, and reads the norm of what it was given; the shared scale stays."""
    model = make(name)
    tokens = random_tokens(model.config)
    _, clean = model.run_with_cache(tokens)

    def scale_head_0(x: torch.Tensor, hook: object) -> None:
        x[:, :, 0] = 3 * x[:, :, 0] + torch.arange(x.shape[-1], dtype=x.dtype)

    _, changed = model.run_with_cache(tokens, fwd_hooks=[("blocks.0.hook_q_input", scale_head_0)])
    block, stream = model.blocks[0], clean["resid_pre", 0]
    given = 3 * stream + torch.arange(stream.shape[-1], dtype=stream.dtype)
    read = block.ln1(given) if block.pre and block.ln1 is not None else given
    expected = read @ block.attn.W_Q[0]
    if block.attn.b_Q is not None:
        expected = expected + block.attn.b_Q[0]
    torch.testing.assert_close(changed["q", 0][:, :, 0], expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(changed["q", 0][:, :, 1:], clean["q", 0][:, :, 1:], rtol=1e-10, atol=1e-10)
    if block.pre and block.ln1 is not None:
        assert torch.equal(changed["scale", 0, "ln1"], clean["scale", 0, "ln1"])


def test_looking_at_split_inputs_does_not_shield_them_from_an_edit_of_the_norm() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    double = [("blocks.0.ln1.hook_scale", lambda x, hook: 2 * x)]
    _, looked = model.run_with_cache(tokens, ["blocks.0.hook_q_input", "blocks.0.attn.hook_q"], fwd_hooks=double)
    _, plain = model.run_with_cache(tokens, ["blocks.0.attn.hook_q"], fwd_hooks=double)
    torch.testing.assert_close(looked["q", 0], plain["q", 0], rtol=1e-10, atol=1e-10)


# --- nothing stays --------------------------------------------------------------------------------------------------


def test_a_hook_that_writes_in_place_changes_its_own_activation_only() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    _, clean = model.run_with_cache(tokens)

    def zero(x: torch.Tensor, hook: object) -> None:
        x.zero_()

    _, cache = model.run_with_cache(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", zero), ("hook_pos_embed", zero)])
    assert not torch.equal(cache["resid_post", 0], torch.zeros_like(cache["resid_post", 0]))
    assert torch.equal(cache["resid_pre", 1], torch.zeros_like(cache["resid_pre", 1]))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(model.run_with_cache(tokens)[1]["resid_pre", 1], clean["resid_pre", 1])


def test_an_exception_inside_a_hook_leaves_nothing_behind() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    clean = model(tokens)

    def fail(x: torch.Tensor, hook: object) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), model.hooks([("blocks.0.attn.hook_z", fail)]):
        model(tokens)
    assert torch.equal(model(tokens), clean)


def test_scoped_hooks_hold_within_their_block_and_nest() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    clean = model(tokens)
    seen: list[str] = []

    def note(label: str):  # type: ignore[no-untyped-def]
        return lambda x, hook: seen.append(label)

    with model.hooks([("hook_embed", note("outer"))]):
        with model.hooks([("hook_embed", note("inner"))]):
            model.run_with_cache(tokens)
        model.run_with_hooks(tokens, [("hook_embed", note("call"))])
    assert torch.equal(model(tokens), clean)
    assert seen == ["outer", "inner", "outer", "call"]


def test_run_with_cache_keeps_the_hooks_around_it() -> None:
    """Field report 5: it touches only its own."""
    model = make("course")
    tokens = random_tokens(model.config)
    with model.hooks([("hook_embed", lambda x, hook: 2 * x)]):
        doubled = model(tokens)
        model.run_with_cache(tokens)
        assert torch.equal(model(tokens), doubled)


def test_scoped_hooks_belong_to_one_model_and_one_thread() -> None:
    model, other = make("course"), make("course", seed=1)
    tokens = random_tokens(model.config)
    clean, other_clean = model(tokens), other(tokens)
    found: list[torch.Tensor] = []
    with model.hooks([("hook_embed", lambda x, hook: 2 * x)]):
        assert torch.equal(other(tokens), other_clean)
        thread = threading.Thread(target=lambda: found.append(model(tokens)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], clean)


def test_two_threads_run_one_model_with_different_hooks() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    expected = {s: model.run_with_hooks(tokens, [("hook_embed", lambda x, hook, s=s: s * x)]) for s in (2.0, 3.0)}
    wrong: list[float] = []

    def work(scale: float) -> None:
        for _ in range(20):
            found = model.run_with_hooks(tokens, [("hook_embed", lambda x, hook: scale * x)])
            if not torch.equal(found, expected[scale]):
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_only_what_is_asked_for_is_held() -> None:
    """Field report 10: a captured slice does not keep the buffer it was cut from."""
    model = make("grouped_query")
    _, cache = model.run_with_cache(random_tokens(model.config), ["blocks.0.attn.hook_v", "blocks.1.hook_resid_post"])
    assert list(cache) == ["blocks.0.attn.hook_v", "blocks.1.hook_resid_post"]
    for activation in cache.values():
        assert activation.untyped_storage().nbytes() == activation.numel() * activation.element_size()


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_captured_activations_match_small_changes(name: str) -> None:
    """Field reports 4 and 6: gradients are an ordinary result, for every name, and leave nothing behind."""
    model = make(name)
    tokens = random_tokens(model.config, batch=1, pos=5)
    weight = torch.randn(model.config.d_vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def scalar(logits: torch.Tensor) -> torch.Tensor:
        return (logits.log_softmax(-1) * weight).sum()

    value, cache, grads = model.run_with_grads(tokens, scalar, lambda _: True)
    assert list(cache) == list(grads)
    generator = torch.Generator().manual_seed(2)
    step = 1e-6
    for hook_name in model.hook_names:
        gradient = grads[hook_name]
        if hook_name.endswith("hook_attn_scores"):
            assert torch.isfinite(gradient).all()
            continue
        direction = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
        moved = [
            scalar(model.run_with_hooks(tokens, [(hook_name, lambda x, hook, s=s, d=direction: x + s * d)]))
            for s in (step, -step)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        predicted = (gradient * direction).sum()
        torch.testing.assert_close(predicted, slope, rtol=1e-5, atol=1e-5, msg=lambda m, n=hook_name: f"{n}: {m}")
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(value, scalar(model(tokens)).detach(), rtol=1e-12, atol=1e-12)


def test_gradients_work_with_frozen_parameters_and_within_no_grad() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    expected = model.run_with_grads(tokens, lambda z: z.logsumexp(-1).sum(), "blocks.0.attn.hook_z")[2]
    model.requires_grad_(False)
    with torch.no_grad():
        found = model.run_with_grads(tokens, lambda z: z.logsumexp(-1).sum(), "blocks.0.attn.hook_z")[2]
    torch.testing.assert_close(found["z", 0], expected["z", 0], rtol=1e-10, atol=1e-10)


def test_gradients_flow_through_edits() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    logits = model.run_with_hooks(tokens, [("blocks.0.ln1.hook_scale", lambda x, hook: factor * x)])
    (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), factor)
    assert gradient.abs() > 1e-6


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_misspelt_name_gets_the_closest_names() -> None:
    """Field report 9: never an empty cache."""
    model = make("course")
    tokens = random_tokens(model.config)
    calls = (
        lambda: model.run_with_cache(tokens, "blocks.0.attn.hook_patern"),
        lambda: model.run_with_hooks(tokens, [("blocks.0.attn.hook_patern", lambda x, hook: x)]),
        lambda: model.hooks([("blocks.0.attn.hook_patern", lambda x, hook: x)]).__enter__(),
    )
    for call in calls:
        with pytest.raises(KeyError, match=r"no hook named .*hook_patern.*closest.*blocks\.0\.attn\.hook_pattern"):
            call()
    with pytest.raises(KeyError, match="no hook named"):
        model.run_with_cache(tokens, "blocks.9.hook_resid_pre")


def test_a_predicate_that_selects_nothing_is_refused_for_edits() -> None:
    model = make("course")
    with pytest.raises(KeyError, match="selects no hook"):
        model.run_with_hooks(random_tokens(model.config), [(lambda name: False, lambda x, hook: x)])


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x, hook: x[:, :, :1], ValueError, r"blocks.0.attn.hook_z returned shape .* expected \[4, 13, 3, 5\]"),
        (lambda x, hook: x.float(), ValueError, r"returned torch.float32.*expected torch.float64"),
        (lambda x, hook: 3.0, TypeError, r"returned float, not a tensor"),
    ],
)
def test_a_hook_that_returns_something_else_is_named(function, error, message) -> None:  # type: ignore[no-untyped-def]
    model = make("course")
    with pytest.raises(error, match=message):
        model.run_with_hooks(random_tokens(model.config), [("blocks.0.attn.hook_z", function)])


def test_a_scalar_of_many_numbers_is_refused() -> None:
    model = make("course")
    with pytest.raises(ValueError, match=r"must be one number, not \[4, 13, 17\]"):
        model.run_with_grads(random_tokens(model.config), lambda z: z)


def test_a_predicate_that_selects_nothing_is_refused_for_captures() -> None:
    model = make("course")
    with pytest.raises(KeyError, match="selects no hook"):
        model.run_with_cache(random_tokens(model.config), lambda name: name.endswith("hook_patern"))


@pytest.mark.parametrize("fwd_hooks", [None, 5, "hook_embed", {"hook_embed": lambda a, hook: a}])
def test_what_is_no_list_of_hooks_is_refused(fwd_hooks) -> None:  # type: ignore[no-untyped-def]
    model = make("course")
    with unchecked(), pytest.raises(TypeError, match="fwd_hooks must be a list"):
        model.run_with_hooks(random_tokens(model.config), fwd_hooks)


def test_a_hook_that_returns_a_sparse_tensor_is_named() -> None:
    model = make("course")
    with pytest.raises(ValueError, match=r"hook_embed returned .*sparse"):
        model.run_with_hooks(random_tokens(model.config), [("hook_embed", lambda a, hook: a.to_sparse())])


@pytest.mark.parametrize("scalar", [lambda z: z.detach().sum(), lambda z: torch.tensor(1.0), lambda z: z.argmax()])
def test_a_scalar_that_does_not_depend_on_the_logits_is_refused(scalar) -> None:  # type: ignore[no-untyped-def]
    model = make("course")
    with pytest.raises(ValueError, match="does not depend on the logits"):
        model.run_with_grads(random_tokens(model.config), scalar)


def test_gradients_work_within_inference_mode() -> None:
    model = make("course")
    tokens = random_tokens(model.config)
    expected = model.run_with_grads(tokens, torch.Tensor.sum, "hook_embed")[2]["hook_embed"]
    with torch.inference_mode():
        found = model.run_with_grads(tokens.clone(), torch.Tensor.sum, "hook_embed")[2]["hook_embed"]
    assert torch.equal(found, expected)
