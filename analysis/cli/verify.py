"""`circuits verify`: the lecture's claims, checked on a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from analysis.cli import options
from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from analysis.claims import Claim, Verification

HELP = "every checkable claim of the lecture “The Transformer”, on a model; exit status 1 when one does not hold"
EXAMPLES = (
    "circuits verify",
    "circuits verify --model runs/model.safetensors --json",
    "circuits verify --claim 5.1 --claim ex2",
    "circuits verify --explain 4.2.sphere",
)

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, prompt, which claims."""
    options.add_model(parser)
    options.add_prompt(parser)
    parser.add_argument("--claim", action="append", metavar="ID", help="check this claim only (may be repeated)")
    parser.add_argument("--explain", metavar="ID", help="print the mathematics of a claim, and check nothing")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int | None:
    """Check, and print; the status says whether every claim holds."""
    from analysis.claims import find, verify
    from analysis.cli.progress import progress

    if args.explain is not None:
        explain(find(args.explain), args.json)
        return None
    for identifier in args.claim or ():
        find(identifier)  # before a model is read
    model = options.load_model(args)
    given = args.prompt is not None or args.tokens is not None
    tokens = options.prompt_of(args, model) if given else None
    with progress("checking") as step:
        found = verify(model, tokens, claims=args.claim, progress=step)
    if args.json:
        print_json({"name": args.model, **found.to_dict()})
    else:
        print_verification(found, options.model_name(args))
    return None if found.holds else FAILED


def explain(claim: Claim, as_json: bool) -> None:
    """One claim with its mathematics."""
    if as_json:
        fields = ("identifier", "source", "says", "quantity", "mathematics")
        print_json({name: getattr(claim, name) for name in fields})
        return
    print(f"{claim.identifier}  {claim.source}\n{claim.says}\n\n{claim.mathematics}\n\nMeasured: {claim.quantity}.")


def print_verification(found: Verification, name: str) -> None:
    """A row for each claim, the failures once more below, and the counts."""
    print_table(f"Claims of the lecture on {name}", [shown(row) for row in found.rows()])
    for verdict in found.failures:
        print(f"{verdict.claim.identifier} does not hold: {verdict.claim.says}")
        print(f"  measured: {verdict.claim.quantity}")
    print(found.title())


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row as the terminal shows it."""
    from analysis.claims.verdict import compared

    return {
        "claim": row["claim"],
        "status": row["status"],
        "measured": compared(row),
        "says": row["says"],
        "because": row["because"],
    }
