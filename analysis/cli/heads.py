"""`circuits heads`: what is measured of every head without a prompt."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from analysis.cli import options
from analysis.cli.output import print_json, print_table

HELP = "every head: attention scores, ranks of W_QK and W_OV, copying score"
EXAMPLES = ("circuits heads", "circuits heads --json", "circuits heads --model runs/model.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model."""
    options.add_model(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.report.heads import CIRCUITS, RANKS, SCORES, measure_heads

    measured = measure_heads(options.load_model(args))
    rows = measured.rows()
    if args.json:
        print_json({"model": args.model, "scores_on": measured.attention.source, "heads": rows})
        return
    scores = [chosen(row, {"head": "head", **{name: name for name in SCORES}}) for row in rows]
    print_table(f"{measured.attention.title()} (mean weight; entropy in nats)", scores)
    formats = {short(name): digits for name, digits in RANKS.items()} | {"copying": "+.3f"}
    for circuit in CIRCUITS:
        columns = {"head": "head", **{f"{circuit}_{name}": short(name) for name in RANKS}}
        columns |= {"copying": "copying"} if circuit == "OV" else {}
        title = f"Ranks of W_{circuit}" + (", and copying score" if circuit == "OV" else "")
        print_table(title, [chosen(row, columns) for row in rows], formats)


def chosen(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Some columns of a row, under the names that the table shows."""
    return {shown: row[name] for name, shown in columns.items()}


def short(measure: str) -> str:
    """`stable_rank` as the head of a column."""
    return measure.replace("_rank", "").replace("_ratio", "")
