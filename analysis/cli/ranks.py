"""`circuits ranks`: how many directions heads use."""

from __future__ import annotations

import argparse
from typing import Any

from analysis.cli import options, weights
from analysis.cli.output import print_json, print_table

HELP = "spectra and ranks: of every head's W_QK and W_OV, of a layer's heads together, of full circuits"
EXAMPLES = ("circuits ranks", "circuits ranks --joint", "circuits ranks --full --raw --json")
FORMATS = {"stable_rank": ".2f", "effective_rank": ".1f", "participation_ratio": ".1f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and what to measure of it."""
    options.add_model(parser)
    weights.add_reading(parser)
    parser.add_argument("--full", action="store_true", help="also the full circuits W_E W_QK W_Eᵀ and W_E W_OV W_U")
    parser.add_argument("--joint", action="store_true", help="the heads of each layer together instead of one by one")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.ranks import head_ranks, layer_ranks

    if args.joint and args.full:
        raise ValueError("--joint and --full do not go together: full circuits are measured head by head")
    model = options.load_model(args)
    found: Any
    if args.joint:
        found = layer_ranks(model, args.raw, args.offset)
    else:
        found = head_ranks(model, args.raw, args.offset, full=args.full)
    if args.json:
        print_json({"model": args.model, **found.to_dict()})
        return
    print_table(found.title(), found.rows(), FORMATS)
