"""The command line: one line and the right status for whatever goes wrong, and never a stack trace."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from analysis import cli
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
    import pandas as pd

    frame = pd.DataFrame({"name": ["[bold]L0H0[/bold]"], "share": [0.32163], "rank": [32], "score": [float("nan")]})
    print_table("Heads", frame, {"share": ".1%"})
    out = capsys.readouterr().out
    assert "[bold]L0H0[/bold]" in out
    assert "32.2%" in out
    assert "–" in out
