"""Which two next tokens a command compares, and where: the arguments that attribution and paths share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from circuits import HookedGPT


def add_question(parser: argparse.ArgumentParser) -> None:
    """``--correct``, ``--wrong`` and ``--position``."""
    of = "a token: its text, or its id for a model without a tokenizer"
    parser.add_argument("--correct", metavar="TOKEN", help=f"{of} (default: the model's likeliest next token)")
    parser.add_argument("--wrong", metavar="TOKEN", help="the token to compare with (default: the likeliest other one)")
    parser.add_argument(
        "--position",
        type=int,
        default=-1,
        help="where the logits are read; -1 is the last token (default: %(default)s)",
    )


def answers(args: argparse.Namespace, model: HookedGPT, tokens: Int[Tensor, "1 pos"]) -> tuple[int, int]:
    """The two tokens: those that the options name, else the likeliest at the position.

    Raises:
        ValueError: An option that names no token.
        IndexError: A token or position that does not exist.
    """
    import torch

    from analysis.attribution import answers_of

    named = [token_of(model, getattr(args, name), f"--{name}") for name in ("correct", "wrong")]
    with torch.no_grad():
        logits = model(tokens)
    given = [None if token is None else torch.tensor([token]) for token in named]
    correct, wrong = answers_of(logits, None, given[0], given[1], args.position)
    return int(correct), int(wrong)


def as_data(ids: tuple[int, int], texts: tuple[str, ...]) -> dict[str, dict[str, int | str]]:
    """The two tokens as plain data."""
    return {name: {"id": i, "text": text} for name, i, text in zip(("correct", "wrong"), ids, texts, strict=True)}


def token_of(model: HookedGPT, text: str | None, option: str) -> int | None:
    """The one token that an option names.

    Raises:
        ValueError: Text that is no token, or several; text for a model without a tokenizer.
    """
    if text is None:
        return None
    if model.tokenizer is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"this model has no tokenizer: give {option} a token id, not {text!r}") from None
    try:
        return model.to_single_token(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None
