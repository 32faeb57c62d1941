"""Pairs, growing sets, all but a set, cut attention, blocks in another order; and how a sweep runs."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from types import SimpleNamespace

import architectures
import batches
import compiled
import pytest
import torch

from analysis.ablation import (
    Ablation,
    ablate,
    ablate_all_but,
    ablate_in_order,
    knock_out_attention,
    plan,
    reorder_blocks,
)
from analysis.metrics import logit_diff, loss_per_prompt
from analysis.uncertainty import against_chance, bootstrap_interval, false_discovery, n_significant, sign_flip_p_values
from circuits import MLP, Attn, Block, GPTConfig, Head, HookedGPT
from circuits.attention import Attention
from circuits.rerun.sweep import Sweep

QUIET = {"progress": False}


def model_and_tokens(name="course"):
    model = architectures.make(name)
    return model, batches.random_tokens(model.config)


def relu_pair():
    """``y = 1 − relu(1 − h₀ − h₁)``: two heads that write 1 each, where either one suffices."""
    config = GPTConfig(
        n_layers=1, d_model=4, n_heads=2, d_head=1, n_ctx=3, d_vocab=3, d_mlp=1, norm=None, act="relu", bias_qkv=True
    )
    model = HookedGPT(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        block = model.blocks[0]
        block.attn.b_V.fill_(1)  # every head's z is 1, whatever it looks at
        block.attn.W_O[0, 0, 0] = block.attn.W_O[1, 0, 1] = 1
        block.mlp.b_in[0] = 1
        block.mlp.W_in[0, 0] = block.mlp.W_in[1, 0] = -1
        block.mlp.W_out[0, 2] = -1
        block.mlp.b_out[2] = 1
        model.W_U[2, 0] = 1
    return model, torch.tensor([[0, 1, 2], [2, 1, 0]])


def test_a_redundant_pair_shows_only_together():
    model, tokens = relu_pair()
    found = ablate(model, tokens, pairs=True, metric=logit_diff(0, 1), **QUIET)
    assert found.clean.tolist() == [1, 1]
    assert found.effect.tolist() == [[0, -1], [-1, 0]]
    assert found.interaction.tolist() == [[0, -1], [-1, 0]]
    alone = ablate(model, tokens, metric=logit_diff(0, 1), **QUIET)
    assert alone.mean.tolist() == [0, 0]


def test_an_interaction_is_the_joint_effect_less_both_single_ones():
    model, tokens = model_and_tokens()
    heads = [Head(0, 0), Head(1, 2), Head(0, 2)]
    found = ablate(model, tokens, [*heads, MLP(0)], pairs=True, **QUIET)
    single = ablate(model, tokens, [*heads, MLP(0)], **QUIET).mean
    for a, b in itertools.combinations(range(4), 2):
        pair = (found.components[a], found.components[b])
        joint = ablate(model, tokens, [pair], **QUIET).mean[0]
        assert found.effect[a, b] == pytest.approx(float(joint), abs=1e-12)
        assert found.interaction[b, a] == pytest.approx(float(joint - single[a] - single[b]), abs=1e-12)
        low, high = found.interval[a, b]
        assert low <= found.interaction[a, b] <= high
    assert torch.allclose(found.effect.diagonal(), single)


def test_a_table_of_pairs_has_each_pair_once_and_not_the_diagonal():
    model, tokens = model_and_tokens()
    found = ablate(model, tokens, [Head(1, 2), Head(0, 0), MLP(0)], pairs=True, **QUIET)
    frame = found.to_frame()
    assert list(zip(frame["component"], frame["component2"], strict=True)) == [
        ("L1H2", "L0H0"),
        ("L1H2", "L0.mlp"),
        ("L0H0", "L0.mlp"),
    ]
    assert frame["effect"].tolist() == [found.effect[0, 1], found.effect[0, 2], found.effect[1, 2]]
    assert frame["p"].tolist() == found.p[[0, 0, 1], [1, 2, 2]].tolist()
    assert found.to_frame("clean").shape[0] == len(tokens)
    assert found.to_frame("clean", "interaction").shape[0] == 3 * len(tokens)
    assert torch.equal(found.interaction, found.interaction.mT)
    assert "3 rows" not in repr(found)
    assert len(repr(found).splitlines()) == len(repr(found).split("\n  component")[0].splitlines()) + 4


def test_ablating_in_order_grows_the_set():
    model, tokens = model_and_tokens()
    order = [Head(1, 0), (Head(0, 1), MLP(1)), Head(0, 0)]
    found = ablate_in_order(model, tokens, order, **QUIET)
    sets = [(Head(1, 0),), (Head(1, 0), Head(0, 1), MLP(1)), (Head(1, 0), Head(0, 1), MLP(1), Head(0, 0))]
    assert found.components == tuple(sets)
    assert torch.allclose(found.effect, ablate(model, tokens, sets, **QUIET).effect, atol=1e-12)


def test_the_compiled_circuit_suffices_and_half_of_it_does_not():
    model, tokens = compiled.induction_head(), compiled.tokens(batch=3)

    def loss(logits):
        return compiled.loss_of(logits, tokens)

    kept = [(Head(0, 0), Head(1, 0)), Head(0, 0)]
    found = ablate_all_but(model, tokens, kept, method="zero", metric=loss, **QUIET)
    assert found.components == tuple(kept)
    assert found.mean[0] == 0
    assert float(found.mean[1] + compiled.LOSS) == pytest.approx(compiled.LOSS_WITHOUT_INDUCTION_HEAD, abs=1e-6)


def test_attention_that_was_cut_reads_nothing_there():
    model, tokens = model_and_tokens("grouped_query")
    found = knock_out_attention(model, tokens, [0, 3], [-1, 5], [Head(1, 4), (Head(0, 0), Head(1, 4))], **QUIET)

    def cut(head):
        def change(scores, hook):
            scores[:, head, -1, [0, 3]] = -torch.inf
            scores[:, head, 5, [0, 3]] = -torch.inf
            return scores

        return change

    last = ("blocks.1.attn.hook_attn_scores", cut(4))
    for row, hooks in enumerate([[last], [("blocks.0.attn.hook_attn_scores", cut(0)), last]]):
        expected = loss_per_prompt(model.run_with_hooks(tokens, hooks), tokens)
        assert torch.allclose(found.clean + found.effect[row], expected, atol=1e-12)
    with pytest.raises(ValueError, match=r"columns 0 to 12 of the prompts, not \[13\]"):
        knock_out_attention(model, tokens, 13)
    with pytest.raises(ValueError, match=r"L0\.mlp is none"):
        knock_out_attention(model, tokens, 0, heads=[MLP(0)])


@pytest.mark.parametrize("name", ["course", "post_norm", "parallel_two_norms"])
def test_an_order_without_a_block_is_the_model_with_that_block_ablated(name):
    model, tokens = model_and_tokens(name)
    found = reorder_blocks(model, tokens, [[0, 1], [1], [0], [1, 0], []])
    dropped = ablate(model, tokens, [Block(0), Block(1), (Block(0), Block(1))], **QUIET)
    assert found.effect[0].abs().max() == 0
    assert torch.allclose(found.effect[[1, 2, 4]], dropped.effect, atol=1e-12)
    swapped = architectures.make(name)
    swapped.blocks._modules.update({"0": swapped.blocks[1], "1": swapped.blocks[0]})
    assert torch.allclose(found.clean + found.effect[3], loss_per_prompt(swapped(tokens), tokens), atol=1e-12)
    with pytest.raises(IndexError, match=r"layer 2 of order \[0, 2\]"):
        reorder_blocks(model, tokens, [[0, 2]])


def test_frozen_patterns_and_norms_leave_the_effect_through_values():
    """With everything behind it held still, a head's effect on the logits is the direct one: linear in its write."""
    model, tokens = model_and_tokens("attn_only")
    metric = logit_diff(3, 5)
    found = ablate(model, tokens, [Head(1, 1)], metric=metric, freeze=["norms"], **QUIET)
    _, cache = model.run_with_cache(tokens, lambda name: True)
    write = cache["result", 1][:, -1, 1]
    direction = model.ln_final.w * (model.W_U[:, 3] - model.W_U[:, 5])
    centred = write - write.mean(-1, keepdim=True)
    assert torch.allclose(-(centred / cache["ln_final.hook_scale"][:, -1]) @ direction, found.effect[0], atol=1e-12)
    total = ablate(model, tokens, [Head(1, 1)], metric=metric, **QUIET)
    assert not torch.allclose(found.effect, total.effect, atol=1e-3)
    one, listed = (ablate(model, tokens, freeze=freeze, **QUIET) for freeze in ("norms", ["norms"]))
    assert torch.equal(one.effect, listed.effect)
    with pytest.raises(ValueError, match="freeze option 'pattern' is not one of"):
        ablate(model, tokens, freeze=["pattern"], **QUIET)


