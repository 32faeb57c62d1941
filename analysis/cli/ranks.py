"""`circuits ranks`: how many directions heads use."""

from __future__ import annotations

import argparse
from typing import Any

from analysis.cli import options, weights
from analysis.cli.output import print_json, print_table

HELP = "ranks of every head's W_QK and W_OV, of full circuits, of a layer's heads together, of the scores on a prompt"
EXAMPLES = (
    "circuits ranks",
    "circuits ranks --joint",
    'circuits ranks --scores --prompt "First Citizen:"',
    "circuits ranks --full --raw --json",
)
FORMATS = {"stable_rank": ".2f", "effective_rank": ".1f", "participation_ratio": ".1f"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and what to measure of it."""
    options.add_model(parser)
    weights.add_reading(parser)
    options.add_prompt(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--full", action="store_true", help="also the full circuits W_E W_QK W_Eᵀ and W_E W_OV W_U")
    what.add_argument("--joint", action="store_true", help="the heads of each layer together instead of one by one")
    what.add_argument("--scores", action="store_true", help="the score matrix S = q kᵀ of every head on the prompt")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.ranks import head_ranks, layer_ranks, score_ranks

    if not args.scores and (args.prompt is not None or args.tokens is not None):
        raise ValueError("weights have ranks without a prompt; --scores measures the scores on one")
    model = options.load_model(args)
    found: Any
    if args.scores:
        found = score_ranks(model, options.prompt_of(args, model))
    elif args.joint:
        found = layer_ranks(model, args.raw, args.offset)
    else:
        found = head_ranks(model, args.raw, args.offset, full=args.full)
    if args.json:
        print_json({"model": args.model, **found.to_dict()})
        return
    print_table(found.title(), found.rows(), FORMATS)
