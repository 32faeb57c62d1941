"""`circuits report`: the HTML report, and its key tables in the terminal."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from analysis.cli import options, question
from analysis.cli.output import print_json, print_table
from analysis.cli.params import print_parameters
from analysis.cli.progress import progress

if TYPE_CHECKING:
    from analysis.report import Measurements

HELP = "a model's circuits as one self-contained HTML page, and the key tables here"
EXAMPLES = (
    "circuits report",
    "circuits report --prompt 'KING: What news?' --output king.html",
    "circuits report --prompt 'KING: What news?' --correct ' ' --wrong N --position 5",
    "circuits report --model runs/model.safetensors --tokens '1 2 3 1 2 3'",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Model, prompt, where to write."""
    options.add_model(parser)
    options.add_prompt(parser)
    question.add_question(parser)
    parser.add_argument("--output", default="report.html", metavar="PATH", help="the page (default: %(default)s)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure, write the page, print the tables."""
    from analysis.report import report
    from circuits.storage import written_whole

    model = options.load_model(args)
    tokens = options.prompt_of(args, model)
    pair = {name: question.token_of(model, getattr(args, name), f"--{name}") for name in ("correct", "wrong")}
    # The place is looked at before anything is measured, and holds a whole page or what was there before.
    with written_whole(args.output) as unfinished, progress("measuring") as step:
        finished = report(model, tokens, options.model_name(args), step, **pair, position=args.position)
        unfinished.write_text(finished.html, encoding="utf-8")
    measured = finished.measurements
    if args.json:
        print_json({"output": args.output, **measured.to_dict()})
        return
    print_tables(measured)
    print(f"Wrote {args.output}")


def print_tables(measured: Measurements) -> None:
    """Parameters, heads, MLPs and blocks, and the prompt."""
    from circuits.components import Head

    print_parameters(measured.parameters, measured.name)
    effects = "change of the loss on the prompt in nats when zero-ablated (Δ loss)"
    print_table(
        f"Heads: attention scores on {measured.by_head.attention.source}, effective ranks, copying score, {effects}",
        head_rows(measured),
        {"QK rank": ".1f", "OV rank": ".1f", "copying": "+.3f", "Δ loss": "+.3f"},
    )
    others = [
        {"component": str(part), "Δ loss": effect}
        for part, effect in measured.effects.items()
        if not isinstance(part, Head)
    ]
    if others:
        print_table(f"MLPs and blocks: {effects}", others, {"Δ loss": "+.3f"})
    following = measured.guesses(len(measured.labels) - 1)
    print_table("After the prompt", [{"token": label, "probability": value} for label, value in following])
    print(prompt_line(measured))


def head_rows(measured: Measurements) -> list[dict[str, Any]]:
    """One short row per head."""
    from analysis.report.heads import CIRCUITS, SCORES

    rows = []
    for head, row in zip(measured.heads, measured.by_head.rows(), strict=True):
        shown = {name: row[name] for name in ("head", *SCORES)}
        shown |= {f"{circuit} rank": row[f"{circuit}_effective_rank"] for circuit in CIRCUITS}
        rows.append(shown | {"copying": row["copying"], "Δ loss": measured.effects.get(head)})
    return rows


def prompt_line(measured: Measurements) -> str:
    """The prompt and the loss on it."""
    between = " " if measured.model.tokenizer is None else ""
    text = f"Prompt: {between.join(measured.labels)}"
    text += "" if measured.built_in is None else f"\n{measured.built_in}"
    loss = measured.predictions.mean_loss
    if math.isnan(loss):
        return text
    return f"{text}\nLoss: {loss:.4f} nats per token over {len(measured.labels) - 1} predicted tokens"
