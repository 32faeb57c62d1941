"""`circuits params`: the parameter table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from analysis.cli import options
from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from analysis.accounting import ParameterTable

HELP = "parameters by component, with their shares"
EXAMPLES = (
    "circuits params",
    "circuits params --detail --json",
    "circuits params --model runs/model.safetensors",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model; a row per kind of weight."""
    options.add_model(parser)
    parser.add_argument("--detail", action="store_true", help="one row for each kind of weight: W_E, W_Q, b_in, …")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Count, and print."""
    from analysis.accounting import parameter_table

    counted = parameter_table(options.load_model(args), detail=args.detail)
    if args.json:
        print_json({"model": args.model, "total": counted.total, "parameters": list(counted.rows())})
        return
    print_parameters(counted, options.model_name(args))


def print_parameters(counted: ParameterTable, name: str) -> None:
    """The table of the lecture: component, parameters, share."""
    rows = [{"component": row.pop("part"), **row} for row in counted.rows()]
    total = {"component": "total", "parameters": counted.total, "share": 1.0}
    print_table(f"Parameters of {name}", [*rows, total], {"parameters": ",", "share": ".2%"})
