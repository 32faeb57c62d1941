"""`circuits ablate`: what changes when components are taken out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from analysis.cli import effects, interventions, options

if TYPE_CHECKING:
    from analysis.tasks import PromptPairs
    from circuits.model import HookedGPT
    from circuits.rerun.cost import Cost

HELP = "what changes when heads, MLPs, blocks or neurons are taken out"
EXAMPLES = (
    "circuits ablate",
    "circuits ablate --components mlps --method mean --task repeated",
    "circuits ablate --components L0H1,L1H2+L1H3 --task repeated --metric logit_diff --json",
    "circuits ablate --cost",
)
MOST_RUNS = 20_000  # of --every-pair, without --yes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, what is taken out, and what is measured on which prompts."""
    options.add_model(parser)
    parser.add_argument(
        "--components",
        default="heads",
        metavar="KIND|LIST",
        help="heads, mlps, attns, blocks, neurons, or a list such as L0H1,L2.mlp,L1H2+L1H3 (default: %(default)s)",
    )
    parser.add_argument(
        "--method",
        default="zero",
        choices=("zero", "mean", "resample"),
        help="what to put there; the mean is over the corrupt prompts of pairs (default: %(default)s)",
    )
    parser.add_argument(
        "--metric",
        choices=("loss", "kl", "logit_diff"),
        help="what to measure (default: logit_diff of pairs, else loss)",
    )
    group = interventions.add_pairs(parser)
    group.add_argument(
        "--prompt", metavar="TEXT", help=f"text for a model with a tokenizer (default: {options.BUILT_IN})"
    )
    group.add_argument("--tokens", metavar="IDS", help='token ids, such as "1 2 3", for a model without one')
    parser.add_argument(
        "--every-pair", action="store_true", help="take out two at a time: what that does beyond the sum"
    )
    parser.add_argument("--yes", action="store_true", help=f"go on with more than {MOST_RUNS:,} runs of --every-pair")
    interventions.add_shown(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print."""
    from analysis.ablation import ablate, plan
    from analysis.ablation.targets import targets_of, with_pairs

    model = options.load_model(args)
    pairs = interventions.pairs_of(args, model) if args.pairs or args.task else None
    tokens, given = _prompts(args, model, pairs)
    metric = interventions.metric_of(args.metric or ("loss" if pairs is None else "logit_diff"), pairs)
    components = parse_components(args.components)
    given |= {"seed": args.seed, "positions": interventions.positions_of(args), "resume": args.resume}
    targets = targets_of(components, model.config)
    if args.every_pair and not args.yes:
        _refuse_too_many(len(targets), lambda: plan(model, tokens, targets, args.method, metric, given).cost)
    if args.cost:
        asked = with_pairs(targets) if args.every_pair else targets
        effects.show_cost(args, plan(model, tokens, asked, args.method, metric, given).cost)
        return
    with effects.kept(args):
        found = ablate(model, tokens, components, args.method, metric, pairs=args.every_pair, **given)
    if not isinstance(metric, str):
        effects.say_doubts("ablate", found.clean, seed=args.seed)
    prompts = None if pairs is None else interventions.described(args, model, pairs)
    effects.show(args, found, "interaction" if args.every_pair else "mean", prompts)


def parse_components(text: str) -> str | list[Any]:
    """``heads`` as it stands; ``L0H1,L1H2+L1H3`` as components and tuples of components."""
    from circuits.components import parse_component

    if not any(character.isdigit() for character in text) and text not in ("embed", "pos_embed"):
        return text
    parsed = [tuple(parse_component(part.strip()) for part in target.split("+")) for target in text.split(",")]
    return [target if len(target) > 1 else target[0] for target in parsed]


def _prompts(args: argparse.Namespace, model: HookedGPT, pairs: PromptPairs | None) -> tuple[Any, Any]:
    """The tokens, and what else the ablation needs to know of them."""
    if pairs is None:
        if args.method == "mean":
            raise ValueError("--method mean needs prompts to take the mean over: give --task or --pairs")
        return options.prompt_of(args, model), {}
    reference = {"reference": pairs.corrupt, "reference_mask": pairs.corrupt_mask} if args.method == "mean" else {}
    return pairs.clean, {"attention_mask": pairs.clean_mask, **reference}


def _refuse_too_many(n: int, cost_of_each: Callable[[], Cost]) -> None:
    """Refuse more runs than somebody would wait for by mistake.

    A pair recomputes at least what either of the two does by itself, so all pairs take at least as many times the mean.
    """
    runs = n + n * (n - 1) // 2
    if runs > MOST_RUNS:
        least = cost_of_each().forwards / n * runs
        raise ValueError(
            f"every pair of {n} components takes {runs:,} runs, at least {least:,.0f} forward passes' worth of "
            "operations: name fewer with --components, or give --yes (with --resume FILE, to be able to stop)"
        )
