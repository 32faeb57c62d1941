"""How commands read weights: the arguments that ranks, composition and circuit share."""

from __future__ import annotations

import argparse


def add_reading(parser: argparse.ArgumentParser) -> None:
    """``--raw`` and ``--offset``."""
    parser.add_argument(
        "--raw", action="store_true", help="the bare weights (default: with the norms' gains and centring read in)"
    )
    parser.add_argument(
        "--offset",
        type=int,
        default=0,
        help="rotary models: query minus key position at which W_QK is taken (default: %(default)s)",
    )