@pytest.mark.parametrize("metric", ["loss", "kl", logit_diff(1, 2)], ids=["loss", "kl", "logit_diff"])
def test_values_do_not_depend_on_how_a_sweep_is_cut(metric):
    model = architectures.make("like_gemma2")
    tokens, mask = batches.pad(batches.random_prompts(model.config), "left")
    options = {"attention_mask": mask, **QUIET}
    targets = [Head(0, 1), MLP(1), Attn(0), (Head(1, 0), MLP(0))]
    whole = ablate(model, tokens, targets, metric=metric, **options)
    small = plan(model, tokens, targets, "zero", metric, {**options, "budget": 80_000})
    assert len(small.sweep.jobs) > 5
    outcome = small.run()
    assert torch.allclose(outcome.values - outcome.clean, whole.effect, atol=1e-12)
    merged = dict.fromkeys(range(len(targets)))
    with ThreadPoolExecutor(2) as executor:
        threaded = ablate(model, tokens, targets, metric=metric, **options, executor=executor, budget=80_000)
    assert torch.allclose(threaded.effect, whole.effect, atol=1e-12)
    assert len(merged) == len(whole.components)


def test_a_loss_over_blocks_of_a_large_vocabulary_is_the_loss():
    config = GPTConfig(
        n_layers=1, d_model=7, n_heads=1, n_ctx=9, d_vocab=2500, norm=None, bias_unembed=True, logit_softcap=3.0
    )
    model = architectures.make(config)
    tokens = batches.random_tokens(config, pos=9)
    found = ablate(model, tokens, [Head(0, 0)], **QUIET)
    assert torch.allclose(found.clean, loss_per_prompt(model(tokens), tokens), atol=1e-12)


