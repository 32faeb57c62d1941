"""What decomposition and attribution refuse, and how they say so."""

from __future__ import annotations

import pytest
import torch

from circuits.residual import decompose, direct_logit_attribution, logit_lens, needed_names
from circuits.residual.requirements import check_unit
from tests.architectures import config, make
from tests.batches import LENGTHS, pad, random_prompts, random_tokens
from tests.runs import POST, PRE, UNITS, run_of


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
