"""The command line: one line and the right status for whatever goes wrong, and never a stack trace."""

import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from small_models import small_model

from analysis import cli
from analysis.cli import options
from analysis.cli.output import print_json, print_table

ROOT = Path(__file__).parents[2]


def run_circuits(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "analysis.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


@pytest.fixture
def probe(monkeypatch):
    """A command `probe` whose `run` can be replaced."""

    def add_arguments(parser):
        parser.add_argument("--size", type=int, default=3)

    module = types.ModuleType("analysis.cli.probe")
    module.HELP = "probes the command line"
    module.EXAMPLES = ["circuits probe --size 5"]
    module.add_arguments = add_arguments
    module.run = lambda args: None
    monkeypatch.setitem(sys.modules, "analysis.cli.probe", module)
    monkeypatch.setattr(cli, "COMMANDS", ("probe",))
    return module


def fails_with(module, error):
    def run(args):
        raise error

    module.run = run


def test_help_needs_no_torch():
    code = "import sys; from analysis.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "usage: circuits" in done.stdout
    assert not {"torch", "pandas", "rich", "plotly", "numpy"} & set(done.stderr.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_examples_and_json(name, capsys):
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: circuits {name}" in text
    assert f"  circuits {name}" in text.split("examples:")[1]
    assert "--json" in text


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_parse(name):
    command = cli.find(name)
    parser = cli.parser_of(name, command)
    for line in command.EXAMPLES:
        program, word, *arguments = shlex.split(line)
        assert (program, word) == ("circuits", name)
        assert isinstance(parser.parse_args(arguments), argparse.Namespace)


def test_overview_lists_every_command_with_its_line(probe, capsys):
    for words in ([], ["--help"], ["-h"]):
        assert cli.main(words) == 0
        assert "  probe  probes the command line" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"qkov {cli.version().split()[1]}\n"


def test_arguments_reach_the_command_and_its_status_comes_back(probe):
    probe.run = lambda args: args.size
    assert cli.main(["probe"]) == 3
    assert cli.main(["probe", "--size", "7"]) == 7
    probe.run = lambda args: None
    assert cli.main(["probe"]) == 0


def test_unknown_command_names_the_nearest(probe, capsys):
    assert cli.main(["prob"]) == 2
    assert capsys.readouterr().err == "circuits: there is no command 'prob'; did you mean probe?\n"
    assert cli.main(["zzz"]) == 2
    assert capsys.readouterr().err == "circuits: there is no command 'zzz'; the commands are probe\n"
    assert cli.main(["--probe"]) == 2
    assert "there is no option '--probe'" in capsys.readouterr().err


def test_bad_argument_is_one_line(probe, capsys):
    assert cli.main(["probe", "--size", "big"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "circuits probe: argument --size: invalid int value: 'big' (see circuits probe --help)\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("head 7 is not in\n  a model of 3 heads"), "head 7 is not in a model of 3 heads"),
        (TypeError("tokens must be ints"), "tokens must be ints"),
        (KeyError("no hook named 'patern'"), "no hook named 'patern'"),
        (IndexError("layer 4"), "layer 4"),
        (
            FileNotFoundError(2, "No such file or directory", "x.safetensors"),
            "x.safetensors: No such file or directory",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_bad_input_is_one_line_and_status_2(probe, capsys, error, line):
    fails_with(probe, error)
    assert cli.main(["probe"]) == 2
    assert capsys.readouterr().err == f"circuits probe: {line}\n"


def test_a_fault_of_ours_is_one_line_that_says_how_to_see_more(probe, capsys, monkeypatch):
    fails_with(probe, RuntimeError("shapes differ"))
    assert cli.main(["probe"]) == 1
    line = "circuits probe: RuntimeError: shapes differ (CIRCUITS_TRACEBACK=1 shows where)\n"
    assert capsys.readouterr().err == line
    monkeypatch.setenv("CIRCUITS_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="shapes differ"):
        cli.main(["probe"])


def test_interruption_is_one_line_and_status_130(probe, capsys):
    fails_with(probe, KeyboardInterrupt())
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "circuits probe: interrupted\n"


def test_a_reader_that_leaves_is_not_an_error():
    code = (
        "import sys, types; from analysis import cli; m = types.ModuleType('analysis.cli.probe');"
        "m.HELP = 'x'; m.EXAMPLES = []; m.add_arguments = lambda p: None;"
        "m.run = lambda a: [print('y' * 1000) for _ in range(1000)] and None;"
        "sys.modules['analysis.cli.probe'] = m; cli.COMMANDS = ('probe',); sys.exit(cli.main(['probe']))"
    )
    reader = ["bash", "-c", f'"{sys.executable}" -c "$CODE" | head -c 10; exit ${{PIPESTATUS[0]}}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CODE": code}
    done = subprocess.run(reader, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (141, "y" * 10, "")


def test_the_module_runs_as_a_program():
    done = run_circuits("reprot")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("circuits: there is no command 'reprot'")
    assert done.stderr.count("\n") == 1


def test_json_has_no_number_that_json_lacks(capsys):
    import torch

    print_json({"a": float("nan"), "b": torch.tensor(2.5), "c": [torch.tensor(3), float("inf")], "d": "é</script>"})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": 2.5, "c": [3, None], "d": "é</script>"}


def test_tables_are_not_cut_off_in_a_file_and_show_markup_as_text(capsys):
    row = {"name": "[bold]L0H0[/bold]", "share": 0.32163, "rank": 32, "score": float("nan"), "long": "x" * 90}
    print_table("Heads", [row], {"share": ".1%"})
    out = capsys.readouterr().out
    assert "[bold]L0H0[/bold]" in out
    assert "32.2%" in out
    assert "–" in out
    assert "x" * 90 in out


def test_a_number_is_never_cut_short_in_a_narrow_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "20")
    print_table("Heads", [{f"column {i}": 10.0 + i for i in range(9)}])
    assert all(f"{10 + i}.000" in terminal.getvalue() for i in range(9))


def run_with_streams(redirection, *words, **environment):
    """The command under a shell's redirection, such as ``>&-``."""
    line = ["bash", "-c", f'"{sys.executable}" -m analysis.cli {shlex.join(words)} {redirection}']
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment)


def test_an_output_that_is_closed_is_no_fault():
    done = run_with_streams(">&-", "models")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_is_full_is_one_line():
    done = run_with_streams(">/dev/full", "models")
    assert (done.returncode, done.stderr) == (2, "circuits models: [Errno 28] No space left on device\n")


def test_a_terminal_that_lacks_a_character_gets_its_number():
    done = run_with_streams("", "train", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u03b5 of the norms" in done.stdout


def test_json_for_a_reader_without_unicode_says_the_same(capsysbinary, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sys.stdout.buffer, encoding="ascii"))
    print_json({"text": "é😀"})
    sys.stdout.flush()
    assert json.loads(capsysbinary.readouterr().out.decode("ascii")) == {"text": "é😀"}


# --- the commands that there are ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The path of a small model without a tokenizer."""
    from circuits import save

    path = tmp_path_factory.mktemp("models") / "small.safetensors"
    save(small_model(), path)
    return str(path)


def test_params_prints_the_lectures_table(tmp_path, capsys):
    from circuits import GPTConfig, HookedGPT, save

    save(HookedGPT(GPTConfig.course()), tmp_path / "course.safetensors")
    assert cli.main(["params", "--model", str(tmp_path / "course.safetensors")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attention", "in", "all", "blocks", "262,656", "32.16%"] in lines
    assert ["final", "LayerNorm", "and", "unembedding", "8,576", "1.05%"] in lines
    assert ["total", "816,640", "100.00%"] in lines


def test_params_json_adds_up_to_every_stored_number(saved, capsys):
    from circuits import load

    assert cli.main(["params", "--detail", "--json", "--model", saved]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["total"] == sum(row["parameters"] for row in data["parameters"])
    assert data["total"] == sum(parameter.numel() for parameter in load(saved).parameters())


def test_heads_prints_every_head_and_its_json_has_the_measured_numbers(saved, capsys):
    from analysis import head_scores
    from circuits import load

    assert cli.main(["heads", "--model", saved]) == 0
    out = capsys.readouterr().out
    assert all(out.count(f"L{layer}H{head}") == 3 for layer in range(2) for head in range(3))
    assert cli.main(["heads", "--json", "--model", saved]) == 0
    rows = json.loads(capsys.readouterr().out)["heads"]
    assert [row["head"] for row in rows] == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]
    assert rows[4]["first"] == pytest.approx(head_scores(load(saved)).first[1, 1].item(), rel=1e-6)


def test_report_writes_a_page_and_prints_the_tables(saved, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", "--model", saved, "--tokens", "3 1 16 0 3 1", "--output", str(page)]) == 0
    out = capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "Parameters of small" in out
    assert "L1H2" in out
    assert "L1.mlp" in out
    assert "Prompt: 3 1 16 0 3 1\n" in out
    assert out.endswith(f"Wrote {page}\n")


def test_report_without_a_prompt_uses_the_built_in_one(saved, tmp_path, capsys):
    from analysis.prompts import default_tokens
    from circuits import load

    page = tmp_path / "page.html"
    assert cli.main(["report", "--json", "--model", saved, "--output", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["token"] for row in data["prompt"]] == default_tokens(load(saved))[0].tolist()
    assert data["output"] == str(page)
    assert set(data["zero_ablation"]) >= {"L0H0", "L1.mlp", "L0"}
    assert len(data["heads"]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "hi"], "this model has no tokenizer: give token ids"),
        (["--tokens", "1 x"], "token 1 is 'x'"),
        (["--tokens", "1 17"], "token 1 is 17, not an id of a vocabulary of 17"),
        (["--tokens", "1 " * 14], "the prompt has 14 tokens, more than the model's context n_ctx = 13"),
        (["--tokens", " "], "no token ids were given"),
        (["--tokens", "1", "--prompt", "x"], "not allowed with argument"),
        (["--output", "missing/page.html"], "there is no folder 'missing'"),
        (["--device", "gpu"], "device 'gpu' cannot be used here"),
    ],
)
def test_bad_input_to_a_report_is_one_line_and_leaves_no_file(saved, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "--model", saved, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_interrupted_report_leaves_the_page_that_was_there(saved, tmp_path, capsys, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("before")

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.report.report", interrupted)
    assert cli.main(["report", "--model", saved, "--output", str(page)]) == 130
    assert page.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_report_compares_the_two_tokens_that_are_asked_for(saved, tmp_path, capsys):
    from circuits import load

    words = ["report", "--json", "--model", saved, "--tokens", "3 1 16 0 3 1", "--output", str(tmp_path / "page.html")]
    assert cli.main([*words, "--correct", "7", "--wrong", "2", "--position", "3"]) == 0
    data = json.loads(capsys.readouterr().out)["attribution"]
    logits = load(saved)(torch.tensor([[3, 1, 16, 0, 3, 1]]))[0, 3]
    assert (data["correct"], data["wrong"], data["position"]) == ("7", "2", 3)
    assert data["total"] == pytest.approx((logits[7] - logits[2]).item(), abs=1e-4)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "After position 3, ‘0’, the next token ‘7’ is compared with ‘2’." in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--correct", "x"], "give --correct a token id, not 'x'"),
        (["--wrong", "17"], "17"),
        (["--position", "6"], "6"),
    ],
)
def test_report_refuses_tokens_and_positions_that_do_not_exist(saved, tmp_path, capsys, words, message):
    page = tmp_path / "page.html"
    assert cli.main(["report", "--model", saved, "--tokens", "3 1 16 0 3 1", "--output", str(page), *words]) == 2
    assert message in capsys.readouterr().err
    assert not page.exists()


def test_tables_of_scores_say_what_they_were_measured_on(saved, capsys):
    assert cli.main(["heads", "--model", saved]) == 0
    assert "Attention scores on 8 sequences of 6 different random tokens, twice" in capsys.readouterr().out


def test_help_of_train_names_the_course_configuration(capsys):
    assert cli.main(["train", "--help"]) == 0
    assert "(V, T_max, d, H, L) = (65, 64, 128, 4, 4)" in " ".join(capsys.readouterr().out.split())


def test_paths_show_no_shares_of_a_lead_that_is_left_of_parts_that_cancel(capsys):
    assert cli.main(["paths"]) == 0
    out = capsys.readouterr().out
    assert "%" not in out
    assert "largely cancel" in out
    words = ["paths", "--model", "induction", "--tokens", "5 9 2 7 5 9 2", "--correct", "7", "--wrong", "9"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "+100.0%" in out
    assert "largely cancel" not in out


def test_models_that_do_not_exist_are_one_line(capsys, tmp_path):
    for name in ("shakespeer", str(tmp_path / "missing.safetensors")):
        assert cli.main(["params", "--model", name]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_models_lists_every_bundled_model(capsys):
    from circuits.storage import bundled_names

    assert cli.main(["models", "--json"]) == 0
    assert tuple(model["name"] for model in json.loads(capsys.readouterr().out)["models"]) == bundled_names()
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in bundled_names())
    assert "tinyshakespeare.txt, 4,000 steps, validation loss 1.555 nats" in out
    assert "task repeated, 5,000 steps, validation loss 0.012 nats" in out


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("shakespeare", "shakespeare"),
        ("runs/a.b.safetensors", "a.b"),
        ("models/SmolLM2-1.7B/", "SmolLM2-1.7B"),
        ("hf:ORG/NAME-0.5B", "NAME-0.5B"),
        ("x/tiny.gguf", "tiny"),
    ],
)
def test_a_model_is_called_after_its_file_or_folder(model, name):
    assert options.model_name(argparse.Namespace(model=model)) == name


def test_verify_prints_every_claim_and_succeeds_where_all_hold(saved, capsys):
    assert cli.main(["verify", "--model", saved]) == 0
    out = capsys.readouterr().out
    assert "Claims of the lecture on small" in out
    assert "4.2.sphere" in out
    assert "do not hold" not in out


def test_verify_exits_with_1_where_a_claim_does_not_hold(tmp_path, capsys):
    from circuits import GPTConfig, HookedGPT, save

    model = HookedGPT(GPTConfig(n_layers=2, d_model=36, n_heads=4, n_ctx=23, d_vocab=19))
    model.blocks[0].mlp.down.weight.data *= 5
    save(model, tmp_path / "wrong.safetensors")
    words = ["verify", "--model", str(tmp_path / "wrong.safetensors")]
    assert cli.main(words) == 1
    assert "5.2b.scale does not hold: Each branch's output projection" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["holds"] is False
    assert [row["claim"] for row in data["claims"] if row["status"] == "does not hold"] == ["5.2b.scale"]
    assert cli.main([*words, "--claim", "ex1", "--claim", "ex2"]) == 0


def test_verify_explains_a_claim_and_names_the_nearest(capsys):
    assert cli.main(["verify", "--explain", "4.2.sphere"]) == 0
    out = capsys.readouterr().out
    assert "Proposition 4.2" in out
    assert "√d v / ‖v‖" in out
    assert cli.main(["verify", "--explain", "4.2.sfere"]) == 2
    assert "the nearest are 4.2.sphere" in capsys.readouterr().err
    assert cli.main(["verify", "--claim", "9.9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_params_counts_operations_on_request(saved, capsys):
    from analysis import flops
    from circuits import load

    assert cli.main(["params", "--tokens", "100", "--training", "--json", "--model", saved]) == 0
    data = json.loads(capsys.readouterr().out)["operations"]
    counted = flops(load(saved), tokens=100, training=True)
    assert data["total"] == counted.total == sum(row["flops"] for row in data["parts"])
    assert data["crossover"] == counted.crossover
    assert cli.main(["params", "--training", "--model", saved]) == 0
    out = capsys.readouterr().out
    assert "Operations of a training step on 13 tokens" in out
    assert "6·N·D, N without the unembedding" in out
    assert cli.main(["params", "--tokens", "0", "--model", saved]) == 2
    assert "tokens must be at least 1" in capsys.readouterr().err
    assert cli.main(["params", "--json", "--model", saved]) == 0
    assert "operations" not in json.loads(capsys.readouterr().out)