def test_a_job_can_be_pickled_and_run_elsewhere():
    model, tokens = model_and_tokens()
    planned = plan(model, tokens, [Head(0, 1), MLP(1)], "zero", "loss", {})
    here = planned.run()
    for job in reversed(planned.sweep.jobs):
        done, values = pickle.loads(pickle.dumps(job))()
        for (number, rows), row in zip(done, values, strict=True):
            assert torch.allclose(row[rows], here.values[number, rows], atol=1e-12)


def test_jobs_of_one_process_share_a_clean_pass_and_pickled_ones_make_their_own(monkeypatch):
    """What the docs of `Options.executor` and `Sweep.prepared` say."""
    model, tokens = model_and_tokens()
    passes = []
    monkeypatch.setattr(Sweep, "_clean_run", counting(Sweep._clean_run, passes))
    jobs = plan(model, tokens, [Head(0, 1), Head(1, 0), MLP(0)], "zero", "loss", {"budget": 80_000}).sweep.jobs
    assert len(jobs) > 1
    for job in jobs:
        job()
    assert len(passes) == 1
    for job in jobs:
        pickle.loads(pickle.dumps(job))()
    assert len(passes) == 1 + len(jobs)


def counting(function, calls):
    def counted(*given):
        calls.append(1)
        return function(*given)

    return counted


def test_resampling_draws_the_same_whatever_the_batches():
    model, tokens = model_and_tokens()
    whole = ablate(model, tokens, method="resample", seed=4, **QUIET)
    cut = ablate(model, tokens, method="resample", seed=4, budget=80_000, **QUIET)
    other = ablate(model, tokens, method="resample", seed=5, **QUIET)
    assert torch.allclose(whole.effect, cut.effect, atol=1e-12)
    assert not torch.allclose(whole.effect, other.effect, atol=1e-3)


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    model, tokens = model_and_tokens()
    file, seen = tmp_path / "sweep.safetensors", SimpleNamespace(calls=0)

    def interrupted(logits):
        seen.calls += 1
        if seen.calls == 4:
            raise KeyboardInterrupt
        return logits[:, -1, 3]

    options = {"resume": file, "budget": 80_000, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        ablate(model, tokens, metric=interrupted, **options)
    found = ablate(model, tokens, metric=interrupted, **options)
    assert torch.allclose(found.effect, ablate(model, tokens, metric=lambda z: z[:, -1, 3], **QUIET).effect)
    before = seen.calls
    ablate(model, tokens, metric=interrupted, **options)
    assert seen.calls == before + 1  # the clean run only
    with pytest.raises(ValueError, match="keeps another sweep"):
        ablate(model, tokens.flip(0), metric=interrupted, **options)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="is not the record of a sweep"):
        ablate(model, tokens, metric=interrupted, **options)


