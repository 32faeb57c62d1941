"""The model against the loop-by-loop reference: every architecture, every hook name, padded or not, edited or not."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from circuits import GPTConfig, HookedGPT
from circuits.hooks import Hook
from tests import reference
from tests.architectures import NAMES, configs, make
from tests.batches import LENGTHS, SIDES, pad, random_prompts, random_tokens, real_part
from tests.exactly import EXACT, assert_exact

architectures = pytest.mark.parametrize("name", NAMES)
sides = pytest.mark.parametrize("side", SIDES)


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name)


def run_all(model: HookedGPT, tokens: torch.Tensor, mask: torch.Tensor | None = None, fwd_hooks: list | None = None):
    with torch.no_grad(), model.hooks(fwd_hooks or []):
        return model.run_with_cache(tokens, names_filter=lambda name: True, attention_mask=mask)


def assert_agrees_with_reference(model: HookedGPT, tokens: torch.Tensor) -> None:
    logits, cache = run_all(model, tokens)
    expected_logits, expected = reference.run(model.config, model.state_dict(), tokens)
    assert_exact(logits, expected_logits, "logits")
    assert set(cache) == set(expected) == set(model.hook_names)
    for name, value in expected.items():
        assert_exact(cache[name], value, name)


def assert_agrees_where_real(model: HookedGPT, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    logits, cache = run_all(model, tokens, mask)
    expected_logits, expected = reference.run(model.config, model.state_dict(), tokens, mask)
    assert_where_real(mask, logits, cache, expected_logits, expected)


def assert_where_real(mask, logits, cache, expected_logits, expected, when: str = "") -> None:
    for item, real in enumerate(mask.bool()):
        assert_exact(logits[item][real], expected_logits[item][real], "logits" + when)
        for name, value in expected.items():
            assert_exact(real_part(name, cache[name][item], real), real_part(name, value[item], real), name + when)


@architectures
def test_logits_and_every_hook_agree_with_the_reference(name: str) -> None:
    model = model_of(name)
    assert_agrees_with_reference(model, random_tokens(model.config))


@architectures
def test_logits_of_the_fast_path_agree_with_the_reference(name: str) -> None:
    model = model_of(name)
    tokens = random_tokens(model.config, seed=1)
    with torch.no_grad():
        logits = model(tokens)
    assert_exact(logits, reference.run(model.config, model.state_dict(), tokens)[0])


@architectures
@sides
def test_every_hook_agrees_with_the_reference_where_tokens_are_real(name: str, side: str) -> None:
    model = model_of(name)
    tokens, mask = pad(random_prompts(model.config), side)
    assert_agrees_where_real(model, tokens, mask)


@architectures
def test_loss_agrees_with_the_reference_padded_or_not(name: str) -> None:
    model = model_of(name)
    tokens = random_tokens(model.config)
    logits = reference.run(model.config, model.state_dict(), tokens)[0]
    with torch.no_grad():
        torch.testing.assert_close(model.loss(tokens).item(), reference.loss(logits, tokens), **EXACT)
        for side in SIDES:
            tokens, mask = pad(random_prompts(model.config, lengths=(6, 2, 4)), side)
            logits = reference.run(model.config, model.state_dict(), tokens, mask)[0]
            expected = reference.loss(logits, tokens, mask)
            torch.testing.assert_close(model.loss(tokens, attention_mask=mask).item(), expected, **EXACT)


@architectures
def test_an_edit_of_any_hook_reaches_everything_downstream_as_in_the_reference(name: str) -> None:
    model = model_of(name)
    tokens = random_tokens(model.config, batch=1, pos=5)
    for hook_name in model.hook_names:
        if hook_name.startswith("blocks.1."):
            continue  # all at once below
        edit, same_edit = matching_edits([hook_name])
        # Nothing is captured, so everything but the edited value takes the fast path.
        with torch.no_grad():
            logits = model.run_with_hooks(tokens, [(hook_name, edit)])
        expected = reference.run(model.config, model.state_dict(), tokens, edit=same_edit)[0]
        assert_exact(logits, expected, f"logits after an edit of {hook_name}")


@architectures
def test_edits_of_every_hook_of_a_layer_at_once_act_as_in_the_reference(name: str) -> None:
    model = model_of(name)
    last = f"blocks.{model.config.n_layers - 1}."
    edited = [hook_name for hook_name in model.hook_names if hook_name.startswith(last)]
    assert_edits_agree(model, random_tokens(model.config, batch=2, pos=5), None, edited)


@architectures
@sides
def test_edits_under_padding_act_as_in_the_reference(name: str, side: str) -> None:
    model = model_of(name)
    tokens, mask = pad(random_prompts(model.config, lengths=(5, 3)), side)
    for edited in (model.hook_names[::2], model.hook_names[1::2]):
        assert_edits_agree(model, tokens, mask, edited)


def matching_edits(edited: Sequence[str]):
    """The same change of some hooks, once as the model takes it and once as the reference does."""
    noise: dict[str, torch.Tensor] = {}

    def edit(activation: torch.Tensor, hook: Hook) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 + edited.index(hook.name))
        # Positive, so that an edited scale stays one; different at every position, head and coordinate.
        noise[hook.name] = 0.1 + 0.5 * torch.rand(activation.shape, generator=generator, dtype=activation.dtype)
        # Finite, so that an edit of scores tries to show the future.
        return 0.7 * activation.clamp(min=-30) + noise[hook.name]

    def same_edit(at: str, value: torch.Tensor, item: int) -> torch.Tensor | None:
        return 0.7 * value.clamp(min=-30) + noise[at][item] if at in edited else None

    return edit, same_edit


def assert_edits_agree(
    model: HookedGPT, tokens: torch.Tensor, mask: torch.Tensor | None, edited: Sequence[str]
) -> None:
    edit, same_edit = matching_edits(edited)
    logits, cache = run_all(model, tokens, mask, [(edited, edit)])
    expected_logits, expected = reference.run(model.config, model.state_dict(), tokens, mask, same_edit)
    real = torch.ones_like(tokens) if mask is None else mask
    assert_where_real(real, logits, cache, expected_logits, expected, f" after edits of {edited}")


@hypothesis.given(configs(), st.integers(0, 3), st.sampled_from([None, *SIDES]))
def test_unlisted_configs_agree_with_the_reference(config: GPTConfig, seed: int, side: str | None) -> None:
    model = make(config, seed=seed)
    if side is None:
        assert_agrees_with_reference(model, random_tokens(config, batch=2, pos=6, seed=seed))
    else:
        assert_agrees_where_real(model, *pad(random_prompts(config, lengths=(6, 4), seed=seed), side))


@architectures
def test_float32_agrees_with_the_reference_to_float_precision(name: str) -> None:
    model = make(name, dtype=torch.float32)
    tokens = random_tokens(model.config)
    state = {key: value.double() for key, value in model.state_dict().items()}
    expected = reference.run(model.config, state, tokens)[0]
    with torch.no_grad():
        error = (model(tokens).double() - expected).norm() / expected.norm()
    assert error < 1e-5


def test_the_reference_itself_does_not_see_padding() -> None:
    # A check of the oracle: padded on either side it shows what it shows for each prompt alone.
    for name in ("like_gemma2", "like_neox", "course"):
        model = model_of(name)
        prompts = random_prompts(model.config, LENGTHS)
        for side in SIDES:
            tokens, mask = pad(prompts, side)
            logits, hooks = reference.run(model.config, model.state_dict(), tokens, mask)
            for item, prompt in enumerate(prompts):
                alone, hooks_alone = reference.run(model.config, model.state_dict(), prompt[None])
                real = mask[item].bool()
                assert_exact(logits[item][real], alone[0])
                for at, value in hooks_alone.items():
                    assert_exact(real_part(at, hooks[at][item], real), value[0], at)
