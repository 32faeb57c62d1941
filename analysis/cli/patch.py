"""`circuits patch`: activations of one run put into another."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from analysis.cli import effects, interventions, options

if TYPE_CHECKING:
    from analysis.patching import Patching, PathPatching

HELP = "put activations of clean prompts into corrupted ones, or the other way round, and see what comes back"
EXAMPLES = (
    "circuits patch --model induction --task repeated",
    "circuits patch --model induction --site head --whole",
    "circuits patch --model induction --direction noise --site attn_out --metric kl --json",
    "circuits patch --model induction --paths",
    "circuits patch --model induction --paths --cost",
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
    interventions.add_shown(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.patching import activation_patch, patch_plan, path_cost, path_patch

    model = options.load_model(args)
    pairs = interventions.pairs_of(args, model)
    metric = interventions.metric_of(args.metric, pairs)
    given: dict[str, Any] = {"direction": args.direction, "normalise": not args.raw, "seed": args.seed}
    given |= {"metric": metric, "resume": args.resume, **pairs.masks}
    positions = interventions.positions_of(args)
    if args.paths and positions is not None:
        raise ValueError("--positions does not go with --paths, which patches an edge at all positions together")
    site: dict[str, Any] = {"site": args.site, "by_position": not args.whole, "positions": positions}
    clean, corrupt = pairs.clean, pairs.corrupt
    found: PathPatching | Patching
    if args.cost:
        if args.paths:
            effects.show_cost(args, path_cost(model, clean, corrupt, **given))
        else:
            effects.show_cost(args, patch_plan(model, clean, corrupt, **site, **given).cost)
        return
    with effects.kept(args, ".*" if args.paths else ""):
        if args.paths:
            found = path_patch(model, clean, corrupt, **given)
        else:
            found = activation_patch(model, clean, corrupt, **site, **given)
    if args.metric == "logit_diff":
        both = (found.source, found.base) if args.direction == "denoise" else (found.base, found.source)
        effects.say_doubts("patch", *both, seed=args.seed)
    effects.show(args, found, "raw", interventions.described(args, model, pairs), effects.PATCHES)
