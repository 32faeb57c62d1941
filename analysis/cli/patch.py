"""`circuits patch`: activations of one run put into another."""

from __future__ import annotations

import argparse

from analysis.cli import interventions, options

HELP = "put activations of clean prompts into corrupted ones, or the other way round, and see what comes back"
EXAMPLES = (
    "circuits patch",
    "circuits patch --site head --whole --task ioi",
    "circuits patch --direction noise --site attn_out --metric kl --json",
    "circuits patch --paths",
)
SITES = "resid_pre resid_mid resid_post attn_out mlp_out head head_q head_k head_v pattern".split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the pairs, and what is patched."""
    options.add_model(parser)
    interventions.add_pairs(parser)
    parser.add_argument("--site", default="resid_pre", choices=SITES, help="what to patch (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="patch all positions together, not each by itself")
    parser.add_argument("--paths", action="store_true", help="patch the direct edge between every two heads instead")
    parser.add_argument(
        "--direction", default="denoise", choices=("denoise", "noise"), help="clean into corrupt, or corrupt into clean"
    )
    parser.add_argument(
        "--metric",
        default="logit_diff",
        choices=("logit_diff", "loss", "kl"),
        help="what to measure (default: %(default)s)",
    )
    parser.add_argument("--raw", action="store_true", help="raw effects only, also where the two runs hardly differ")
    parser.add_argument(
        "--top", type=int, default=20, help="how many rows to show, largest first (default: %(default)s)"
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.patching import activation_patch, path_patch

    model = options.load_model(args)
    pairs = interventions.pairs_of(args, model)
    metric = interventions.metric_of(args.metric, pairs)
    given = {"metric": metric, "direction": args.direction, "normalise": not args.raw, "seed": args.seed, **pairs.masks}
    if args.paths:
        interventions.show(args, path_patch(model, pairs.clean, pairs.corrupt, **given), "raw")
        return
    found = activation_patch(model, pairs.clean, pairs.corrupt, args.site, by_position=not args.whole, **given)
    interventions.show(args, found, "raw")
