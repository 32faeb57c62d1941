"""A name of TransformerLens that is not here says what to write instead."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import circuits
from circuits import HookedGPT, lens_names
from tests.runs import run_of


@pytest.mark.parametrize("name", lens_names.MODEL)
def test_a_missing_method_of_the_model_says_what_takes_its_place(name) -> None:
    with pytest.raises(AttributeError, match=re.escape(lens_names.MODEL[name])):
        getattr(run_of("course")[0], name)


@pytest.mark.parametrize("name", lens_names.CACHE)
def test_a_missing_method_of_the_cache_says_what_takes_its_place(name) -> None:
    with pytest.raises(AttributeError, match=re.escape(lens_names.CACHE[name])):
        getattr(run_of("course")[3], name)


def test_other_missing_names_are_plain_errors() -> None:
    model, _, _, cache = run_of("course")
    for thing in (model, cache):
        with pytest.raises(AttributeError, match=r"object has no attribute 'colour'$"):
            thing.colour  # noqa: B018
    assert not hasattr(cache, "decompose_resid")
    assert copy.copy(cache)["hook_embed"] is cache["hook_embed"]


def test_the_class_of_transformer_lens_is_known_by_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'HookedTransformer'; here it is HookedGPT, made by"):
        circuits.HookedTransformer  # noqa: B018


def test_what_is_named_instead_exists() -> None:
    hints = " ".join([*lens_names.MODEL.values(), *lens_names.CACHE.values()])
    methods = set(re.findall(r"\bmodel\.(\w+)", hints)) | set(re.findall(r"HookedGPT\.(\w+)", hints))
    model, _, _, cache = run_of("course")
    assert [name for name in methods if not hasattr(model, name)] == []
    assert [name for name in re.findall(r"\bcache\.(\w+)", hints) if not hasattr(cache, name)] == []
    assert isinstance(model, HookedGPT)


def test_activations_of_all_layers_are_stacked() -> None:
    cache = run_of("course")[3]
    stacked = cache.stack_activation("pattern")
    assert stacked.shape[0] == cache.config.n_layers
    assert torch.equal(stacked[1], cache["pattern", 1])
    with pytest.raises(KeyError, match="closest are"):
        cache.stack_activation("patern")


def test_labels_of_all_heads_are_in_the_order_of_the_weights() -> None:
    model = run_of("course")[0]
    assert model.all_head_labels == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]
