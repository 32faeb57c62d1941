"""The commands about weights alone: ranks, composition, circuit."""

import json

import pytest
import torch
from small_models import HOSTILE, HostileTokenizer, small_model

from analysis import cli, composition_scores, head_ranks
from analysis.composition import component_composition
from circuits import load, save
from circuits.full_circuits import full_ov, full_qk


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small.safetensors"
    save(small_model(), path)
    return str(path)


@pytest.fixture(scope="module")
def rotary(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "rotary.safetensors"
    save(small_model(positions="rotary", d_head=4), path)
    return str(path)


def printed(capsys, *words):
    assert cli.main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def data(capsys, *words):
    return json.loads(printed(capsys, *words, "--json"))


def refused(capsys, *words):
    assert cli.main(list(words)) == 2
    return capsys.readouterr().err


def test_ranks_prints_a_row_for_every_circuit_of_every_head(saved, capsys):
    lines = [line.split() for line in printed(capsys, "ranks", "--model", saved).splitlines()]
    found = head_ranks(load(saved))
    assert ["1", "2", "OV", "5", f"{found.stable_rank[1, 2, 1]:.2f}"] in [line[:5] for line in lines]
    assert sum(line[2:3] in (["QK"], ["OV"]) for line in lines) == 12
    full = data(capsys, "ranks", "--full", "--raw", "--model", saved)
    assert full["circuits"] == ["QK", "OV", "full QK", "full OV"]
    assert full["raw"] is True


def test_ranks_of_a_layers_heads_together(saved, capsys):
    out = printed(capsys, "ranks", "--joint", "--model", saved)
    assert out.count("OV write") == 2
    assert "none can exceed 7" in out
    assert "not allowed with argument" in refused(capsys, "ranks", "--joint", "--full", "--model", saved)


def test_ranks_of_the_scores_on_a_prompt(saved, capsys):
    found = data(capsys, "ranks", "--scores", "--tokens", "3 1 4", "--model", saved)
    assert found["bound"] == 3
    assert torch.tensor(found["numerical_rank"]).shape == (1, 2, 3)
    assert "--scores measures" in refused(capsys, "ranks", "--tokens", "3 1 4", "--model", saved)


def test_composition_lists_the_strongest_pairs_first(saved, capsys):
    found = data(capsys, "composition", "--reads", "K", "--top", "4", "--model", saved)
    scores = composition_scores(load(saved), "K").score
    best = scores[0, :, 1].flatten().topk(4).values.tolist()
    assert [row["score"] for row in found["pairs"]] == pytest.approx(best, rel=1e-6)
    first = found["pairs"][0]
    assert scores[0, int(first["writer"][3]), 1, int(first["reader"][3])].item() == pytest.approx(first["score"])
    assert "by chance 0.378" in printed(capsys, "composition", "--model", saved)


def test_composition_of_every_writer(saved, capsys):
    found = data(capsys, "composition", "--reads", "mlp", "--top", "99", "--model", saved)
    expected = component_composition(load(saved), "mlp").score
    assert len(found["pairs"]) == int(expected.isfinite().sum())
    assert {"embed", "pos_embed", "L0.mlp", "L1H2"} <= {row["writer"] for row in found["pairs"]}
    assert {row["reader"] for row in found["pairs"]} == {"L0.mlp", "L1.mlp"}
    assert "--top must be at least 1, not 0" in refused(capsys, "composition", "--top", "0", "--model", saved)


def test_circuit_lists_the_largest_entries(saved, capsys):
    found = data(capsys, "circuit", "L1H2", "--ov", "--top", "5", "--model", saved)
    dense = full_ov(load(saved), 1, 2).matrix.AB
    assert [row["value"] for row in found["entries"]] == pytest.approx(dense.flatten().topk(5).values.tolist())
    row = found["entries"][0]
    assert dense[int(row["source"]), int(row["logit"])].item() == pytest.approx(row["value"])


def test_circuit_between_positions_and_of_queries_and_keys(saved, capsys):
    arguments = ("circuit", "L0H1", "--qk", "--query", "position", "--by", "lowest", "--top", "3", "--model", saved)
    found = data(capsys, *arguments)
    dense = full_qk(load(saved), 0, 1, query="position").matrix.AB
    lowest = dense.flatten().topk(3, largest=False).values.tolist()
    assert [row["value"] for row in found["entries"]] == pytest.approx(lowest)
    assert found["entries"][0]["query"].startswith("position ")
    assert "scores are 0.4472 times this" in printed(capsys, *arguments)


def test_circuit_of_a_rotary_model_at_an_offset(rotary, capsys):
    found = data(capsys, "circuit", "L1H0", "--qk", "--offset", "3", "--top", "2", "--model", rotary)
    dense = full_qk(load(rotary), 1, 0, offset=3).matrix.AB
    assert [row["value"] for row in found["entries"]] == pytest.approx(dense.flatten().topk(2).values.tolist())
    assert "offset 3" in found["note"]
    assert "belongs to the QK circuit" in refused(capsys, "circuit", "L1H0", "--offset", "3", "--model", rotary)


def test_circuit_reads_directions_out_in_tokens(saved, capsys):
    found = data(capsys, "circuit", "L1H0", "--directions", "2", "--model", saved)
    assert [row["direction"] for row in found["directions"]] == ["0+", "0−", "1+", "1−"]
    assert len(found["directions"][0]["read"].split()) == 10
    assert "Singular directions of W_OV of L1H0" in printed(
        capsys, "circuit", "L1H0", "--directions", "1", "--model", saved
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["circuit", "L1H9"], "L1H9: head 9 is not in a model of 3 heads"),
        (["circuit", "L7H0"], "L7H0: layer 7 is not in a model of 2 layers"),
        (["circuit", "L1.mlp"], "expected a head such as L1H3, not 'L1.mlp'"),
        (["circuit", "1.3"], "'1.3' is not a component"),
        (["circuit", "L1H0", "--qk", "--offset", "2"], "offset 2 means nothing where positions is 'learned'"),
        (["circuit", "L0H0", "--source", "mlp0"], "heads of layer 0 read before MLP 0"),
        (["circuit", "L0H0", "--directions", "-2"], "n must be at least 1, not -2"),
        (["circuit", "L0H0", "--top", "0"], "k must be at least 1, not 0"),
        (["composition", "--offset", "2"], "offset 2 means nothing"),
        (["ranks", "--offset", "2"], "offset 2 means nothing"),
    ],
)
def test_bad_input_is_one_line(saved, capsys, words, message):
    err = refused(capsys, *words, "--model", saved)
    assert message in err
    assert err.count("\n") == 1


def test_tokens_are_shown_as_text(capsys, monkeypatch):
    from analysis.prompts import visible

    model = small_model(d_vocab=len(HOSTILE))
    model.tokenizer = HostileTokenizer()
    monkeypatch.setattr("analysis.cli.options.load_model", lambda args: model)
    out = printed(capsys, "circuit", "L1H1", "--top", "81")
    assert all(visible(text) in out for text in HOSTILE)
    assert torch.isfinite(full_ov(model, 1, 1).matrix.AB).all()
