"""The project itself: packaging, scripts, public names, and what may not stand in a tracked file."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("circuits", "analysis")
SCRIPTS = ("scripts/demo", "scripts/test", "scripts/check", "scripts/setup", ".ci/run")


def requirement_names(requirements: list[str]) -> set[str]:
    """`transformer-lens>=4.3,<5` -> `transformer-lens`."""
    return {re.match(r"[\w-]+", line)[0].lower() for line in requirements}


def pinned_names() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    return {line.split("==")[0] for line in lines}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in (ROOT / name for name in listing.split("\0") if name) if path.is_file()]


def names_for_type_checkers(package: str) -> dict[str, str]:
    """The `from module import name as name` lines under `if TYPE_CHECKING` of a package's `__init__`."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: node.module for node in imports for alias in node.names}


def run_python(code: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


@pytest.mark.parametrize("extra", ["core", *PROJECT["optional-dependencies"]])
def test_every_dependency_is_pinned(extra):
    requirements = PROJECT["dependencies"] if extra == "core" else PROJECT["optional-dependencies"][extra]
    assert requirement_names(requirements) - {"qkov"} <= pinned_names()


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable_strict_bash(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_every_script_in_the_readme_exists():
    named = set(re.findall(r"(?:scripts|\.ci)/\w+", (ROOT / "README.md").read_text()))
    assert {"scripts/demo", "scripts/test"} <= named <= set(SCRIPTS)


def test_setup_refuses_an_unknown_profile_before_doing_anything():
    done = subprocess.run([ROOT / "scripts/setup", "everything"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'everything'" in done.stderr
    assert "core or test" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_and_interpreter_see_the_same_public_names(package):
    assert names_for_type_checkers(package) == importlib.import_module(package)._PUBLIC


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_resolves_and_is_listed(package):
    module = importlib.import_module(package)
    assert set(module.__all__) == set(module._PUBLIC) <= set(dir(module))
    for name, home in module._PUBLIC.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)


IMPORT_EACH_FIRST = """
import importlib, os, sys, torch, safetensors
failed = []
for home in sys.argv[1:]:
    if os.fork() == 0:
        status = 1
        try:
            importlib.import_module(home)
            status = 0
        finally:
            os._exit(status)
    if os.wait()[1]:
        failed.append(home)
print(*failed)
"""


def test_every_public_name_is_importable_first():
    """A name must not depend on another of ours having been imported before it; libraries are, once, to save time."""
    homes = sorted({home for package in PACKAGES for home in importlib.import_module(package)._PUBLIC.values()})
    assert run_python(IMPORT_EACH_FIRST, "circuits.gone", *homes) == "circuits.gone\n"  # which there is not


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_lists_public_names_only(package):
    module = importlib.import_module(package)
    assert {name for name in dir(module) if not name.startswith("__")} == set(module._PUBLIC)
    assert "__version__" in dir(module)


def test_unknown_public_name_lists_the_nearest():
    attach = importlib.import_module("circuits._lazy").attach
    get, _ = attach("circuits", {"HookedGPT": "circuits.model", "Head": "circuits.components"})
    with pytest.raises(AttributeError, match=r"'circuits' has no attribute 'HokedGPT'; nearest: HookedGPT$"):
        get("HokedGPT")


def test_importing_a_package_loads_no_torch():
    assert run_python("import sys, circuits, analysis; print('torch' in sys.modules)") == "False\n"


def test_circuits_loads_no_table_drawing_or_hub_library():
    heavy = {"pandas", "plotly", "rich", "huggingface_hub", "transformers", "transformer_lens", "matplotlib"}
    code = "import sys, circuits; [getattr(circuits, n) for n in circuits.__all__]; print(*sys.modules)"
    assert not heavy & set(run_python(code).split())


def test_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"]
    circuits, analysis = (importlib.import_module(package) for package in PACKAGES)
    assert circuits.__version__ == analysis.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", circuits.__version__)


def test_no_tracked_file_names_a_registry_host_or_a_machine_path():
    hosts = [r"pypi\.org", r"pythonhosted\.org", r"download\.pytorch\.org", r"registry\.npmjs"]
    paths = [rf"(?<![\w.~/-])/{top}/\w" for top in ("work", "root", "home", "Users", "opt")]
    forbidden = re.compile("|".join([*hosts, *paths]))
    found = []
    for path in tracked_files():
        if path.suffix in {".safetensors", ".png", ".woff2"} or path.name.endswith(".min.js") or path == Path(__file__):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if forbidden.search(line)]
    assert found == []
