"""What `circuits ablate` and `circuits patch` share: the prompts, the metric, and how effects are shown."""

from __future__ import annotations

import argparse
from math import isnan
from typing import TYPE_CHECKING, Any

from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from analysis.metrics import Metric
    from analysis.results import Result
    from analysis.tasks import PromptPairs
    from circuits.model import HookedGPT

TASKS = ("repeated", "ioi", "greater-than")
DEFAULT_TASK = "repeated"


def add_pairs(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """``--pairs FILE`` and ``--task NAME``."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--pairs", metavar="FILE", help="JSON lines with clean, corrupt, correct and wrong")
    group.add_argument("--task", choices=TASKS, help="prompt pairs made here")
    parser.add_argument("--batch", type=int, default=8, help="how many prompts of a task (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: %(default)s)")
    return group


def add_shown(parser: argparse.ArgumentParser) -> None:
    """``--top`` and ``--cost``."""
    parser.add_argument(
        "--top", type=int, default=20, help="how many rows to show, largest first (default: %(default)s)"
    )
    parser.add_argument("--cost", action="store_true", help="say what it would cost, and do nothing")


def pairs_of(args: argparse.Namespace, model: HookedGPT) -> PromptPairs:
    """The pairs that ``--pairs`` or ``--task`` name; repeated random tokens without either."""
    from analysis.tasks import GENERATORS, read_pairs

    if args.pairs is not None:
        return read_pairs(args.pairs, model.tokenizer, model.device)
    task = args.task or DEFAULT_TASK
    options: dict[str, Any] = {"on_tokens": True} if task != "repeated" and not _has_words(model) else {}
    if task == "repeated":
        options = {"n": min(8, (model.config.n_ctx - 1) // 2, (model.config.d_vocab - 2))}
    return GENERATORS[task](model, batch=args.batch, seed=args.seed, **options)


def _has_words(model: HookedGPT) -> bool:
    from analysis.tasks.pairs import single_token

    return model.tokenizer is not None and single_token(" John", model.tokenizer) is not None


def metric_of(name: str, pairs: PromptPairs | None) -> str | Metric:
    """The metric that ``--metric`` names; a logit difference takes the answers of the pairs."""
    if name != "logit_diff":
        return name
    if pairs is None:
        raise ValueError("metric logit_diff needs answers: give --pairs or --task")
    return pairs.metric


def show(args: argparse.Namespace, found: Result, by: str) -> None:
    """Print the largest effects, or everything as JSON.

    Raises:
        ValueError: ``--top`` below 1.
    """
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, not {args.top}")
    if args.json:
        print_json(found.to_dict())
        return
    rows = sorted(found.rows(), key=lambda row: -abs(row[by]) if row[by] == row[by] else 0.0)
    # One prompt has no interval: a column without a number says nothing.
    empty = {name for name in rows[0] if all(isinstance(row[name], float) and isnan(row[name]) for row in rows)}
    rows = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    title = found.title()
    if len(rows) > args.top:
        title += f"; the largest {args.top} of {len(rows)}"
    print_table(title, rows[: args.top], {"raw": "+.4f", "values": "+.4f", "mean": "+.4f"})
