"""`circuits paths`: a logit difference as a sum over paths."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from analysis.cli import options, question
from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from circuits.paths import Path, PathExpansion

HELP = "path expansion: the largest paths leaf → head → … → logit, and the exact remainder"
EXAMPLES = (
    "circuits paths",
    'circuits paths --prompt "ROMEO: O gentle" --top 10 --routes 2',
    "circuits paths --top 50 --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the prompt, the two tokens, and how many paths to list."""
    options.add_model(parser)
    options.add_prompt(parser)
    question.add_question(parser)
    parser.add_argument("--top", type=int, default=20, help="paths to list (default: %(default)s)")
    parser.add_argument(
        "--routes",
        type=int,
        default=0,
        help="of each path, also the largest ways through the positions, this many (default: %(default)s)",
    )
    parser.add_argument("--budget", type=int, help="how many path suffixes to expand where they are too many for all")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Expand, and print."""
    from analysis.attribution import logit_paths
    from analysis.prompts import token_labels

    model = options.load_model(args)
    tokens = options.prompt_of(args, model)
    ids = question.answers(args, model, tokens)
    more = {} if args.budget is None else {"budget": args.budget}
    found = logit_paths(model, tokens, *ids, position=args.position, top=args.top, routes=args.routes, **more)
    pair = token_labels(model, ids)
    if args.json:
        asked = {"model": args.model, "position": int(found.position), **question.as_data(ids, pair)}
        print_json(asked | as_data(found))
        return
    labels = token_labels(model, tokens[0].tolist())
    total = float(found.total)
    rows = [row(path, total, labels, routes=args.routes > 0) for path in found.paths]
    rows += [
        last_row("all other paths", float(found.remainder), total, routes=args.routes > 0),
        last_row("total", total, total, routes=args.routes > 0),
    ]
    if shares_mislead(found):  # 1200% of a small lead says less than the logits themselves
        rows = [{name: value for name, value in cells.items() if name != "share"} for cells in rows]
    print_table(title(found, pair), rows, {"value": "+.4f", "share": "+.1%"})
    if abs(float(found.remainder)) > abs(total):
        print(CANCELLING)


CANCELLING = (
    "All other paths together are larger than the total: they and the listed ones largely cancel, so no list this "
    "short explains the lead."
)


def shares_mislead(found: PathExpansion) -> bool:
    """Whether some part is larger than the whole, which then is what is left of parts that cancel."""
    parts = [float(path.value) for path in found.paths] + [float(found.remainder)]
    return max(map(abs, parts)) > abs(float(found.total))


def title(found: PathExpansion, pair: tuple[str, ...]) -> str:
    """What was expanded, and how sure the list is."""
    from circuits.paths import counted

    if found.proof == "enumeration":
        sure = f"all {counted(found.n_paths)} paths were looked at"
    else:
        sure = "proven the largest by a bound" if found.proven else "the largest found, not proven the largest"
        sure += f"; {found.n_found:,} of {counted(found.n_paths)} paths were looked at"
    return f"Paths to the {found.quantity} of “{pair[0]}” over “{pair[1]}” at position {int(found.position)} ({sure})"


def row(path: Path, total: float, labels: tuple[str, ...], *, routes: bool) -> dict[str, Any]:
    """One path as a row of the table, on request with the positions it runs through."""
    value = float(path.value)
    cells: dict[str, Any] = {"path": str(path), "value": value, "share": value / total if total else float("nan")}
    if routes:
        ways = (
            " → ".join(f"{p} {labels[p]}" for p in way.positions) + f" ({way.value:+.4f})" for way in path.routes[0]
        )
        cells["through positions"] = "; ".join(ways)
    return cells


def last_row(name: str, value: float, total: float, *, routes: bool) -> dict[str, Any]:
    """A row that sums up."""
    cells: dict[str, Any] = {"path": name, "value": value, "share": value / total if total else float("nan")}
    return cells | ({"through positions": ""} if routes else {})


def as_data(found: PathExpansion) -> dict[str, Any]:
    """The expansion of one prompt as plain data."""
    listed = []
    for path in found.paths:
        entry: dict[str, Any] = {"components": [str(c) for c in path.components], "value": float(path.value)}
        if path.routes:
            entry["routes"] = [{"positions": list(way.positions), "value": way.value} for way in path.routes[0]]
        listed.append(entry)
    return {
        "quantity": found.quantity,
        "paths": listed,
        "remainder": float(found.remainder),
        "total": float(found.total),
        "proven": found.proven,
        "proof": found.proof,
        "n_paths": found.n_paths,
        "n_found": found.n_found,
        "error": found.error,
    }
