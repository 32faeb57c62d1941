"""Path patching against a full pass with the receiver's input edited, for every pair of components."""

from __future__ import annotations

import architectures
import batches
import compiled
import pytest
import torch

from analysis.metrics import logit_diff, loss_per_prompt
from analysis.patching import path_cost, path_patch
from circuits import MLP, Attn, Embed, Head, Neuron, PosEmbed
from circuits.components import AttnBias
from circuits.rerun import Intervention, Put, rerun
from circuits.rerun.sweep import Sweep

QUIET = {"progress": False}
ARCHITECTURES = ["course", "rotary", "grouped_query", "like_gemma2", "parallel_two_norms", "like_qwen3", "attn_only"]


def setting(name):
    model = architectures.make(name)
    clean, corrupt = batches.random_tokens(model.config), batches.random_tokens(model.config, seed=1)
    corrupt[:, :3] = clean[:, :3]
    return model, clean, corrupt


def difference(logits):
    return logits[:, -1, 3] - logits[:, -1, 5]


def write_of(model, tokens, other, sender):
    """What a sender writes when only it is taken from the other run: its branch's output, less the plain one."""
    name, index = {
        Head: (f"blocks.{sender.layer}.attn.hook_z", getattr(sender, "head", None)),
        MLP: (f"blocks.{sender.layer}.hook_mlp_out", None),
        Attn: (f"blocks.{sender.layer}.hook_attn_out", None),
        Neuron: (f"blocks.{sender.layer}.mlp.hook_post", getattr(sender, "index", None)),
    }[type(sender)]
    out = f"blocks.{sender.layer}.hook_{'attn_out' if isinstance(sender, Head | Attn) else 'mlp_out'}"
    _, base = model.run_with_cache(tokens, [out])
    _, source = model.run_with_cache(other, [name])

    def swap(activation, hook):
        if index is None:
            return source[name]
        activation[:, :, index] = source[name][:, :, index]
        return activation

    _, changed = model.run_with_cache(tokens, [out], fwd_hooks=[(name, swap)])
    return changed[out] - base[out]


