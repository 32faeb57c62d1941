"""What the README shows runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
# The section on pretrained weights names files that a reader has and a test has not.
SECTIONS = [part for part in README.split("\n## ") if not part.startswith("Pretrained weights")]
PYTHON = re.findall(r"```python\n(.*?)```", "".join(SECTIONS), flags=re.DOTALL)
COMMANDS = re.findall(r"^\| `circuits (\w+)`", README, flags=re.MULTILINE)


def test_the_python_in_the_readme_runs_from_top_to_bottom() -> None:
    assert len(PYTHON) >= 3
    names: dict[str, Any] = {}
    for block in PYTHON:
        exec(compile(block, "README.md", "exec"), names)


@pytest.mark.parametrize("name", ["shakespeare", "induction"])
def test_the_command_behind_a_bundled_model_is_the_one_on_its_card(name: str) -> None:
    from circuits import load

    on_one_line = README.replace("\\\n   ", "").replace("  ", " ")
    assert load(name).card["command"] in on_one_line.splitlines()


def test_the_readme_lists_every_command() -> None:
    from analysis.cli import COMMANDS as known

    assert sorted(COMMANDS) == sorted(known)


@pytest.mark.parametrize("path", re.findall(r"\]\(((?!http)[^)#]+)", README))
def test_a_linked_file_exists(path: str) -> None:
    assert (Path(__file__).parent.parent / path).exists()