def test_a_record_is_not_taken_for_that_of_another_metric_of_the_same_name(tmp_path):
    model, tokens = model_and_tokens()
    file = tmp_path / "sweep.safetensors"

    def logit(token):
        def metric(logits):
            return logits[:, -1, token]

        return metric

    found = ablate(model, tokens, metric=logit(3), resume=file, **QUIET)
    assert torch.equal(ablate(model, tokens, metric=logit(3), resume=file, **QUIET).effect, found.effect)
    with pytest.raises(ValueError, match="keeps another sweep"):
        ablate(model, tokens, metric=logit(4), resume=file, **QUIET)
    first, second = (lambda z: z[:, -1, 3]), (lambda z: z[:, -1, 4])
    file.unlink()
    ablate(model, tokens, metric=first, resume=file, **QUIET)
    with pytest.raises(ValueError, match="keeps another sweep"):
        ablate(model, tokens, metric=second, resume=file, **QUIET)


def test_a_record_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    model, tokens = model_and_tokens()
    for place in (tmp_path, tmp_path / "nowhere" / "sweep.safetensors"):
        with pytest.raises(ValueError, match="resume names a file in a folder that exists"):
            ablate(model, tokens, resume=place, **QUIET)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_processes_give_the_same_values():
    model, tokens = model_and_tokens()
    here = ablate(model, tokens, metric="kl", **QUIET)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        there = ablate(model, tokens, metric="kl", executor=pool, budget=80_000, **QUIET)
    assert torch.allclose(there.effect, here.effect, atol=1e-12)


def test_the_cost_is_known_beforehand_and_a_small_budget_says_what_it_lacks():
    model, tokens = model_and_tokens()
    cost = plan(model, tokens, [Head(1, 0), Head(0, 0)], "zero", logit_diff(1, 2), {}).cost
    assert cost.interventions == 2
    assert 0 < cost.forwards < 2
    assert "forward passes' worth" in str(cost)
    late = plan(model, tokens, [Head(1, 0)], "zero", logit_diff(1, 2), {}).cost
    early = plan(model, tokens, [Head(0, 0)], "zero", logit_diff(1, 2), {}).cost
    assert late.flops < early.flops
    with pytest.raises(ValueError, match=r"budget of .* MiB is too small: one row needs about .* MiB"):
        ablate(model, tokens, budget=100, **QUIET)


