"""The arguments that commands share, and what they mean."""

from __future__ import annotations

import argparse

DEFAULT_MODEL = "shakespeare"


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--device``."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME|PATH",
        help="a bundled model (`circuits models` lists them) or a file or folder (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where to run it: cpu, cuda, cuda:1, mps (default: %(default)s)"
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """``--prompt`` for models with a tokenizer, ``--tokens`` for any; without either, a built-in prompt."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="text for a model with a tokenizer (default: a built-in one)")
    group.add_argument("--tokens", metavar="IDS", help='token ids, such as "1 2 3", for a model without one')


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
