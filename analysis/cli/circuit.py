"""`circuits circuit`: what one head does from token to token."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from analysis.cli import options, weights
from analysis.cli.output import print_json, print_table

if TYPE_CHECKING:
    from circuits import Head, HookedGPT
    from circuits.full_circuits import FullCircuit, SingularDirections

HELP = "one head's full circuits: which tokens attend to which (QK), which logits they then raise (OV)"
EXAMPLES = (
    "circuits circuit L1H3 --ov --top 20",
    "circuits circuit L0H0 --qk --query position --key position",
    "circuits circuit L1H0 --ov --source mlp0 --directions 3 --json",
)
SOURCES = ("token", "position", "mlp0")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The head, the circuit, and what stands at its ends."""
    parser.add_argument("head", metavar="HEAD", help="such as L1H3")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--qk", action="store_true", help="the QK circuit W_E W_QK W_Eᵀ")
    which.add_argument("--ov", action="store_true", help="the OV circuit W_E W_OV W_U (the default)")
    options.add_model(parser)
    weights.add_reading(parser)
    parser.add_argument("--top", type=int, default=20, help="entries to list (default: %(default)s)")
    parser.add_argument(
        "--by", choices=("value", "magnitude", "lowest"), default="value", help="order (default: %(default)s)"
    )
    described = "tokens, positions, or tokens as the first MLP leaves them"
    parser.add_argument("--source", choices=SOURCES, default="token", help=f"OV: what is attended to: {described}")
    parser.add_argument("--query", choices=SOURCES, default="token", help=f"QK: what asks: {described}")
    parser.add_argument("--key", choices=SOURCES, default="token", help=f"QK: what answers: {described}")
    parser.add_argument("--biases", action="store_true", help="count in what query, key and value biases add")
    parser.add_argument("--directions", type=int, default=0, help="also the first singular directions, this many")
    options.add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Find the largest entries, and print them."""
    from circuits.full_circuits import full_ov, full_qk, singular_directions

    head = head_of(args.head)
    model = options.load_model(args)
    offset = args.offset or None
    if args.qk:
        circuit = full_qk(model, head.layer, head.head, args.query, args.key, offset, args.raw)
    else:
        if offset:
            raise ValueError("--offset belongs to the QK circuit; the OV circuit depends on no position")
        circuit = full_ov(model, head.layer, head.head, args.source, args.raw)
    rows = entry_rows(model, circuit, args)
    found = None
    if args.directions:
        source = args.query if args.qk else args.source
        found = singular_directions(
            model, head.layer, head.head, circuit.kind, n=args.directions, source=source, offset=offset, raw=args.raw
        )
    if args.json:
        data = {"model": args.model, "head": str(head), "circuit": circuit.kind, "note": circuit.note, "entries": rows}
        print_json(data | ({} if found is None else {"directions": direction_rows(model, found, circuit)}))
        return
    what = "W_E W_QK W_Eᵀ" if args.qk else "W_E W_OV W_U"
    units = f"scores are {circuit.scale:.4g} times this" if args.qk else "logits"
    print_table(f"{what} of {head}, the first {len(rows)} by {args.by} ({units}; {circuit.note})", rows, FORMATS)
    if found is not None:
        print_table(
            f"Singular directions of W_{circuit.kind} of {head}", direction_rows(model, found, circuit), FORMATS
        )


FORMATS = {"value": "+.4f"}


def head_of(text: str) -> Head:
    """The head that an argument names.

    Raises:
        ValueError: It names none.
    """
    from circuits.components import Head, parse_component

    component = parse_component(text)
    if not isinstance(component, Head):
        raise ValueError(f"expected a head such as L1H3, not {text!r}")
    return component


def entry_rows(model: HookedGPT, circuit: FullCircuit, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The entries with what stands at their row and column."""
    top = circuit.top_entries(args.top, args.by, biases=args.biases)
    ends = ("query", "key") if circuit.kind == "QK" else ("source", "logit")
    rows = names_of(model, circuit.rows, top.rows.tolist())
    columns = names_of(model, circuit.columns, top.columns.tolist())
    return [
        {ends[0]: row, ends[1]: column, "value": value}
        for row, column, value in zip(rows, columns, top.values.tolist(), strict=True)
    ]


def names_of(model: HookedGPT, source: str, places: list[int]) -> list[str]:
    """Tokens as text with white space visible, positions as numbers."""
    from analysis.prompts import token_labels

    return [f"position {p}" for p in places] if source == "position" else list(token_labels(model, places))


def direction_rows(model: HookedGPT, found: SingularDirections, circuit: FullCircuit) -> list[dict[str, Any]]:
    """Each end of each direction: the tokens that lie furthest out on both sides."""
    sides = ("queries", "keys") if found.circuit == "QK" else ("read", "written")
    rows: list[dict[str, Any]] = []
    for direction, value in enumerate(found.singular_values.tolist()):
        for end, sign in enumerate("+−"):
            left = names_of(model, circuit.rows, found.left_tokens[direction, end].tolist())
            # Both sides of a QK direction are read from one source.
            source = circuit.rows if found.circuit == "QK" else "logit"
            right = names_of(model, source, found.right_tokens[direction, end].tolist())
            rows.append(
                {
                    "direction": f"{direction}{sign}",
                    "singular value": value,
                    sides[0]: " ".join(left),
                    sides[1]: " ".join(right),
                }
            )
    return rows
