"""What every head looks at, as six numbers."""

from __future__ import annotations

import math

from analysis.report.heads import SCORES
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import header, row_header, shaded, table

MEANINGS = {
    "previous": "mean A[t, t−1]",
    "current": "mean A[t, t]",
    "first": "mean A[t, 0], t ≥ 1",
    "duplicate": "mean A[t, t−n] in the second half",
    "induction": "mean A[t, t−n+1] in the second half",
    "entropy": "mean −Σ A log A, in nats",
}


def scores(measured: Measurements) -> Section:
    """Previous, current, first, duplicate, induction and entropy of every head."""
    return Section(
        anchor="scores",
        title="Attention scores",
        explanation=join(
            [
                f"Mean attention weight on places that name a behaviour, on {measured.by_head.attention.source}: no "
                "meaning of a text helps, and only the repetition tells what comes next. With n the length of a "
                "sequence, ",
                formula("A[t, t−1]"),
                " for a previous-token head, ",
                formula("A[t, t−n+1]"),
                " for an induction head, and so on. Weights are between 0 and 1; the entropy of a row is in nats. "
                "Press the name of a column to sort by it.",
            ]
        ),
        html=scores_table(measured),
    )


def scores_table(measured: Measurements) -> Html:
    """One row per head."""
    named = {name: measured.by_head.score(name) for name in SCORES}
    largest = max([v for v in named["entropy"] if not math.isnan(v)], default=0.0)
    rows = [
        [
            row_header(str(head)),
            *(
                shaded(named[name][place], ".3f", full=largest if name == "entropy" else 1.0, title=f"{head}, {name}")
                for name in SCORES
            ),
        ]
        for place, head in enumerate(measured.heads)
    ]
    heads = [
        header("head", numbers=False, sort=True),
        *(header(name, title=MEANINGS[name], sort=True) for name in SCORES),
    ]
    legend = el("p", join((f"{name}: {MEANINGS[name]}" for name in SCORES), "; "), ".", class_="note")
    return join([table(heads, rows, caption=measured.by_head.attention.title(), class_="attention"), legend])
