"""`circuits attribution`: what each component adds to the logits directly."""

from __future__ import annotations

import argparse

from analysis.cli import options, question
from analysis.cli.output import print_json, print_table

HELP = "direct logit attribution: what each head and MLP adds to one token's lead over another"
EXAMPLES = (
    "circuits attribution",
    'circuits attribution --prompt "ROMEO: O gentle" --unit layer',
    "circuits attribution --top 10 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the prompt, the two tokens, and how finely to split."""
    options.add_model(parser)
    options.add_prompt(parser)
    question.add_question(parser)
    parser.add_argument("--unit", choices=("layer", "head", "neuron"), default="head", help="default: %(default)s")
    parser.add_argument("--top", type=int, default=30, help="rows to show (default: %(default)s)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Attribute, and print the largest rows; the rest is summed in a last one."""
    from analysis.attribution import logit_attribution
    from analysis.prompts import token_labels

    if args.top < 1:
        raise ValueError(f"--top must be at least 1, not {args.top}")
    model = options.load_model(args)
    tokens = options.prompt_of(args, model)
    ids = question.answers(args, model, tokens)
    found = logit_attribution(model, tokens, *ids, position=args.position, unit=args.unit)
    pair = token_labels(model, ids)
    values = found.value[:, 0]
    order = values.abs().argsort(descending=True).tolist()
    shown = [{"component": str(found.components[i]), "value": float(values[i])} for i in order[: args.top]]
    rest, total = float(values[order[args.top :]].sum()), float(found.total)
    if args.json:
        print_json(
            {
                "model": args.model,
                "position": int(found.position),
                **question.as_data(ids, pair),
                "quantity": found.quantity,
                "components": shown,
                "rest": rest,
                "total": total,
                "error": found.error,
            }
        )
        return
    left = len(order) - len(shown)
    rows = [*shown, *([{"component": f"{left} others", "value": rest}] if left else [])]
    rows.append({"component": "total", "value": total})
    where = f"“{pair[0]}” over “{pair[1]}” at position {int(found.position)}"
    print_table(
        f"{found.quantity.capitalize()} of {where} (the rows miss it by {found.error:.1e})", rows, {"value": "+.4f"}
    )
