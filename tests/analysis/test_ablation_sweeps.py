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
    ablate,
    ablate_all_but,
    ablate_in_order,
    knock_out_attention,
    plan,
    reorder_blocks,
)
from analysis.metrics import logit_diff, loss_per_prompt
from analysis.uncertainty import false_discovery, sign_flip_p_values
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
    assert found.to_frame().shape[0] == 16


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


def test_a_sweep_says_how_many_effects_would_stand_out_by_chance():
    model, tokens = model_and_tokens()
    found = ablate(model, tokens, **QUIET)
    assert found.by_chance == pytest.approx(0.05 * 6)
    assert f"{found.n_excluding_zero} of 6 exclude 0, 0.3 would by chance" in found.title()
    assert found.stands_out(0.3).shape == (6,)


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
