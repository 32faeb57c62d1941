"""The logit lens."""

from __future__ import annotations

import pytest
import torch

from circuits.residual import logit_lens
from tests.architectures import NAMES
from tests.runs import run_of

EXACT = 1e-10


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
