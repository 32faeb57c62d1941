"""`circuits ablate` and `circuits patch` on a small saved model."""

from __future__ import annotations

import json

import pytest
import torch

from analysis.ablation import ablate
from analysis.cli import main
from analysis.cli.ablate import parse_components
from analysis.patching import activation_patch
from analysis.tasks import read_pairs, repeated_tokens
from circuits import MLP, GPTConfig, Head, HookedGPT, load, save


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = GPTConfig(n_layers=2, d_model=12, n_heads=3, n_ctx=19, d_vocab=17, d_mlp=11)
    save(HookedGPT(config, seed=3), "m.safetensors")
    repeated_tokens(load("m.safetensors"), n=6, batch=4).write("pairs.jsonl")
    return load("m.safetensors")


def printed(capsys, words):
    assert main(words) == 0
    return json.loads(capsys.readouterr().out)


def test_ablate_prints_what_ablate_returns(model, capsys):
    pairs = read_pairs("pairs.jsonl")
    words = "ablate --model m.safetensors --pairs pairs.jsonl --components L0H1,L1.mlp,L0H0+L1H2 --method mean --json"
    data = printed(capsys, words.split())
    found = ablate(
        model,
        pairs.clean,
        [Head(0, 1), MLP(1), (Head(0, 0), Head(1, 2))],
        "mean",
        pairs.metric,
        reference=pairs.corrupt,
        progress=False,
    )
    assert data["mean"] == pytest.approx(found.mean.tolist())
    assert data["metric"] == "logit_diff"


def test_patch_prints_what_activation_patch_returns(model, capsys):
    pairs = read_pairs("pairs.jsonl")
    words = "patch --model m.safetensors --pairs pairs.jsonl --site head --whole --direction noise --json"
    data = printed(capsys, words.split())
    found = activation_patch(
        model,
        pairs.clean,
        pairs.corrupt,
        "head",
        metric=pairs.metric,
        by_position=False,
        direction="noise",
        progress=False,
    )
    assert torch.allclose(torch.tensor(data["raw"]), found.raw, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("ablate --tokens 1,2,3,4,5,1,2", "Change of loss"),
        ("ablate --task ioi --top 2", "the largest 2 of 6"),
        ("ablate --task greater-than --components mlps", "L1.mlp"),
        ("ablate --every-pair --task repeated", "excess over the sum of both; 15 pairs"),
        ("ablate --cost", "forward passes' worth of operations"),
        ("patch --raw", "resid_pre patched from clean into corrupt"),
        ("patch --paths --raw --top 3", "L1H"),
    ],
)
def test_tables_say_what_they_show(model, capsys, words, shown):
    assert main([*words.split(), "--model", "m.safetensors"]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())


def test_one_prompt_is_called_one_and_has_no_interval(model, capsys):
    assert main(["ablate", "--tokens", "1,2,3,4,5,1,2", "--model", "m.safetensors"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 prompt, which has no interval" in out
    assert "interval_low" not in out
    assert main(["ablate", "--task", "repeated", "--model", "m.safetensors"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "8 prompts, 95% interval" in out
    assert "interval_low" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ablate --components head", "did you mean 'heads'"),
        ("ablate --components L0H9", "head 9 is not in a model of 3 heads"),
        ("ablate --components L0,L0.mpl", "'L0.mpl' is not a component"),
        ("ablate --metric logit_diff", "needs answers: give --pairs or --task"),
        ("ablate --method mean", "needs reference prompts"),
        ("ablate --top 0", "--top must be at least 1, not 0"),
        ("ablate --pairs nowhere.jsonl", "nowhere.jsonl: No such file"),
        ("patch --site resid", "invalid choice: 'resid'"),
        ("patch --pairs pairs.jsonl --task ioi", "not allowed with argument"),
    ],
)
def test_bad_input_is_one_line_and_status_2(model, capsys, words, message):
    assert main([*words.split(), "--model", "m.safetensors"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_cost_of_every_pair_counts_the_pairs(model, capsys):
    assert main("ablate --every-pair --cost --components L0H0,L0H1,L1H2 --model m.safetensors".split()) == 0
    assert capsys.readouterr().out.startswith("6 interventions")  # three alone, three pairs


def test_components_are_words_or_lists():
    assert parse_components("heads") == "heads"
    assert parse_components("L0H1, L2H0+L2H3") == [Head(0, 1), (Head(2, 0), Head(2, 3))]
    assert [str(c) for c in parse_components("embed")] == ["embed"]
