"""Patches against runs edited by hand, the compiled induction head, and prompts that do not correspond."""

from __future__ import annotations

import architectures
import batches
import compiled
import pytest
import torch

from analysis.metrics import logit_diff, loss_per_prompt
from analysis.patching import activation_patch, patch_plan

QUIET = {"progress": False}
SITES = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "head": "attn.hook_z",
    "head_q": "attn.hook_q",
    "head_k": "attn.hook_k",
    "head_v": "attn.hook_v",
    "pattern": "attn.hook_pattern",
}


def setting(name, seed=1):
    """A model, two batches that differ from some position on, and a metric."""
    model = architectures.make(name)
    clean = batches.random_tokens(model.config)
    corrupt = batches.random_tokens(model.config, seed=seed)
    corrupt[:, :4] = clean[:, :4]
    corrupt[0, :9] = clean[0, :9]
    corrupt[1:, 4] = (clean[1:, 4] + 1) % model.config.d_vocab
    return model, clean, corrupt, logit_diff(3, 5)


def by_hand(model, base, source, hook, metric_value, layer, head, position):
    _, cache = model.run_with_cache(source, [hook.format(layer)])

    def replace(activation, hook):
        new = cache[hook.name]
        matrix = hook.name.endswith("pattern")
        if head is not None:
            activation, new = (x.select(1 if matrix else 2, head) for x in (activation, new))
        if position is None:
            activation.copy_(new)
        else:
            activation[:, position] = new[:, position]

    def inner(activation, hook):
        replace(activation, hook)
        return activation

    return metric_value(model.run_with_hooks(base, [(hook.format(layer), inner)]))


def difference(logits):
    return logits[:, -1, 3] - logits[:, -1, 5]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize(
    ("name", "site"),
    [
        (name, site)
        for name in ("grouped_query", "parallel_shared_norm", "like_gemma2", "post_norm")
        for site in SITES
        if (name, site) != ("parallel_shared_norm", "resid_mid")
    ],
)
def test_a_patch_is_the_hand_edited_run(name, site, direction):
    model, clean, corrupt, metric = setting(name)
    base, source = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
    for by_position in (True, False):
        found = activation_patch(
            model, clean, corrupt, site, metric=metric, by_position=by_position, direction=direction, **QUIET
        )
        n_heads = {"head_k": model.config.n_kv_heads, "head_v": model.config.n_kv_heads}.get(site, model.config.n_heads)
        heads = [None, n_heads - 1][("head" in site) or site == "pattern" :][:1]
        hook = f"blocks.{{}}.{SITES[site]}"
        unpatched = difference(model(base))
        distance = difference(model(source)) - unpatched
        for position in (7, 12) if by_position else (None,):
            for layer, head in ((0, heads[0]), (1, heads[0])):
                where = (layer, *([] if head is None else [head]), *([] if position is None else [position]))
                expected = by_hand(model, base, source, hook, difference, layer, head, position) - unpatched
                assert torch.allclose(found.effect[where], expected, atol=1e-10)
                assert torch.allclose(found.values[where], expected.mean() / distance.mean(), atol=1e-9)
    assert found.effect.abs().max() > 1e-3


