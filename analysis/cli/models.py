"""`circuits models`: what `--model NAME` can be."""

from __future__ import annotations

import argparse
from typing import Any

from analysis.cli import options
from analysis.cli.output import print_json, print_table

HELP = "the small trained models that ship with the package"
EXAMPLES = ("circuits models", "circuits models --json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only how to print."""
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """List them, from the headers of their files; no weight is read."""
    from analysis.report.card import provenance
    from circuits.storage import bundled_names

    models = [described(name) for name in bundled_names()]
    if args.json:
        print_json({"models": models})
        return
    if not models:
        print("No model is bundled.")
        return
    columns = ("name", "parameters", "layers", "heads", "d_model", "vocabulary", "context", "tokenizer", "trained on")
    models = [model | {"trained on": provenance(model["card"])} for model in models]
    print_table(
        "Bundled models", [{column: model[column] for column in columns} for model in models], {"parameters": ","}
    )


def described(name: str) -> dict[str, Any]:
    """Sizes and card of a bundled model."""
    from analysis.accounting import parameter_count
    from circuits import GPTConfig
    from circuits.storage import bundled_path, read_header

    with bundled_path(name) as path:
        header = read_header(path)
    config = GPTConfig.from_dict(header["config"])
    return {
        "name": name,
        "parameters": parameter_count(config),
        "layers": config.n_layers,
        "heads": config.n_heads,
        "d_model": config.d_model,
        "vocabulary": config.d_vocab,
        "context": config.n_ctx,
        "tokenizer": (header["tokenizer"] or {}).get("kind", "none"),
        "card": header["card"],
    }
