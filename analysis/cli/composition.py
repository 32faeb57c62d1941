"""`circuits composition`: which heads read what earlier ones write."""

from __future__ import annotations

import argparse
from typing import Any

from analysis.cli import options, weights
from analysis.cli.output import print_json, print_table

HELP = "composition: how much of what a head, MLP or embedding writes is read by a later head, MLP or W_U"
EXAMPLES = (
    "circuits composition",
    "circuits composition --reads K --top 10",
    "circuits composition --reads mlp unembed --writers all --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, who reads, and who writes."""
    options.add_model(parser)
    weights.add_reading(parser)
    parser.add_argument(
        "--reads",
        nargs="+",
        choices=("Q", "K", "V", "mlp", "unembed"),
        default=("Q", "K", "V"),
        help="through what the later component reads (default: Q K V)",
    )
    parser.add_argument(
        "--writers",
        choices=("heads", "all"),
        default="heads",
        help="heads alone, or also embeddings and MLPs (default: %(default)s; mlp and unembed list all)",
    )
    parser.add_argument("--top", type=int, default=20, help="pairs to list (default: %(default)s)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, and print the strongest pairs."""
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, not {args.top}")
    model = options.load_model(args)
    rows: list[dict[str, Any]] = []
    baseline, note = 0.0, ""
    for reads in args.reads:
        found, baseline, note = strongest(model, reads, args)
        rows += found
    rows.sort(key=lambda row: row["score"], reverse=True)
    if args.json:
        print_json(
            {"model": args.model, "baseline": baseline, "raw": args.raw, "note": note, "pairs": rows[: args.top]}
        )
        return
    title = f"Composition ‖W M‖ / (‖W‖ ‖M‖): the strongest pairs; by chance {baseline:.3f} ({note})"
    print_table(title, rows[: args.top], {"score": ".4f", "excess": "+.4f"})


def strongest(model: Any, reads: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], float, str]:
    """The strongest pairs with this kind of reader, the baseline, and what was read into the weights."""
    from analysis.composition import component_composition, composition_scores

    if args.writers == "heads" and reads in ("Q", "K", "V"):
        heads = composition_scores(model, reads, args.raw, args.offset)
        pairs = [pair_row(reads, a, b, value, heads.baseline) for a, b, value in heads.strongest(args.top)]
        return pairs, heads.baseline, heads.note
    found = component_composition(model, reads, args.raw, args.offset)
    scores = found.score.nan_to_num(float("-inf"))
    values, places = scores.flatten().topk(min(args.top, int(scores.isfinite().sum())))
    pairs = [
        pair_row(reads, found.writers[p // scores.shape[1]], found.readers[p % scores.shape[1]], value, found.baseline)
        for p, value in zip(places.tolist(), values.tolist(), strict=True)
    ]
    return pairs, found.baseline, found.note


def pair_row(reads: str, writer: object, reader: object, score: float, baseline: float) -> dict[str, Any]:
    """One pair as a row of the table."""
    return {"writer": str(writer), "reader": str(reader), "reads": reads, "score": score, "excess": score - baseline}
