"""Attribution and paths measured on prompts, and their commands."""

import json

import pytest
import torch
from small_models import HOSTILE, HostileTokenizer, small_model

from analysis import cli, logit_attribution, logit_paths
from circuits import Head, save
from circuits.components import NormBias
from tests.batches import SIDES, pad, random_prompts, random_tokens


@pytest.fixture(scope="module")
def model():
    return small_model(bias_qkv=True, bias_unembed=True)


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(model.config, batch=5, pos=11)


def lead(model, tokens, found, mask=None):
    """The logit difference of the model itself."""
    rows = torch.arange(len(tokens))
    logits = model(tokens, mask)[rows, found.position]
    return logits[rows, found.correct] - logits[rows, found.wrong]


@pytest.mark.parametrize("unit", ["layer", "head", "neuron"])
def test_rows_of_each_prompt_sum_to_the_lead(model, tokens, unit):
    found = logit_attribution(model, tokens, 3, torch.tensor([1, 2, 5, 6, 7]), unit=unit)
    torch.testing.assert_close(found.value.sum(0), lead(model, tokens, found).detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.total, lead(model, tokens, found).detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.mean, found.value.mean(1))
    assert found.error < 1e-10


def test_prompts_run_in_batches_give_the_same(model, tokens):
    whole, parts = logit_attribution(model, tokens), logit_attribution(model, tokens, batch_size=2)
    torch.testing.assert_close(whole.value, parts.value, rtol=1e-12, atol=1e-12)
    assert torch.equal(whole.correct, parts.correct)


def test_answers_that_are_not_given_are_the_two_likeliest(model, tokens):
    found = logit_attribution(model, tokens)
    best = model(tokens)[:, -1].topk(2).indices
    assert torch.equal(torch.stack([found.correct, found.wrong], 1), best)
    assert (found.total > 0).all()
    other = logit_attribution(model, tokens, wrong=best[:, 0])
    assert torch.equal(other.correct, best[:, 1])
    torch.testing.assert_close(other.total, -found.total)
    given = logit_attribution(model, tokens, correct=best[:, 1])
    assert torch.equal(given.wrong, best[:, 0])


@pytest.mark.parametrize("side", SIDES)
def test_padding_changes_nothing(model, side):
    prompts = random_prompts(model.config)
    padded, mask = pad(prompts, side)
    found = logit_attribution(model, padded, attention_mask=mask, position=-2)
    expanded = logit_paths(model, padded, attention_mask=mask, position=-2, top=None)
    for row, prompt in enumerate(prompts):
        alone = logit_attribution(model, prompt[None], position=-2)
        assert int(found.correct[row]) == int(alone.correct)
        torch.testing.assert_close(found.value[:, row], alone.value[:, 0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(expanded.total, found.total, rtol=1e-10, atol=1e-10)


def test_the_table_shows_means_and_intervals(model, tokens):
    found = logit_attribution(model, tokens)
    frame = found.to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "mean", "interval_low", "interval_high"]
    row = frame.query("component == 'L1H2'").iloc[0]
    values = found.value[found.components.index(Head(1, 2))]
    assert row["mean"] == pytest.approx(float(values.mean()))
    assert values.min() <= row["interval_low"] <= row["mean"] <= row["interval_high"] <= values.max()
    assert NormBias("ln_final") in found.components


def test_paths_add_up_to_the_attribution(model, tokens):
    found, rows = logit_paths(model, tokens, top=None), logit_attribution(model, tokens)
    for layer in range(2):
        for head in range(3):
            last = [p.value for p in found.paths if str(p.components[-1]).startswith(str(Head(layer, head)))]
            row = rows.value[rows.components.index(Head(layer, head))]
            torch.testing.assert_close(sum(last), row, rtol=1e-10, atol=1e-10)


def test_answers_of_another_number_than_prompts_are_refused(model, tokens):
    with pytest.raises(ValueError, match=r"correct has shape \[2\]; expected one token, or one for each of 5"):
        logit_attribution(model, tokens, torch.tensor([1, 2]))
    with pytest.raises(IndexError, match="token 17 is not in a vocabulary of 17"):
        logit_attribution(model, tokens, 17)
    with pytest.raises(IndexError, match="position 11 is not in prompt 0"):
        logit_paths(model, tokens, position=11)


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small.safetensors"
    save(model, path)
    return str(path)


@pytest.fixture
def hostile(monkeypatch):
    """The commands run on a model whose tokens are hostile."""
    made = small_model(d_vocab=len(HOSTILE))
    made.tokenizer = HostileTokenizer()
    monkeypatch.setattr("analysis.cli.options.load_model", lambda args: made)
    return made


def test_attribution_prints_rows_that_sum_to_the_total(model, saved, capsys):
    assert cli.main(["attribution", "--model", saved, "--tokens", "1 2 3 4", "--top", "5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    shown = [row["value"] for row in data["components"]]
    assert len(shown) == 5
    assert sum(shown) + data["rest"] == pytest.approx(data["total"])
    best = model(torch.tensor([[1, 2, 3, 4]]))[0, -1].detach().topk(2)
    assert [data["correct"]["id"], data["wrong"]["id"]] == best.indices.tolist()
    assert data["total"] == pytest.approx(float(best.values[0] - best.values[1]))


def test_attribution_prints_a_table(saved, capsys):
    assert cli.main(["attribution", "--model", saved, "--tokens", "1 2 3", "--top", "3", "--correct", "4"]) == 0
    text = capsys.readouterr().out
    assert "Logit difference of “4” over “" in text
    assert text.strip().splitlines()[-1].startswith("total")
    assert "others" in text


def test_paths_print_paths_and_the_remainder(saved, capsys):
    words = ["paths", "--model", saved, "--tokens", "1 2 3 4", "--top", "4", "--routes", "2"]
    assert cli.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert sum(path["value"] for path in data["paths"]) + data["remainder"] == pytest.approx(data["total"])
    assert data["proof"] == "enumeration"
    assert all(1 <= len(path["routes"]) <= 2 for path in data["paths"])
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "all other paths" in text
    assert f"all {data['n_paths']} paths were looked at" in text
    assert " → ".join(data["paths"][0]["components"]) in text


def test_paths_say_when_a_list_is_not_proven(saved, capsys):
    assert cli.main(["paths", "--model", saved, "--tokens", "1 2 3 4", "--budget", "1", "--top", "90"]) == 0
    assert "the largest found, not proven the largest" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["attribution", "paths"])
def test_hostile_tokens_are_shown_as_text(hostile, command, capsys):
    assert cli.main([command, "--prompt", "0 1 2 3", "--correct", "1", "--wrong", "5"]) == 0
    assert "“<img·src=x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--correct", "x"], "this model has no tokenizer: give --correct a token id, not 'x'"),
        (["--correct", "40"], "token 40 is not in a vocabulary of 17"),
        (["--position", "4"], "position 4 is not in prompt 0"),
        (["--top", "0"], "top must be at least 1, not 0"),
    ],
)
@pytest.mark.parametrize("command", ["attribution", "paths"])
def test_bad_questions_are_one_line(saved, command, words, message, capsys):
    assert cli.main([command, "--model", saved, "--tokens", "1 2 3", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_a_token_option_must_be_one_token(hostile, capsys):
    assert cli.main(["paths", "--prompt", "0 1", "--correct", "0 1"]) == 2
    assert "--correct: '0 1' is 2 tokens, not one" in capsys.readouterr().err
