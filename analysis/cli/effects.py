"""How `circuits ablate` and `circuits patch` print what they found, and what speaks against trusting it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from math import isnan
from typing import TYPE_CHECKING

from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from analysis.results import Result
    from circuits.rerun.cost import Cost

# Columns of a table of patches as they are printed: the normalised effect is called what it is, and all fit 80 columns.
PATCHES = {
    "interval_low": "low",
    "interval_high": "high",
    "values": "share",
    "values_interval_low": "share_low",
    "values_interval_high": "share_high",
}
FORMATS = {"raw": "+.4f", "share": "+.4f", "mean": "+.4f"}
# Columns that say a part of what the component's own text says already.
_PARTS = ("layer", "head", "neuron")
_SUFFIXES = {"component": "", "component2": "2", "sender": "_sender"}


def show(
    args: argparse.Namespace, found: Result, by: str, prompts: str | None = None, names: Mapping[str, str] | None = None
) -> None:
    """Print the largest effects, or everything as JSON.

    Args:
        args: The command line.
        found: The effects.
        by: The column whose size orders the rows.
        prompts: What they were measured on, in words.
        names: Other names of columns, for the table.

    Raises:
        ValueError: ``--top`` below 1.
    """
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, not {args.top}")
    if args.json:
        print_json({**({} if prompts is None else {"prompts": prompts}), **found.to_dict()})
        return
    rows = sorted(found.rows(), key=lambda row: -abs(row[by]) if row[by] == row[by] else 0.0)
    # One prompt has no interval: a column without a number says nothing.
    left_out = {name for name in rows[0] if all(isinstance(row[name], float) and isnan(row[name]) for row in rows)}
    left_out |= {part + suffix for label, suffix in _SUFFIXES.items() if label in rows[0] for part in _PARTS}
    rows = [{(names or {}).get(name, name): row[name] for name in row if name not in left_out} for row in rows]
    title = found.title() if prompts is None else f"On {prompts}.\n{found.title()}"
    if len(rows) > args.top:
        title += f"; the largest {args.top} of {len(rows)}"
    print_table(title, rows[: args.top], FORMATS)


def show_cost(args: argparse.Namespace, cost: Cost) -> None:
    """Print what a sweep would take: one line, or its numbers as JSON."""
    if args.json:
        print_json(dataclasses.asdict(cost))
    else:
        print(cost)


def say_doubts(
    command: str, clean: Float[Tensor, " batch"], corrupt: Float[Tensor, " batch"] | None = None, seed: int = 0
) -> None:
    """Say in one line on standard error where a logit difference leaves nothing to explain.

    The model does not do a task whose right answer is not likelier than the wrong one on the clean prompts; and where
    the interval of the mean difference between clean and corrupt prompts holds 0, shares of it mean little.

    Args:
        command: What the user called, to begin the line with.
        clean: The logit difference on each clean prompt.
        corrupt: On each corrupt prompt, where they were run.
        seed: Seed of the bootstrap.
    """
    doubt = _doubt(clean, corrupt, seed)
    if doubt is not None:
        print(f"circuits {command}: {doubt}", file=sys.stderr)


def _doubt(clean: Tensor, corrupt: Tensor | None, seed: int) -> str | None:
    from analysis.uncertainty import bootstrap_interval

    here, there = float(clean.mean()), None if corrupt is None else float(corrupt.mean())
    beside = "" if there is None else f", {there:.3g} on the corrupt ones"
    if here <= 0:
        return (
            "the model does not do this task, so effects say little about how it is done: "
            f"the mean logit difference is {here:.3g} on the clean prompts{beside}"
        )
    if corrupt is None or len(clean) < 2:
        return None
    low, high = bootstrap_interval((clean - corrupt)[None], clean.new_ones(len(clean)), seed=seed)[0].tolist()
    if not low <= 0 <= high:
        return None
    return (
        f"clean and corrupt prompts hardly differ, so shares say little: the mean logit difference is {here:.3g} on "
        f"the clean prompts{beside}, and the 95% interval of the gap, {low:.3g} to {high:.3g}, holds 0"
    )


@contextlib.contextmanager
def kept(args: argparse.Namespace, ending: str = "") -> Iterator[None]:
    """Where a run with ``--resume`` is interrupted, say where what is done is kept."""
    try:
        yield
    except KeyboardInterrupt:
        if args.resume is not None:
            said = f"what is done is kept in {args.resume}{ending}; the same command goes on from there"
            print(f"circuits: {said}", file=sys.stderr)
        raise
