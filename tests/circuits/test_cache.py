"""ActivationCache: a read-only mapping with shorthand keys."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from unchecked import unchecked

from circuits import ActivationCache
from circuits.names import full_name, hook_names
from circuits.tensorfile import CheckpointError, write_tensors
from tests.architectures import ARCHITECTURES, make
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


def small_cache() -> ActivationCache:
    model = make("course")
    return model.run_with_cache(random_tokens(model.config), ["hook_embed", "blocks.1.attn.hook_pattern"])[1].detach()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_cache_survives_copying_and_pickling(copied) -> None:  # type: ignore[no-untyped-def]
    cache = small_cache()
    again = copied(cache)
    assert list(again) == list(cache)
    assert again.config == cache.config
    assert all(torch.equal(again[name], cache[name]) for name in cache)


def test_a_cache_equals_itself_alone() -> None:
    cache = small_cache()
    assert cache == cache
    assert cache != small_cache()
    assert len({cache, cache}) == 1


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [1]),
        (-1, [3]),
        (np.int64(2), [2]),
        (torch.tensor(2), [2]),
        (slice(1, 3), [1, 2]),
        ((3, 0), [3, 0]),
        (np.array([1, 1]), [1, 1]),
        (torch.tensor([3]), [3]),
        ([True, False, False, True], [0, 3]),
        (torch.tensor([False, True, True, False]), [1, 2]),
    ],
)
def test_every_way_to_name_rows_keeps_the_batch_axis(rows, expected: list[int]) -> None:  # type: ignore[no-untyped-def]
    cache = small_cache()
    with unchecked():
        chosen = cache.select_batch(rows)
    for name, activation in cache.items():
        assert torch.equal(chosen[name], activation[torch.tensor(expected)])


@pytest.mark.parametrize("rows", [4, -5, [0, 9], [], slice(9, 12), [False] * 4])
def test_rows_that_the_batch_lacks_are_refused(rows) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IndexError, match="batch of 4"):
        small_cache().select_batch(rows)


@pytest.mark.parametrize("rows", [True, 1.5, "a", None, [0.5], [True, False]])
def test_what_is_no_row_is_refused(rows) -> None:  # type: ignore[no-untyped-def]
    with unchecked(), pytest.raises(TypeError, match="rows must be a row, a slice"):
        small_cache().select_batch(rows)


def test_layers_may_be_numbers_of_numpy_and_nothing_but_numbers() -> None:
    cache = small_cache()
    with unchecked():
        assert cache["pattern", np.int64(1)] is cache["pattern", 1]
        for layer in (True, 1.0, "1", None):
            with pytest.raises(KeyError, match=r"expected a hook name or \(stem, layer\)"):
                cache["pattern", layer]
        with pytest.raises(TypeError, match="a layer must be a whole number, not 1"):
            cache.accumulated_resid(1.0)
    with pytest.raises(IndexError, match="layer 2 is not in a model of 2 layers"):
        cache.accumulated_resid(2)


def test_a_stem_without_its_layer_says_that_one_is_needed() -> None:
    with pytest.raises(KeyError, match=r"stands in every layer; say which: \('pattern', 0\)"):
        small_cache()["pattern"]


def test_files_that_are_no_cache_are_refused_and_no_half_file_is_left(tmp_path: Path) -> None:
    cache = small_cache()
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        cache.save(tmp_path / "nowhere" / "c.safetensors")
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "c.safetensors"
    cache.save(path)
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        ActivationCache.load(path)
    write_tensors(path, {}, {"format": 1, "kind": "model"})
    with pytest.raises(CheckpointError, match="holds a model, not a saved ActivationCache"):
        ActivationCache.load(path)


def test_stems_are_also_known_by_the_names_of_transformer_lens() -> None:
    for theirs, ours in [("mlp_post", "post"), ("mlp_pre", "pre"), ("query", "q"), ("attn_logits", "attn_scores")]:
        names = hook_names(ARCHITECTURES["course"])
        assert full_name((theirs, 1), names, 2) == full_name((ours, 1), names, 2)
