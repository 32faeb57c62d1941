"""What the guide to interventions shows runs as it is written, and it leaves no edit out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parent.parent / "docs" / "interventions.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = re.findall(r"^circuits (.*)$", PAGE, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def names(folder: Path) -> dict[str, Any]:
    """Everything that the page defines, after it has run from top to bottom in a folder of its own."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in PYTHON:
            exec(compile(block, "docs/interventions.md", "exec"), names)
    return names


def test_the_python_on_the_page_says_what_comes_out(names: dict[str, Any]) -> None:
    assert len(PYTHON) >= 8
    assert names["logits"].shape == (3, 1, 1, 65)
    assert names["shakespeare"].to_string(names["logits"][:, 0, 0].argmax(-1)) == "awR"
    assert bool(names["effects"].stands_out().all())
    edges = names["edges"]
    found = {
        f"{sender} → {receiver}": float(share)
        for sender, row in zip(edges.senders, edges.values, strict=True)
        for receiver, share in zip(edges.receivers, row, strict=True)
    }
    most = sorted(found, key=lambda edge: -found[edge])[:2]
    assert set(most) == {"L0H0 → L1H0.k", "L0H0 → L1H1.k"}
    assert all(found[edge] > 0.5 for edge in most)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_on_the_page_run(
    command: str,
    names: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from analysis.cli import main

    assert "yours" in names  # whose file they read
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out


def test_the_table_of_edits_is_complete_and_each_is_used(names: dict[str, Any]) -> None:
    from circuits import rerun

    edits = {n for n in rerun.__all__ if isinstance(kind := getattr(rerun, n), type) and issubclass(kind, rerun.Edit)}
    assert set(re.findall(r"^\| `(\w+)\(", PAGE, flags=re.MULTILINE)) == edits - {"Edit"}
    assert [name for name in edits - {"Edit"} if f"{name}(" not in "".join(PYTHON)] == []


def test_the_page_names_every_site_and_option(names: dict[str, Any]) -> None:
    from analysis.patching.activation import SITES

    assert [site for site in SITES if f"`{site}`" not in PAGE] == []
    options = ("reference", "positions", "per_position", "freeze", "budget", "executor", "resume", "normalise")
    assert [option for option in options if option not in PAGE] == []


def test_how_many_prompts_it_takes_is_as_the_page_says() -> None:
    from analysis.uncertainty import false_discovery, sign_flip_p_values

    alone = torch.ones(100)
    for n, found in ((11, False), (12, True)):
        alone[0] = sign_flip_p_values(torch.ones(1, n), torch.ones(n))
        assert bool(false_discovery(alone, 0.05)[0]) is found
    same = [float(sign_flip_p_values(torch.ones(1, n), torch.ones(n))) for n in (1, 4, 8)]
    assert same == [1.0, 0.125, 0.0078125]
