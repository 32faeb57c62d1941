"""`circuits ablate` and `circuits patch` on a small saved model."""

from __future__ import annotations

import json

import pytest
import torch

from analysis.ablation import ablate
from analysis.cli import main
from analysis.cli.ablate import parse_components
from analysis.cli.effects import say_doubts
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
        ("patch --paths --raw --top 3", "; the largest 3 of 27"),
        ("patch --positions=-1,4 --raw", "resid_pre at positions -1, 4 only patched"),
        ("patch --cost", "forward passes' worth of operations"),
        ("patch --paths --cost", "27 interventions"),
        ("ablate --task ioi", "On indirect object identification on random tokens: the model has no tokenizer."),
        ("patch --task greater-than --raw", "On greater-than on random tokens: the model has no tokenizer."),
        ("patch --raw", "On repeated tokens. resid_pre"),
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
        ("ablate --method mean", "--method mean needs prompts to take the mean over: give --task or --pairs"),
        ("ablate --positions 1,x", "--positions must be whole numbers such as 3,-1, not '1,x'"),
        ("ablate --positions 99", "position 99"),
        ("patch --positions 99", "position 99 is in none of the prompts"),
        ("patch --paths --positions 3", "--positions does not go with --paths"),
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


@pytest.mark.parametrize("words", ["ablate", "ablate --every-pair", "patch", "patch --site head", "patch --paths"])
def test_the_cost_is_json_where_that_is_asked_for(model, capsys, words):
    data = printed(capsys, [*words.split(), "--cost", "--json", "--model", "m.safetensors"])
    assert list(data) == ["interventions", "batches", "flops", "forwards", "bytes"]
    assert data["interventions"] > 0
    assert data["forwards"] > 0


def test_random_tokens_are_said_in_json_and_in_the_help(model, capsys):
    data = printed(capsys, "ablate --task ioi --json --model m.safetensors".split())
    assert data["prompts"] == "indirect object identification on random tokens: the model has no tokenizer"
    data = printed(capsys, "patch --task greater-than --json --model shakespeare --whole".split())
    assert data["prompts"] == "greater-than on random tokens: the tokenizer has no such years"
    assert main(["patch", "--help"]) == 0
    assert "random tokens elsewhere" in " ".join(capsys.readouterr().out.split())


def test_a_task_that_the_model_does_not_do_is_called_that(capsys):
    for words in ("patch --task ioi", "patch --task ioi --direction noise", "ablate --task ioi --components L0H0"):
        assert main([*words.split(), "--model", "shakespeare"]) == 0
        error = capsys.readouterr().err
        assert "the model does not do this task" in error
        assert "is -0.0775 on the clean prompts" in error
        assert ("-0.669 on the corrupt ones" in error) == words.startswith("patch")
        assert len(error.splitlines()) == 1
    assert main("patch --model induction --whole".split()) == 0
    assert capsys.readouterr().err == ""


def test_runs_that_hardly_differ_are_called_that(capsys):
    spread, same = torch.tensor([1.0, 3.0, 2.0, 4.0]), torch.tensor([2.0, 2.0, 3.0, 3.0])
    say_doubts("patch", spread, same)
    assert "hardly differ" in capsys.readouterr().err
    say_doubts("patch", spread, same - 3.0)
    assert capsys.readouterr().err == ""
    say_doubts("patch", same - 3.0, spread)
    assert "does not do this task" in capsys.readouterr().err


def test_tables_of_patches_fit_eighty_columns_and_titles_are_one_line(model, capsys):
    for words in ("patch", "patch --site head", "patch --site head --whole", "patch --paths"):
        assert main([*words.split(), "--model", "m.safetensors", "--task", "repeated"]) == 0
        prompts, title, head, *rows = capsys.readouterr().out.splitlines()
        assert prompts == "On repeated tokens."
        assert "patched from clean into corrupt" in title
        assert "8 prompts, 95% interval" in title
        assert head.split()[-6:] == ["raw", "low", "high", "share", "share_low", "share_high"]
        assert "layer_sender" not in head
        assert max(len(line.rstrip()) for line in [head, *rows]) <= 80


def test_positions_are_where_components_are_taken_out(model, capsys):
    pairs = read_pairs("pairs.jsonl")
    words = "ablate --model m.safetensors --pairs pairs.jsonl --positions=-2,3 --json"
    data = printed(capsys, words.split())
    found = ablate(model, pairs.clean, "heads", "zero", pairs.metric, positions=[-2, 3], progress=False)
    assert data["mean"] == pytest.approx(found.mean.tolist())
    everywhere = ablate(model, pairs.clean, "heads", "zero", pairs.metric, progress=False)
    assert data["mean"] != pytest.approx(everywhere.mean.tolist())


@pytest.mark.parametrize(
    ("words", "file"), [("ablate", "kept"), ("patch", "kept"), ("patch --paths --raw", "kept.1.0")]
)
def test_what_is_done_is_kept_and_gone_on_from(model, capsys, tmp_path, words, file):
    command = [*words.split(), "--model", "m.safetensors", "--json"]
    plain = printed(capsys, command)
    assert printed(capsys, [*command, "--resume", "kept"]) == plain
    assert (tmp_path / file).exists()
    assert printed(capsys, [*command, "--resume", "kept"]) == plain


def test_an_interrupted_sweep_says_where_it_is_kept(model, capsys, monkeypatch):
    def interrupted(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("circuits.rerun.sweep.Sweep.run", interrupted)
    assert main("patch --model m.safetensors --resume kept".split()) == 130
    error = capsys.readouterr().err
    assert "what is done is kept in kept; the same command goes on from there" in error
    assert main("patch --model m.safetensors".split()) == 130
    assert "kept" not in capsys.readouterr().err


def test_too_many_pairs_are_refused_with_their_count_and_cost(model, capsys, monkeypatch):
    monkeypatch.setattr("analysis.cli.ablate.MOST_RUNS", 20)
    words = "ablate --every-pair --model m.safetensors".split()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "every pair of 6 components takes 21 runs, at least " in error
    assert "give --yes" in error
    cost = printed(capsys, [*words, "--cost", "--yes", "--json"])
    assert cost["interventions"] == 21
    least = float(error.split("at least ")[1].split()[0])
    assert 0.5 * cost["forwards"] < least <= cost["forwards"] + 0.5  # the message rounds
    assert main([*words, "--yes"]) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"clean": [1, 99], "corrupt": [2, 3], "correct": 4, "wrong": 5}', "clean has token id 99, outside a vocab"),
        ('{"clean": [1, 2], "corrupt": [2, 3], "correct": -1, "wrong": 5}', "correct has token id -1, outside a vocab"),
    ],
)
def test_a_token_id_that_there_is_not_is_named_with_its_line(model, capsys, tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text((tmp_path / "pairs.jsonl").read_text() + line + "\n")
    assert main("patch --model m.safetensors --pairs bad.jsonl".split()) == 2
    assert f"bad.jsonl, line 5: {message}" in capsys.readouterr().err
