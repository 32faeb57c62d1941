"""``python -m benchmarks [--full] [--only NAME ...] [--threads N] [--json PATH]``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import benchmarks
from benchmarks.timing import Row

DESCRIPTION = (
    "What this toolkit costs, beside plain PyTorch and TransformerLens, measured in one run. Prints a table and writes "
    "JSON; exits with 1 where a bound was missed. Rows against a library that is not installed are left out."
)
FULL = (
    "also what takes minutes: more rounds, K- and V-composition too, head ablation and head patching on "
    "the shape of GPT-2 small, and all of `pretrained`, which needs the extra `hf`"
)
NOT_ROWS = {"__main__", "timing", "plain", "shapes"}


def suites() -> list[str]:
    """The modules that offer rows."""
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in NOT_ROWS)


def formatted(value: float, unit: str) -> str:
    """A figure in a unit that reads well."""
    return f"{value * 1e3:,.2f} ms" if unit == "s" else f"{value / 2**20:,.1f} MiB"


def line(row: Row) -> str:
    """One row of the table."""
    sign = "≥" if row.better == "higher" else "≤"
    bounds = "" if row.must is None else f"  must {sign} {row.must:g}, aim {row.aim:g}"
    verdict = {None: "", True: "  met", False: "  MISSED"}[row.met]
    forms = {
        "lower": f"{row.figure:.3f}",
        "higher": f"{row.figure:.1f}× less",
        "excess": f"{row.figure:+.3g} {row.unit}",
    }
    ours, theirs = formatted(row.ours, row.unit), formatted(row.theirs, row.unit)
    return f"{row.work:<62} {ours:>14} {theirs:>14}  {forms[row.better]:>13}  vs {row.other}{bounds}{verdict}"


def main() -> int:
    """Run the suites; exit status 1 where a bound was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=DESCRIPTION)
    parser.add_argument("--full", action="store_true", help=FULL)
    parser.add_argument("--only", nargs="+", choices=suites(), default=suites(), help="which suites (default: all)")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path("benchmarks.json"), help="where to write the figures (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: list[Row] = []
    for suite in arguments.only:
        for row in importlib.import_module(f"benchmarks.{suite}").rows(arguments.full):
            print(line(row), flush=True)
            found.append(row)
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    data = {
        "threads": arguments.threads,
        **machine,
        "rows": [asdict(r) | {"figure": r.figure, "met": r.met} for r in found],
    }
    arguments.json.write_text(json.dumps(data, indent=1))
    return 1 if any(row.met is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