def test_p_values_are_the_share_of_sign_choices_that_lie_as_far_out():
    values = torch.tensor([[1.0, 2.0, 3.0], [1.0, -1.0, 0.5]], dtype=torch.float64)
    p = sign_flip_p_values(values, torch.ones(3, dtype=torch.float64))
    assert p.tolist() == [2 / 8, 1]
    many = torch.randn(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    many[1] += 2
    p = sign_flip_p_values(many, torch.ones(40, dtype=torch.float64))
    assert p[0] > 0.05
    assert p[1] == pytest.approx(1e-4, abs=1e-4)


def test_false_discovery_keeps_the_largest_set_under_the_line():
    p = torch.tensor([0.039, 0.001, 0.9, 0.031, 0.012], dtype=torch.float64)
    assert false_discovery(p, 0.05).tolist() == [True, True, False, True, True]
    assert not false_discovery(torch.tensor([0.5, 0.6]).double(), 0.05).any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        false_discovery(p, 1.0)


def null_ablation(effect, level=0.95):
    """A result whose effects are these, as `ablate` sums them up."""
    weight = torch.ones(effect.shape[1], dtype=torch.float64)
    return Ablation(
        components=tuple(Head(0, head) for head in range(len(effect))),
        clean=weight,
        effect=effect,
        weight=weight,
        mean=effect.mean(-1),
        interval=bootstrap_interval(effect, weight, level),
        p=sign_flip_p_values(effect, weight),
        method="zero",
        replacement="nothing",
        metric="loss",
        level=level,
        n_layers=1,
        n_heads=len(effect),
    )


@pytest.mark.parametrize("prompts", [3, 6, 8, 20])
def test_no_more_effects_stand_out_on_null_data_than_the_title_says_by_chance(prompts):
    effects = torch.randn(2000, prompts, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = null_ablation(effects)
    assert found.by_chance == pytest.approx(100)
    # Four standard deviations of the number of 2000 that fall into 5%.
    assert found.n_significant <= found.by_chance + 4 * (2000 * 0.05 * 0.95) ** 0.5
    excluding = int(((found.interval[:, 0] > 0) | (found.interval[:, 1] < 0)).sum())
    assert excluding > found.n_significant
    if prompts < 6:
        assert found.n_significant == 0
        assert found.title().endswith("3 prompts, 95% interval; 6 or more prompts are needed for p ≤ 0.05")
    else:
        said = f"{found.n_significant} of 2000 have p ≤ 0.05 by flipping signs, at most 100 would by chance"
        assert found.title().endswith(said)


def test_a_title_counts_the_p_values_of_the_table():
    model = architectures.make("course")
    tokens = batches.random_tokens(model.config, batch=7)
    found = ablate(model, tokens, level=0.9, **QUIET)
    count = int((found.p_values() <= 0.1).sum())
    assert 0 < count < 6
    assert found.n_significant == count == int((found.to_frame()["p"] <= 0.1).sum())
    has = "has" if count == 1 else "have"
    assert f"7 prompts, 90% interval; {count} of 6 {has} p ≤ 0.1 by flipping signs, at most 0.6" in found.title()
    assert found.to_dict()["p"] == found.p_values().tolist()
    assert torch.equal(found.p_values(), sign_flip_p_values(found.effect, found.weight))
    assert found.stands_out(0.3).shape == (6,)


@pytest.mark.parametrize(("level", "needed"), [(0.5, 2), (0.75, 3), (0.9, 5), (0.95, 6), (0.99, 8)])
def test_so_many_prompts_are_needed_for_a_p_value_that_small(level, needed):
    for prompts in (needed - 1, needed):
        p = sign_flip_p_values(torch.ones(2, prompts, dtype=torch.float64), torch.ones(prompts, dtype=torch.float64))
        said = against_chance(p, level, prompts)
        assert said.startswith("2 of 2 have p ≤ " if prompts == needed else f"{needed} or more prompts are needed")
    assert (
        n_significant(torch.tensor([0.1, 0.1001], dtype=torch.float64), 0.9) == 1
    )  # though 1 − 0.9 is a little less than 0.1
    assert "more than the 9999 choices" in against_chance(p, 0.99999, 1000)


def test_p_values_do_not_depend_on_how_many_components_are_held_at_once(monkeypatch):
    values = torch.randn(11, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = sign_flip_p_values(values, torch.ones(7, dtype=torch.float64))
    monkeypatch.setattr("analysis.uncertainty._CELLS_AT_ONCE", 300)
    assert torch.equal(sign_flip_p_values(values, torch.ones(7, dtype=torch.float64)), whole)


def test_pairs_have_the_p_values_of_their_interactions():
    model = architectures.make("course")
    tokens = batches.random_tokens(model.config, batch=7)
    parts = [Head(0, 0), Head(1, 2), MLP(0)]
    found = ablate(model, tokens, parts, pairs=True, **QUIET)
    single = ablate(model, tokens, parts, **QUIET)
    for a, b in itertools.combinations(range(3), 2):
        joint = ablate(model, tokens, [(parts[a], parts[b])], **QUIET).effect
        expected = sign_flip_p_values(joint - single.effect[[a]] - single.effect[[b]], single.weight)
        assert found.p_values()[a, b] == found.p_values()[b, a] == expected[0]
    assert found.p_values().diagonal().isnan().all()
    assert found.n_significant == int((found.to_frame()["p"] <= 0.05).sum())
    assert found.by_chance == pytest.approx(3 * 0.05)
    assert "; 3 pairs, 7 prompts, 95% interval; " in found.title()
    assert "p ≤ 0.05 by flipping signs, at most 0.15 would by chance" in found.title()
    assert found.stands_out(0.9).sum() == 2 * false_discovery(found.p[[0, 0, 1], [1, 2, 2]], 0.9).sum()
    two = ablate(model, tokens[:4], parts[:2], pairs=True, **QUIET)
    assert "; 1 pair, 4 prompts" in two.title()


def test_titles_are_sentences_that_say_what_was_done():
    model, tokens = model_and_tokens()
    loss = ablate(model, tokens, **QUIET).title().split(" when ")[0]
    for keys, queries, said in [
        (4, -1, "when a head may not look from position −1 at position 4;"),
        ([0, 3], None, "when a head may not look at positions 0 and 3;"),
        (range(10), [5, 6, -1], "from positions 5, 6 and −1 at 10 positions (0, 1, … 9);"),
    ]:
        title = knock_out_attention(model, tokens, keys, queries, **QUIET).title()
        assert said in title
        assert title.startswith(loss)
    orders = reorder_blocks(model, tokens, [[1, 0], [0]])
    assert orders.title().startswith(f"{loss} when the blocks are run in another order, those not named left out; 4 ")
    assert torch.equal(orders.p_values(), sign_flip_p_values(orders.effect, orders.weight))
    assert orders.by_chance == pytest.approx(2 * 0.05)


def test_a_divergence_is_not_counted_against_chance():
    """It is never negative, so signs that are flipped say nothing."""
    model = architectures.make("course")
    tokens = batches.random_tokens(model.config, batch=7)
    said = "; kl is never negative, so p is small for any change at all"
    assert ablate(model, tokens, metric="kl", **QUIET).title().endswith(said)
    assert reorder_blocks(model, tokens, [[1, 0], [0]], "kl").title().endswith(said)
    assert "by chance" in ablate(model, tokens, "heads", metric="kl", pairs=True, **QUIET).title()


def test_a_lambda_is_called_a_function():
    model, tokens = model_and_tokens()
    assert "Change of a function (clean" in ablate(model, tokens, metric=lambda z: z[:, -1, 3], **QUIET).title()
    with pytest.raises(ValueError, match=r"metric \(a function\) returned shape"):
        ablate(model, tokens, metric=lambda z: z, **QUIET)


def test_all_but_a_set_is_zeroed_where_nothing_else_is_said():
    model, tokens = model_and_tokens()
    found = ablate_all_but(model, tokens, [Head(1, 2)], **QUIET)
    assert found.method == "zero"
    rest = tuple(Head(layer, head) for layer in range(2) for head in range(3) if (layer, head) != (1, 2))
    assert torch.equal(found.effect, ablate(model, tokens, [rest], **QUIET).effect)
    assert "when every other one of the heads is replaced by nothing" in found.title()


def test_a_plan_takes_what_ablate_takes_and_can_be_read():
    model, tokens = model_and_tokens()
    planned = plan(model, tokens)
    assert planned.cost == plan(model, tokens, "heads", "zero", "loss", {}).cost
    assert plan(model, tokens, ["L0H1", (Head(1, 0), MLP(0))]).targets == (Head(0, 1), (Head(1, 0), MLP(0)))
    assert len(plan(model, tokens, [Head(0, 0), Head(0, 1), Head(1, 0)], pairs=True).targets) == 6
    first, second, third = repr(planned).splitlines()
    assert first == "Plan: change of loss when a component is replaced by nothing"
    assert second == "  6 targets (L0H0, L0H1, L0H2, L1H0, L1H1, L1H2), 4 prompts of 13 positions"
    assert third.strip() == str(planned.cost)
    assert "6 interventions in 1 batch: " in third
    assert "1 intervention in 1 batch: " in str(plan(model, tokens, "L0H1").cost)
    with pytest.raises(ValueError, match="did you mean 'heads'"):
        plan(model, tokens, "head")
    with pytest.raises(TypeError, match="no option 'budgets'"):
        plan(model, tokens, options={"budgets": 3})


@pytest.mark.parametrize("name", architectures.NAMES)
def test_head_sweeps_run_on_every_architecture_and_share_passes(name):
    """Field report 24: no architecture is special, and a sweep is a few passes, not one for each head."""
    model, tokens = model_and_tokens(name)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        combine = Attention.combine

        def counted(self, z, names, run):
            calls.append(names.layer)
            return combine(self, z, names, run)

        patch.setattr(Attention, "combine", counted)
        found = ablate(model, tokens, **QUIET)
    # One pass for the clean run and every lane. Where blocks are parallel, lanes that begin go through them apart.
    assert len(calls) <= (3 if model.config.parallel_blocks else 1) * model.config.n_layers
    for row, head in enumerate(found.components):

        def zero(z, hook, head=head):
            z[:, :, head.head] = 0
            return z

        expected = loss_per_prompt(model.run_with_hooks(tokens, [(f"blocks.{head.layer}.attn.hook_z", zero)]), tokens)
        assert torch.allclose(found.clean + found.effect[row], expected, atol=1e-10)
