"""GPTConfig: defaults of the lecture, fields that follow others, and nonsense refused by name."""

from __future__ import annotations

import json

import pytest
from unchecked import unchecked

from circuits import GPTConfig
from circuits.config import RotaryScaling

BASE = {"n_layers": 2, "d_model": 6, "n_heads": 3, "n_ctx": 5, "d_vocab": 7}


def test_the_course_configuration_is_the_lectures() -> None:
    config = GPTConfig.course()
    assert (config.d_vocab, config.n_ctx, config.d_model, config.n_heads, config.n_layers) == (65, 64, 128, 4, 4)
    assert (config.d_head, config.d_mlp, config.n_kv_heads) == (32, 512, 4)
    assert (config.bias_qkv, config.bias_out, config.bias_mlp, config.bias_unembed) == (False, True, True, False)
    assert config.final_norm
    assert config.n_writes == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 7, "n_heads": 2}, "d_model 7 is not n_heads 2 × d_head for any whole d_head"),
        ({"n_heads": 3, "n_kv_heads": 2}, "n_heads 3 is not a multiple of n_kv_heads 2"),
        ({"n_layers": 0}, "n_layers must be at least 1, not 0"),
        ({"act": "swish"}, "act 'swish' is not one of 'gelu', 'gelu_new', 'relu', 'silu'"),
        ({"norm": "batchnorm"}, "norm 'batchnorm' is not one of"),
        ({"parallel_blocks": True}, "parallel_blocks True is not one of False, 'shared_norm', 'two_norms'"),
        ({"norm": None, "final_norm": True}, "final_norm True needs a norm"),
        ({"norm": None, "norm_placement": "post"}, "norm_placement 'post' needs a norm"),
        ({"norm": None, "branch_norm": True}, "branch_norm True needs a norm"),
        ({"branch_norm": True, "norm_placement": "post"}, "which norm_placement 'post' replaces"),
        ({"parallel_blocks": "two_norms", "norm_placement": "post"}, "needs norm_placement 'pre'"),
        ({"parallel_blocks": "two_norms", "attn_only": True}, "needs MLPs, but attn_only is True"),
        ({"gated_mlp": True, "attn_only": True}, "gated_mlp True needs MLPs"),
        ({"attn_only": True, "d_mlp": 4}, "d_mlp 4 was given for an attention-only model"),
        ({"rotary_dim": 2}, "rotary_dim 2 was given, but positions is 'learned'"),
        ({"positions": "rotary", "d_head": 5}, "rotary_dim 5 is not an even number"),
        ({"positions": "rotary", "d_head": 4, "rotary_dim": 6}, "at most d_head 4"),
        ({"rotary_scaling": RotaryScaling(kind="linear", factor=2.0)}, "rotary_scaling needs positions 'rotary'"),
        ({"window": (3,)}, "window lists 1 layers, but n_layers is 2"),
        ({"window": (3, 0)}, "window of layer 1 must be at least 1, not 0"),
        ({"norm_eps": 0.0}, "norm_eps must be positive and finite, not 0.0"),
        ({"logit_softcap": float("nan")}, "logit_softcap must be positive and finite"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message), unchecked():
        GPTConfig.from_dict({**BASE, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layers": True}, r"n_layers must be a whole number .*, not True"),
        ({"d_model": 6.0}, r"d_model must be a whole number .*, not 6\.0"),
        ({"bias_qkv": 1}, "bias_qkv must be True or False, not 1"),
        ({"norm_eps": "small"}, "norm_eps must be a number, not 'small'"),
        ({"rotary_scaling": 2.0, "positions": "rotary"}, "rotary_scaling must be a RotaryScaling"),
    ],
)
def test_wrong_types_are_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message), unchecked():
        GPTConfig.from_dict({**BASE, **fields})


def test_an_unknown_field_gets_the_closest_name() -> None:
    with pytest.raises(ValueError, match=r"no field 'n_layer'; did you mean n_layers"):
        GPTConfig.from_dict({**BASE, "n_layer": 3})
    with pytest.raises(TypeError, match=r"no field 'd_hed'; did you mean d_head"):
        GPTConfig(**BASE).replace(d_hed=3)
    with pytest.raises(ValueError, match="lacks n_layers, d_model"):
        GPTConfig.from_dict({"n_heads": 3, "n_ctx": 4, "d_vocab": 3})
    for scaling, message in (
        ({"kind": "linear", "factr": 2.0}, "RotaryScaling has no field 'factr'; did you mean factor"),
        ({"kind": "linear"}, "the rotary scaling lacks factor"),
    ):
        with pytest.raises(ValueError, match=message):
            GPTConfig.from_dict({**BASE, "positions": "rotary", "rotary_scaling": scaling})


def test_fields_left_open_follow_the_others_when_those_change() -> None:
    config = GPTConfig.course()
    wider = config.replace(d_model=64, n_layers=2)
    assert (wider.d_head, wider.d_mlp, wider.attn_scale, wider.window) == (16, 256, 16**-0.5, (None, None))
    assert config.replace(d_head=8).replace(d_model=64).d_head == 8


def test_json_and_back_is_the_same_config() -> None:
    scaled = GPTConfig(
        **BASE,
        d_head=4,
        positions="rotary",
        window=(None, 3),
        rotary_scaling=RotaryScaling(kind="llama3", factor=8.0),
    )
    for config in (GPTConfig.course(), scaled):
        assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
