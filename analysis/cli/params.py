"""`circuits params`: the parameter table, and what a pass or a training step costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from analysis.cli import options
from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from analysis.accounting import FlopCount, ParameterTable

HELP = "parameters by component; with --tokens or --training, operations too"
EXAMPLES = (
    "circuits params",
    "circuits params --detail --json",
    "circuits params --tokens 1024",
    "circuits params --training --model runs/model.safetensors",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model; a row per kind of weight; operations for how many tokens."""
    options.add_model(parser)
    parser.add_argument("--detail", action="store_true", help="one row for each kind of weight: W_E, W_Q, b_in, …")
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="count the operations on one sequence of T tokens (may exceed n_ctx)"
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help="count those of a training step, forward and backward (default T: n_ctx)",
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Count, and print."""
    from analysis.accounting import flops, parameter_table

    model = options.load_model(args)
    counted = parameter_table(model, detail=args.detail)
    wanted = args.training or args.tokens is not None
    work = flops(model, tokens=args.tokens, training=args.training) if wanted else None
    if args.json:
        data = {"model": args.model, "total": counted.total, "parameters": list(counted.rows())}
        print_json(data if work is None else {**data, "operations": operations(work)})
        return
    print_parameters(counted, options.model_name(args))
    if work is not None:
        print_operations(work)


def print_parameters(counted: ParameterTable, name: str) -> None:
    """The table of the lecture: component, parameters, share."""
    rows = [{"component": row.pop("part"), **row} for row in counted.rows()]
    total = {"component": "total", "parameters": counted.total, "share": 1.0}
    print_table(f"Parameters of {name}", [*rows, total], {"parameters": ",", "share": ".2%"})


def print_operations(work: FlopCount) -> None:
    """Operations by component, and the 6·N·D rule beside them."""
    rows = [{"component": row.pop("part"), **row} for row in work.rows()]
    total = {"component": "total", "flops": work.total, "share": 1.0}
    what = "a training step" if work.training else "a forward pass"
    title = f"Operations of {what} on {work.tokens:,} tokens (a multiply-add counts as 2)"
    print_table(title, [*rows, total], {"flops": ",", "share": ".2%"})
    factor = 6 if work.training else 2
    for rule, which in ((work.rule_without_unembedding, "without"), (work.rule_with_unembedding, "with")):
        print(f"{factor}·N·D, N {which} the unembedding: {rule:,}, {rule / work.total:.1%} of the total")
    print(f"Attention's T² work passes all other at T = {work.crossover:,.0f}")


def operations(work: FlopCount) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "tokens": work.tokens,
        "training": work.training,
        "total": work.total,
        "parts": list(work.rows()),
        "rule_without_unembedding": work.rule_without_unembedding,
        "rule_with_unembedding": work.rule_with_unembedding,
        "crossover": work.crossover,
    }