def test_patching_the_whole_stream_gives_the_other_run():
    model, clean, corrupt, metric = setting("course")
    found = activation_patch(model, clean, corrupt, "resid_post", metric=metric, by_position=False, **QUIET)
    assert torch.allclose(found.values, torch.ones(2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(found.base + found.effect[1], found.source, atol=1e-12)


def test_positions_before_the_first_difference_change_nothing_and_cost_nothing():
    model, clean, corrupt, metric = setting("course")
    found = activation_patch(model, clean, corrupt, metric=metric, **QUIET)
    assert found.effect[:, :4].abs().max() == 0
    assert found.effect[:, 4:9, 0].abs().max() == 0
    assert found.effect[:, 4:9, 1].abs().min() > 0
    assert list(found.to_frame().columns)[:3] == ["layer", "pos", "raw"]


def test_the_compiled_head_is_found_by_patching():
    """Another first half; only the value that L1H0 reads at the position it looks at carries the answer."""
    model = compiled.induction_head()
    clean = compiled.tokens()
    corrupt = clean.clone()
    j = 3
    free = next(token for token in range(1, compiled.V) if token not in clean[0])
    corrupt[0, 1 + j] = free
    prompt, answer = slice(0, 7 + j), int(clean[0, 1 + j])
    clean, corrupt = clean[:, prompt], corrupt[:, prompt]
    metric = logit_diff(answer, free)
    found = activation_patch(model, clean, corrupt, "head_v", metric=metric, **QUIET)
    expected = torch.zeros(2, 2, 7 + j, dtype=torch.float64)
    expected[1, 0, 1 + j] = 1
    assert torch.allclose(found.values, expected, atol=1e-9)
    whole = activation_patch(model, clean, corrupt, "head", metric=metric, by_position=False, **QUIET)
    assert torch.allclose(whole.values, torch.tensor([[0.0, 0], [1, 0]], dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("metric", ["loss", logit_diff(3, 5)], ids=["loss", "logit_diff"])
def test_padding_on_either_side_changes_no_effect(metric):
    model = architectures.make("rotary")
    prompts = batches.random_prompts(model.config)
    others = batches.random_prompts(model.config, seed=3)
    sides = [batches.pad(prompts, side) + batches.pad(others, side) for side in ("left", "right")]
    found = [
        activation_patch(model, c, x, metric=metric, clean_mask=cm, corrupt_mask=xm, **QUIET) for c, cm, x, xm in sides
    ]
    assert torch.allclose(found[0].effect, found[1].effect, atol=1e-10, equal_nan=True)
    for row, (clean, corrupt) in enumerate(zip(prompts, others, strict=True)):
        alone = activation_patch(model, clean[None], corrupt[None], metric=metric, normalise=False, **QUIET)
        assert torch.allclose(found[0].effect[:, : len(clean), row], alone.effect[:, :, 0], atol=1e-10)
        assert found[0].effect[:, len(clean) :, row].isnan().all()
    assert not found[0].values.isnan().any()
    mixed = activation_patch(
        model, sides[0][0], sides[1][2], metric=metric, clean_mask=sides[0][1], corrupt_mask=sides[1][3], **QUIET
    )
    assert torch.allclose(mixed.effect, found[0].effect, atol=1e-10, equal_nan=True)


def test_prompts_of_other_lengths_need_an_alignment():
    model, clean, _, metric = setting("course")
    corrupt = torch.cat([clean[:, :5], (clean[:, 5:6] + 1) % 17, clean[:, 5:]], dim=1)
    with pytest.raises(ValueError, match="prompt 0 has 13 tokens clean and 14 corrupt"):
        activation_patch(model, clean, corrupt, metric=metric, **QUIET)
    alignment = [*range(5), *range(6, 14)]
    found = activation_patch(
        model, clean, corrupt, "resid_pre", metric=metric, alignment=alignment, direction="denoise", **QUIET
    )
    _, cache = model.run_with_cache(clean)

    def replace(activation, hook):
        activation[:, 9] = cache[hook.name][:, 8]

    expected = difference(model.run_with_hooks(corrupt, [("blocks.1.hook_resid_pre", replace)]))
    assert torch.allclose(found.base + found.effect[1, 9], expected, atol=1e-10)
    assert found.effect[:, 5].abs().max() == 0  # nothing in the clean prompt stands for it
    for bad, message in (([0] * 13, "twice"), ([14] * 13, "columns 0 to 13"), ([1, 2], "expected")):
        with pytest.raises(ValueError, match=message):
            activation_patch(model, clean, corrupt, metric=metric, alignment=bad, **QUIET)


def test_a_distance_of_about_nothing_is_refused_with_both_numbers():
    """Field report 25."""
    model, clean, _, metric = setting("course")
    with pytest.raises(ValueError, match=r"logit_diff is (-?[\d.]+) on the run that is patched and \1 on the run"):
        activation_patch(model, clean, clean.clone(), metric=metric, **QUIET)
    found = activation_patch(model, clean, clean.clone(), metric=metric, normalise=False, **QUIET)
    assert found.values is None
    assert found.raw.abs().max() == 0


def test_key_and_value_patches_run_over_stored_heads():
    model, clean, corrupt, metric = setting("multi_query")
    for site, n_heads in (("head_k", 1), ("head_v", 1), ("head_q", 3), ("head", 3)):
        found = activation_patch(model, clean, corrupt, site, metric=metric, by_position=False, **QUIET)
        assert found.raw.shape == (2, n_heads)


def test_intervals_hold_the_means_and_losses_weight_tokens():
    model, clean, corrupt, _ = setting("course")
    found = activation_patch(model, clean, corrupt, "attn_out", metric="loss", by_position=False, **QUIET)
    assert (found.interval[:, 0] <= found.raw).all()
    assert (found.raw <= found.interval[:, 1]).all()
    assert torch.allclose(found.source, loss_per_prompt(model(clean), clean))
    assert (found.values_interval[:, 0] <= found.values).all()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_loss_is_that_of_the_clean_tokens_on_every_run(direction):
    """So that patching everything gives 1, as the docs of `activation_patch` say."""
    model, clean, corrupt, _ = setting("course")
    options = {"metric": "loss", "by_position": False, "direction": direction, **QUIET}
    found = activation_patch(model, clean, corrupt, "resid_post", **options)
    losses = [loss_per_prompt(model(tokens), clean) for tokens in (corrupt, clean)]
    base, source = losses if direction == "denoise" else losses[::-1]
    assert torch.allclose(found.base, base, atol=1e-12)
    assert torch.allclose(found.source, source, atol=1e-12)
    assert not torch.allclose(losses[0], loss_per_prompt(model(corrupt), corrupt), atol=1e-3)
    assert torch.allclose(found.values[-1], torch.ones((), dtype=torch.float64), atol=1e-9)
    assert torch.allclose(found.effect[-1], source - base, atol=1e-12)
    assert "loss (of predicting the clean prompts' tokens)" in found.title()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_the_loss_of_aligned_prompts_follows_the_clean_tokens(direction):
    """The corrupt prompts have one token more, at column 5; behind it they go on with the clean ones."""
    model, clean, _, _ = setting("course")
    corrupt = torch.cat([clean[:, :5], (clean[:, 5:6] + 1) % 17, clean[:, 5:]], dim=1)
    here = [*range(5), *range(6, 14)]  # the column of the corrupt prompt for each of the clean one
    options = {"metric": "loss", "by_position": False, "alignment": here, "direction": direction, **QUIET}
    found = activation_patch(model, clean, corrupt, "resid_post", **options)
    losses = [loss_per_prompt(logits, clean) for logits in (model(corrupt)[:, here], model(clean))]
    base, source = losses if direction == "denoise" else losses[::-1]
    assert torch.allclose(found.base, base, atol=1e-12)
    assert torch.allclose(found.source, source, atol=1e-12)
    assert torch.allclose(found.effect[-1], source - base, atol=1e-12)


def test_a_divergence_compares_the_positions_that_stand_for_each_other():
    """The clean prompts are padded on the left and the corrupt ones on the right: their columns are not the same."""
    model = architectures.make("rotary")
    prompts, others = batches.random_prompts(model.config), batches.random_prompts(model.config, seed=3)
    (clean, mask), (corrupt, other) = batches.pad(prompts, "left"), batches.pad(others, "right")
    options = {"metric": "kl", "by_position": False, **QUIET}
    mixed = activation_patch(model, clean, corrupt, "resid_post", clean_mask=mask, corrupt_mask=other, **options)
    assert torch.allclose(mixed.effect[-1], mixed.source, atol=1e-10)
    for row, (one, two) in enumerate(zip(prompts, others, strict=True)):
        alone = activation_patch(model, one[None], two[None], "resid_post", **options)
        assert torch.allclose(mixed.source[row], alone.source[0], atol=1e-10)


def test_bad_requests_are_named():
    model, clean, corrupt, metric = setting("parallel_two_norms")
    cases = [
        ({"site": "resid_mid"}, ValueError, "parallel blocks have no stream"),
        ({"site": "resid"}, ValueError, "site 'resid' is not one of"),
        ({"direction": "denoising"}, ValueError, "direction 'denoising' is not one of"),
        ({"mask": 1}, TypeError, "no option 'mask'"),
        ({"metric": lambda z: z[0, 0]}, ValueError, "the run patched from, expected"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            activation_patch(model, clean, corrupt, **{"metric": metric, **QUIET, **options})
    with pytest.raises(ValueError, match="4 clean and 3 corrupt"):
        activation_patch(model, clean, corrupt[:3], metric=metric, **QUIET)


def test_the_preview_shows_the_largest_patches_first():
    model, clean, corrupt, metric = setting("course")
    found = activation_patch(model, clean, corrupt, "head", metric=metric, **QUIET)
    by_size = sorted(found.rows(), key=lambda row: -abs(row["raw"]))
    shown = [line.split()[:3] for line in repr(found).splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert shown == [[str(row[axis]) for axis in ("layer", "head", "pos")] for row in by_size[:6]]
    assert f"{len(by_size)} rows in all, of which these are the largest" in repr(found)


def test_a_title_names_the_share_only_where_there_is_one():
    model, clean, corrupt, metric = setting("course")
    assert (
        "as a share with 0 for the unpatched run"
        in activation_patch(model, clean, corrupt, metric=metric, **QUIET).title()
    )
    raw = activation_patch(model, clean, corrupt, metric=metric, normalise=False, **QUIET)
    assert "share" not in raw.title()


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_kl_is_from_the_unpatched_run_to_the_patched_one(direction):
    model, clean, corrupt, _ = setting("course")
    found = activation_patch(
        model, clean, corrupt, metric="kl", by_position=False, direction=direction, normalise=False, **QUIET
    )
    base, source = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
    log_base, log_source = model(base).log_softmax(-1), model(source).log_softmax(-1)
    expected = (log_base.exp() * (log_base - log_source)).sum(-1).mean(-1)  # patching the first stream brings all back
    assert torch.allclose(found.effect[0], expected, atol=1e-10)
    assert torch.allclose(found.source, expected, atol=1e-10)
    unpatched = "corrupt" if direction == "denoise" else "clean"
    assert f"KL(unpatched‖patched), the unpatched run being the {unpatched} one" in found.title()


def test_a_plan_says_what_patching_costs_and_runs_it():
    model, clean, corrupt, metric = setting("course")
    planned = patch_plan(model, clean, corrupt, "head", metric=metric, **QUIET)
    found = activation_patch(model, clean, corrupt, "head", metric=metric, **QUIET)
    acting = [key for key in range(clean.shape[1]) if bool((clean[:, : key + 1] != corrupt[:, : key + 1]).any())]
    assert planned.cost.interventions == model.config.n_layers * model.config.n_heads * len(acting)
    assert 0 < planned.cost.forwards < planned.cost.interventions
    assert torch.equal(planned.run().raw, found.raw)


def test_positions_are_rows_of_the_whole_table():
    model, clean, corrupt, metric = setting("course")
    every = activation_patch(model, clean, corrupt, "head", metric=metric, **QUIET)
    found = activation_patch(model, clean, corrupt, "head", metric=metric, positions=[-1, 5], **QUIET)
    assert torch.allclose(found.raw, every.raw[:, :, [-1, 5]])
    assert found.to_frame()["pos"].unique().tolist() == [-1, 5]
    assert "head at positions -1, 5 only patched" in found.title()
    together = activation_patch(model, clean, corrupt, metric=metric, by_position=False, positions=[5, 6], **QUIET)
    _, cache = model.run_with_cache(clean, ["blocks.1.hook_resid_pre"])

    def put(activation, hook):
        activation[:, 5:7] = cache[hook.name][:, 5:7]
        return activation

    logits = model.run_with_hooks(corrupt, [("blocks.1.hook_resid_pre", put)])
    assert torch.allclose(together.effect[1], difference(logits) - together.base, atol=1e-10)


def test_positions_count_over_real_tokens_and_must_be_in_a_prompt():
    model, clean, corrupt, metric = setting("course")
    mask = torch.ones_like(clean, dtype=torch.bool)
    mask[0, -2:] = False
    given = {"metric": metric, "clean_mask": mask, "corrupt_mask": mask, **QUIET}
    every = activation_patch(model, clean, corrupt, **given)
    last = activation_patch(model, clean, corrupt, positions=-1, **given)
    width = clean.shape[1]
    assert torch.allclose(last.effect[:, 0, 0], every.effect[:, width - 3, 0])
    assert torch.allclose(last.effect[:, 0, 1:], every.effect[:, width - 1, 1:])
    for wrong, error, message in (
        (width, IndexError, f"position {width} is in none of the prompts, the longest of which has {width}"),
        (-width - 1, IndexError, "is in none"),
        ([], ValueError, "positions is empty"),
        ("last", TypeError, "position"),
    ):
        with pytest.raises(error, match=message):
            activation_patch(model, clean, corrupt, positions=wrong, **given)
