"""The arguments that commands share, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from circuits import HookedGPT

DEFAULT_MODEL = "shakespeare"
BUILT_IN = "a built-in one, or random different tokens, twice, where the tokenizer lacks its letters"


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
    group.add_argument("--prompt", metavar="TEXT", help=f"text for a model with a tokenizer (default: {BUILT_IN})")
    group.add_argument("--tokens", metavar="IDS", help='token ids, such as "1 2 3", for a model without one')


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")


def load_model(args: argparse.Namespace) -> HookedGPT:
    """The model that ``--model`` and ``--device`` name.

    Raises:
        ValueError: A device that is unknown or not there, or a model that is neither bundled nor a path.
        OSError: A path at which nothing can be read.
    """
    from circuits import load
    from circuits.placement import check_device

    return load(args.model, device=check_device(args.device))


def prompt_of(args: argparse.Namespace, model: HookedGPT) -> Int[Tensor, "1 pos"]:
    """The tokens that ``--prompt`` or ``--tokens`` give, or a built-in prompt.

    Raises:
        ValueError, IndexError: A prompt that the model cannot read; the message says what is wrong with it.
    """
    from analysis.prompts import parse_tokens, prompt_tokens

    ids = None if args.tokens is None else parse_tokens(args.tokens)
    return prompt_tokens(model, args.prompt, ids)


def model_name(args: argparse.Namespace) -> str:
    """What to call the model: its bundled name, or the name of its file or folder without the ending."""
    name = Path(args.model).name or str(args.model)
    return name.removesuffix(".safetensors").removesuffix(".gguf")
