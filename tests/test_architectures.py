"""The list of architectures covers what it says it covers."""

from __future__ import annotations

import dataclasses
import itertools

import hypothesis
import pytest

from circuits import GPTConfig
from tests.architectures import ARCHITECTURES, NAMES, configs, make
from tests.batches import BATCH, POS


def test_every_field_of_the_config_is_varied() -> None:
    for field in dataclasses.fields(GPTConfig):
        if field.name in ("n_ctx", "d_vocab"):
            continue
        values = {getattr(config, field.name) for config in ARCHITECTURES.values()}
        assert len(values) > 1, f"{field.name} is {values} in every architecture"


def test_every_choice_of_a_field_is_taken() -> None:
    def taken(field: str) -> set[object]:
        return {getattr(config, field) for config in ARCHITECTURES.values()}

    assert taken("act") == {"gelu", "gelu_new", "relu", "silu"}
    assert taken("norm") == {"layernorm", "rmsnorm", None}
    assert taken("norm_placement") == {"pre", "post"}
    assert taken("positions") == {"learned", "rotary", None}
    assert taken("rotary_layout") == {"half", "interleaved"}
    assert taken("parallel_blocks") == {False, "shared_norm", "two_norms"}
    assert {s.kind if s else None for s in taken("rotary_scaling")} == {None, "linear", "llama3"}


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_a_different_number(name: str) -> None:
    config = ARCHITECTURES[name]
    sizes = [BATCH, POS, config.n_layers, config.n_heads, config.d_head, config.d_model, config.n_ctx, config.d_vocab]
    sizes += [config.d_mlp] if config.has_mlp else []
    # One layer and one shared key-value head are special cases that have no other size.
    sizes += [config.n_kv_heads] if 1 < config.n_kv_heads < config.n_heads else []
    for a, b in itertools.combinations(sizes, 2):
        assert a != b, sizes


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_of_a_made_model_is_trivial(name: str) -> None:
    for parameter_name, parameter in make(name).named_parameters():
        neutral = 1.0 if parameter_name.endswith(".w") else 0.0
        distance = (parameter - neutral).abs()
        assert distance.max() > 0.2, parameter_name
        assert parameter.std() > 0.05, parameter_name


@hypothesis.given(configs())
def test_drawn_configs_survive_the_way_through_plain_data(config: GPTConfig) -> None:
    assert GPTConfig.from_dict(config.to_dict()) == config