def hand(model, base, change, hook, head=None):
    def add(activation, hook):
        if head is None:
            return activation + change
        activation[:, :, head] += change
        return activation

    return difference(model.run_with_hooks(base, [(hook, add)])) - difference(model(base))


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_edge_is_the_receivers_input_edited_by_hand(name, direction):
    model, clean, corrupt = setting(name)
    base, source = (corrupt, clean) if direction == "denoise" else (clean, corrupt)
    senders = [Head(0, 1), Head(1, 0), Attn(0)]
    receivers = [Head(1, 2), Head(0, 0), "logits"]
    if model.config.has_mlp:
        senders += [MLP(0), Neuron(0, 4)]
        receivers += [MLP(0), MLP(1)]
    metric = logit_diff(3, 5)
    found = path_patch(model, clean, corrupt, senders, receivers, metric=metric, direction=direction, **QUIET)
    places = {"logits": ("blocks.1.hook_resid_post", None)}
    for layer, head in ((1, 2), (0, 0)):
        of = {"q": head, "k": head // model.config.group_size, "v": head // model.config.group_size}
        for letter, index in of.items():
            shared = letter != "q" and model.config.group_size > 1
            places[f"L{layer}{'KV' if shared else 'H'}{index}.{letter}"] = (
                f"blocks.{layer}.hook_{letter}_input",
                index,
            )
    places |= {f"L{layer}.mlp": (f"blocks.{layer}.hook_mlp_in", None) for layer in (0, 1)}
    assert set(found.receivers) <= set(places)
    edges = 0
    for i, sender in enumerate(senders):
        change = write_of(model, base, source, sender)
        for j, receiver in enumerate(found.receivers):
            if found.effect[i, j].isnan().any():
                assert not reads_later(model, sender, receiver)
                continue
            assert reads_later(model, sender, receiver)
            expected = hand(model, base, change, *places[receiver])
            assert torch.allclose(found.effect[i, j], expected, atol=1e-10), (sender, receiver)
            edges += 1
    assert edges >= 12 - 4 * (not model.config.has_mlp)


def reads_later(model, sender, receiver):
    if receiver == "logits":
        return True
    layer = int(receiver[1])
    if receiver.endswith("mlp") and isinstance(sender, Head | Attn) and not model.config.parallel_blocks:
        return sender.layer <= layer
    return sender.layer < layer


def test_every_head_pair_comes_in_one_call():
    model, clean, corrupt = setting("course")
    found = path_patch(model, clean, corrupt, metric=logit_diff(3, 5), **QUIET)
    assert found.raw.shape == (6, 18)
    frame = found.to_frame()
    assert {"sender", "layer_sender", "head_sender", "receiver", "raw", "values"} <= set(frame.columns)
    known = frame.dropna(subset="raw")
    assert len(known) == 3 * 9
    assert (known["layer_sender"] == 0).all()


def test_embeddings_are_senders():
    model, clean, corrupt = setting("course")
    found = path_patch(model, clean, corrupt, [Embed(), PosEmbed()], ["logits"], metric=logit_diff(3, 5), **QUIET)
    change = model.W_E[clean] - model.W_E[corrupt]
    assert torch.allclose(found.effect[0, 0], hand(model, corrupt, change, "blocks.1.hook_resid_post"), atol=1e-10)
    assert found.effect[1, 0].abs().max() == 0


def test_in_the_compiled_circuit_the_previous_token_head_is_read_as_keys_alone():
    """The clean prompt's second half repeats its first; the corrupt one's tokens stand in another order before it."""
    model = compiled.induction_head()
    clean = compiled.tokens()[:, :10]
    corrupt = clean.clone()
    corrupt[0, 3], corrupt[0, 5] = clean[0, 5], clean[0, 3]
    answer = int(clean[0, 4])
    metric = logit_diff(answer, int(next(t for t in range(1, 8) if t not in clean[0, :7])))
    found = path_patch(model, clean, corrupt, metric=metric, direction="noise", normalise=False, **QUIET)
    by_name = dict(zip(found.receivers, found.raw[0].tolist(), strict=True))
    _, cache = model.run_with_cache(corrupt, ["blocks.0.attn.hook_z"])
    value = cache["z", 0][:, :, 0]
    both = rerun(model, clean, [Intervention("L0H0", Put(value))])[0]
    total = difference_of(both, metric) - difference_of(model(clean), metric)
    assert by_name["L1H0.k"] == pytest.approx(float(total), abs=1e-9)
    assert abs(by_name["L1H0.k"]) > 1
    assert {
        name: effect for name, effect in by_name.items() if name.startswith("L1") and abs(effect) > 1e-9
    }.keys() == {"L1H0.k"}


def difference_of(logits, metric):
    return (logits[:, -1, metric.correct] - logits[:, -1, metric.wrong]).sum().detach()


def test_left_padding_changes_no_edge():
    model = architectures.make("rotary")
    prompts, others = batches.random_prompts(model.config), batches.random_prompts(model.config, seed=3)
    options = {"metric": logit_diff(3, 5), "normalise": False, **QUIET}
    found = []
    for side in ("left", "right"):
        (clean, mask), (corrupt, _) = batches.pad(prompts, side), batches.pad(others, side)
        found.append(path_patch(model, clean, corrupt, clean_mask=mask, corrupt_mask=mask, **options).effect)
    assert torch.allclose(found[0], found[1], atol=1e-10, equal_nan=True)
    alone = path_patch(model, prompts[1][None], others[1][None], **options).effect
    assert torch.allclose(found[0][:, :, 1:2], alone, atol=1e-10, equal_nan=True)


def test_edges_of_which_none_can_exist_are_refused_with_the_first():
    model, clean, corrupt = setting("course")
    options = {"metric": logit_diff(3, 5), **QUIET}
    with pytest.raises(ValueError, match=r"no edge that was asked for exists, the first being L1H0 → L0H1\.q"):
        path_patch(model, clean, corrupt, [Head(1, 0), MLP(1)], [Head(0, 1), MLP(0)], **options)
    some = path_patch(model, clean, corrupt, [Head(1, 0), Head(0, 0)], [Head(1, 1)], **options)
    assert some.raw.isnan().tolist() == [[True] * 3, [False] * 3]


def test_edges_between_two_runs_that_are_the_same_change_nothing():
    model, clean, _ = setting("course")
    found = path_patch(model, clean, clean.clone(), metric=logit_diff(3, 5), normalise=False, **QUIET)
    assert found.raw[~found.raw.isnan()].tolist() == [0.0] * 27


def test_the_loss_of_a_path_is_that_of_the_clean_tokens():
    model, clean, corrupt = setting("course")
    found = path_patch(model, clean, corrupt, [Embed()], ["logits"], metric="loss", **QUIET)
    assert torch.allclose(found.base, loss_per_prompt(model(corrupt), clean), atol=1e-12)
    assert torch.allclose(found.source, loss_per_prompt(model(clean), clean), atol=1e-12)
    assert "of predicting the clean prompts' tokens" in found.title()


def test_the_preview_shows_the_largest_edges_first():
    model, clean, corrupt = setting("course")
    found = path_patch(model, clean, corrupt, metric=logit_diff(3, 5), **QUIET)
    shown = [line.split() for line in repr(found).splitlines() if " L0H" in line]
    by_size = sorted((row for row in found.rows() if row["raw"] == row["raw"]), key=lambda row: -abs(row["raw"]))
    assert [row[0] for row in shown] == [row["sender"] for row in by_size[:6]]
    assert all(row["receiver"] in line for row, line in zip(by_size, shown, strict=False))
    assert f"{len(by_size)} rows in all, of which these are the largest" in repr(found)
    assert "– " not in found._repr_html_()


def test_an_edge_that_cannot_exist_is_no_row():
    model, clean, corrupt = setting("course")
    found = path_patch(model, clean, corrupt, metric=logit_diff(3, 5), **QUIET)
    assert found.raw.isnan().any()
    frame = found.to_frame()
    assert len(frame) == int((~found.raw.isnan()).sum()) == 27
    assert not frame["raw"].isna().any()
    for row in found.rows("effect"):
        i, j = (
            found.senders.index(Head(row["layer_sender"], row["head_sender"])),
            found.receivers.index(row["receiver"]),
        )
        assert row["effect"] == float(found.effect[i, j, row["batch"]])
    assert len(found.to_frame("effect")) == 27 * len(clean)
    assert len(found.to_frame("base")) == len(clean)


@pytest.mark.parametrize("name", ["course", "grouped_query"])
def test_a_receiver_may_be_given_as_the_text_that_results_print(name):
    model, clean, corrupt = setting(name)
    every = path_patch(model, clean, corrupt, metric=logit_diff(3, 5), **QUIET)
    named = [text for text in every.receivers if text.startswith("L1")]
    found = path_patch(model, clean, corrupt, "heads", named[1:], metric=logit_diff(3, 5), **QUIET)
    assert found.receivers == tuple(named[1:])
    same = every.raw[:, [every.receivers.index(text) for text in named[1:]]]
    assert torch.allclose(found.raw, same, equal_nan=True)


def test_bad_edges_are_named():
    model, clean, corrupt = setting("course")
    cases = [
        ({"senders": "head"}, ValueError, "senders must be 'heads'"),
        ({"senders": [AttnBias(0)]}, ValueError, r"L0\.attn_bias is no sender"),
        ({"senders": [Head(0, 7)]}, IndexError, "head 7"),
        ({"receivers": [Attn(0)]}, ValueError, "is none"),
        ({"receivers": ["L1H0.x"]}, ValueError, "'L1H0.x' is not a component"),
        ({"receivers": ["L1H9.k"]}, IndexError, "head 9"),
        ({"receivers": ["L1KV0.q"]}, ValueError, "every head has queries of its own"),
        ({"inputs": ["x"]}, ValueError, r"among q, k, v, not \['x'\]"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            path_patch(model, clean, corrupt, **{"metric": logit_diff(3, 5), **QUIET, **options})
    with pytest.raises(ValueError, match="paths need pre-norm blocks"):
        path_patch(*setting("post_norm"), metric=logit_diff(3, 5), **QUIET)


def test_the_cost_of_paths_is_that_of_the_sweeps_that_run(monkeypatch):
    model, clean, corrupt = setting("course")
    given = {"metric": logit_diff(3, 5), **QUIET}
    cost = path_cost(model, clean, corrupt, "heads", ["L1H0", "L1.mlp", "logits"], **given)
    ran, run = [], Sweep.run

    def counted(self, **options):
        ran.append(self.cost())
        return run(self, **options)

    monkeypatch.setattr(Sweep, "run", counted)
    path_patch(model, clean, corrupt, "heads", ["L1H0", "L1.mlp", "logits"], **given)
    assert cost.interventions == sum(one.interventions for one in ran)
    assert cost.flops == pytest.approx(sum(one.flops for one in ran))
