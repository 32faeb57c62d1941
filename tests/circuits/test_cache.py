"""ActivationCache: a read-only mapping with shorthand keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.architectures import make
from tests.batches import pad, random_prompts, random_tokens


@pytest.mark.parametrize(
    ("key", "full"),
    [
        (("pattern", 0), "blocks.0.attn.hook_pattern"),
        (("attn", 1), "blocks.1.attn.hook_pattern"),
        (("attn_scores", 1), "blocks.1.attn.hook_attn_scores"),
        (("resid_post", -1), "blocks.1.hook_resid_post"),
        (("post", 0), "blocks.0.mlp.hook_post"),
        (("z", -2), "blocks.0.attn.hook_z"),
        (("scale", 0, "ln2"), "blocks.0.ln2.hook_scale"),
        (("normalized", 1, "ln1"), "blocks.1.ln1.hook_normalized"),
        ("embed", "hook_embed"),
        ("ln_final.hook_scale", "ln_final.hook_scale"),
    ],
)
def test_a_shorthand_names_the_same_tensor(key, full: str) -> None:  # type: ignore[no-untyped-def]
    model = make("course")
    _, cache = model.run_with_cache(random_tokens(model.config))
    assert cache[key] is cache[full]
    assert key in cache


def test_the_mapping_is_read_only_and_in_the_order_of_the_pass() -> None:
    model = make("course")
    _, cache = model.run_with_cache(random_tokens(model.config))
    assert list(cache) == [name for name in model.hook_names if name in dict(cache)]
    with pytest.raises(TypeError):
        cache["hook_embed"] = torch.zeros(1)  # type: ignore[index]


def test_missing_keys_say_whether_the_name_or_the_capture_is_missing() -> None:
    model = make("course")
    _, cache = model.run_with_cache(random_tokens(model.config), "hook_embed")
    with pytest.raises(KeyError, match="was not captured; ask for it"):
        cache["pattern", 0]
    with pytest.raises(KeyError, match="closest are"):
        cache["patern", 0]
    with pytest.raises(IndexError, match="layer 7 is not in a model of 2 layers"):
        cache["pattern", 7]
    with pytest.raises(KeyError, match=r"lacks blocks\.0\.hook_resid_pre, blocks\.1\.hook_resid_pre"):
        cache.accumulated_resid()


@pytest.mark.parametrize("name", ["course", "parallel_two_norms", "attn_only"])
def test_accumulated_streams_are_the_cached_ones(name: str) -> None:
    model = make(name)
    _, cache = model.run_with_cache(random_tokens(model.config))
    streams, labels = cache.accumulated_resid(incl_mid=True)
    by_label = dict(zip(labels, streams, strict=True))
    assert torch.equal(by_label["1_pre"], cache["resid_pre", 1])
    assert torch.equal(by_label["final_post"], cache["resid_post", -1])
    assert ("0_mid" in by_label) == model.config.has_resid_mid
    assert cache.accumulated_resid(1)[1] == ["0_pre", "1_pre"]


def test_selecting_rows_keeps_the_batch_axis_and_the_mask() -> None:
    model = make("course")
    tokens, mask = pad(random_prompts(model.config), "left")
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    one = cache.select_batch(2)
    assert one["pattern", 0].shape == (1, 3, 13, 13)
    assert torch.equal(one["resid_post", 1][0], cache["resid_post", 1][2])
    assert torch.equal(one.attention_mask, mask[2:3].bool())
    assert cache.select_batch([0, 3])["q", 0].shape[0] == 2
    with pytest.raises(IndexError):
        cache.select_batch(9)


def test_a_saved_cache_loads_bit_for_bit(tmp_path: Path) -> None:
    model = make("like_llama")
    tokens, mask = pad(random_prompts(model.config), "right")
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    cache.save(tmp_path / "run.safetensors")
    again = type(cache).load(tmp_path / "run.safetensors")
    assert list(again) == list(cache)
    assert all(torch.equal(again[name], cache[name]) for name in cache)
    assert again.config == model.config
    assert torch.equal(again.attention_mask, cache.attention_mask)
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


def test_moving_and_detaching_make_new_caches() -> None:
    model = make("course")
    _, cache = model.run_with_cache(random_tokens(model.config))
    assert cache["q", 0].requires_grad
    assert not cache.detach()["q", 0].requires_grad
    assert cache.to("meta")["q", 0].device.type == "meta"
    assert cache["q", 0].device.type == "cpu"


def test_the_repr_is_short_and_says_how_much_is_held() -> None:
    model = make("course")
    _, cache = model.run_with_cache(random_tokens(model.config))
    assert "activations" in repr(cache)
    assert "MiB" in repr(cache)
    assert len(repr(cache)) < 120
