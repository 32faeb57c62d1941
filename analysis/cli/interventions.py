"""What `circuits ablate` and `circuits patch` share: the prompts and the metric."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analysis.metrics import Metric
    from analysis.tasks import PromptPairs
    from circuits.model import HookedGPT

TASKS = ("repeated", "ioi", "greater-than")
DEFAULT_TASK = "repeated"


def add_pairs(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """``--pairs FILE`` and ``--task NAME``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--pairs", metavar="FILE", help="JSON lines with clean, corrupt, correct and wrong")
    group.add_argument(
        "--task",
        choices=TASKS,
        help="prompt pairs made here; ioi and greater-than are English where the tokenizer has such names or years, "
        "and random tokens elsewhere, which the output then says",
    )
    parser.add_argument("--batch", type=int, default=8, help="how many prompts of a task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: %(default)s)")
    return group


def add_shown(parser: argparse.ArgumentParser) -> None:
    """``--positions``, ``--top``, ``--cost`` and ``--resume``."""
    parser.add_argument(
        "--positions", metavar="LIST", help="only there: 3, or --positions=-2,-1 for the last two (default: everywhere)"
    )
    parser.add_argument(
        "--top", type=int, default=20, help="how many rows to show, largest first (default: %(default)s)"
    )
    parser.add_argument("--cost", action="store_true", help="say what it would cost, and do nothing")
    parser.add_argument(
        "--resume", metavar="FILE", help="keep what is done in this file, and go on from it after an interruption"
    )


def pairs_of(args: argparse.Namespace, model: HookedGPT) -> PromptPairs:
    """The pairs that ``--pairs`` or ``--task`` name; repeated random tokens without either."""
    from analysis.tasks import GENERATORS, read_pairs
    from analysis.tasks.generators import lacks_words

    if args.pairs is not None:
        return read_pairs(args.pairs, model.tokenizer, model.device, d_vocab=model.config.d_vocab)
    task = args.task or DEFAULT_TASK
    options: dict[str, Any] = {"on_tokens": True} if lacks_words(task, model.tokenizer) else {}
    if task == "repeated":
        options = {"n": min(8, (model.config.n_ctx - 1) // 2, (model.config.d_vocab - 2))}
    return GENERATORS[task](model, batch=args.batch, seed=args.seed, **options)


def described(args: argparse.Namespace, model: HookedGPT, pairs: PromptPairs) -> str:
    """What the prompts are, and why they are no English where a task could have been."""
    from analysis.tasks.generators import lacks_words

    if args.pairs is not None:
        return f"pairs of {args.pairs}"
    why = lacks_words(args.task or DEFAULT_TASK, model.tokenizer)
    return pairs.name if why is None else f"{pairs.name}: {why}"


def metric_of(name: str, pairs: PromptPairs | None) -> str | Metric:
    """The metric that ``--metric`` names; a logit difference takes the answers of the pairs."""
    if name != "logit_diff":
        return name
    if pairs is None:
        raise ValueError("metric logit_diff needs answers: give --pairs or --task")
    return pairs.metric


def positions_of(args: argparse.Namespace) -> list[int] | None:
    """``--positions 3,-1`` as whole numbers; None for everywhere."""
    text: str | None = args.positions
    if text is None:
        return None
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--positions must be whole numbers such as 3,-1, not {text!r}") from None
