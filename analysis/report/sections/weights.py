"""The ranks of W_QK and W_OV, their spectra, and how much each head copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.report.heads import CIRCUITS, RANKS
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import header, numeric, row_header, shaded, table

POINTS = 48  # of a spectrum's line
# Each rank measure: the head of its column, and what it is.
SHORT = {
    "numerical_rank": "num.",
    "stable_rank": "stable",
    "effective_rank": "eff.",
    "participation_ratio": "part.",
    "energy_rank": "90%",
}
MEANINGS = {
    "numerical_rank": "numerical rank, the singular values s above rounding",
    "stable_rank": "stable rank Σs² / s₁²",
    "effective_rank": "effective rank, exp of the entropy of s / Σs",
    "participation_ratio": "participation ratio (Σs²)² / Σs⁴",
    "energy_rank": "energy rank, the least k whose largest s hold 90% of Σs²",
}


def weights(measured: Measurements) -> Section:
    """Ranks, spectra and copying score of every head."""
    return Section(
        anchor="ranks",
        title="Ranks and copying",
        explanation=join(
            [
                "What a head attends to is set by ",
                formula("W_QK = W_Q W_K^T"),
                ", what it writes by ",
                formula("W_OV = W_V W_O"),
                f"; both have rank at most {measured.by_head.ranks.bound}, the width of a head. How many directions "
                "they really use, from their singular values s; and the copying score ",
                formula("Σ Re λ / Σ |λ|"),
                " over the eigenvalues of ",
                formula("W_E W_OV W_U"),
                ", between −1 and 1: positive where a head raises the tokens that it reads.",
            ]
        ),
        html=join([ranks_table(measured), legend(measured)]),
    )


def ranks_table(measured: Measurements) -> Html:
    """One row per head, a group of columns per circuit."""
    by_head = measured.by_head
    rows = [
        [row_header(str(head)), shaded(value, "+.3f", full=1.0)]
        for head, value in zip(measured.heads, by_head.copying, strict=True)
    ]
    for circuit in CIRCUITS:
        for row, head, values in zip(rows, measured.heads, by_head.spectrum(circuit), strict=True):
            row.append(el("td", spectrum(values, f"Singular values of {circuit} of {head}")))
        for name, digits in RANKS.items():
            for row, value in zip(rows, by_head.rank(circuit, name), strict=True):
                row.append(numeric(value, digits))
    columns = [header("spectrum", numbers=False, title="singular values, the largest first")]
    columns += [header(SHORT[name], title=MEANINGS[name], sort=True) for name in RANKS]
    groups = [el("td", colspan=2), *(header(f"W_{name}", numbers=False, span=len(columns)) for name in CIRCUITS)]
    heads = [header("head", numbers=False, sort=True), header("copying", sort=True), *columns, *columns]
    caption = "Copying score, and ranks and spectra of W_QK and W_OV, of every head"
    return table(heads, rows, caption=caption, groups=groups, class_="tight")


def spectrum(values: Sequence[float], label: str) -> Html:
    """Singular values from the largest down, as a small line on a scale from 0 to the largest."""
    kept = [value for value in values if not math.isnan(value)]
    top = max(kept, default=0.0) or 1.0
    step = max(len(kept) / POINTS, 1.0)
    chosen = [kept[int(i * step)] for i in range(int(len(kept) / step))]
    across = max(len(chosen) - 1, 1)
    points = " ".join(f"{100 * i / across:.1f},{30 - 28 * value / top:.1f}" for i, value in enumerate(chosen))
    line = el(
        "polyline",
        points=points,
        fill="none",
        stroke="currentColor",
        stroke_width="1.5",
        vector_effect="non-scaling-stroke",
    )
    return el(
        "svg", line, class_="spectrum", viewBox="0 0 100 31", preserveAspectRatio="none", role="img", aria_label=label
    )


def legend(measured: Measurements) -> Html:
    """What each rank is, and what was read into the matrices."""
    by_head = measured.by_head
    parts = (f"{SHORT[name]}: {MEANINGS[name]}" for name in RANKS)
    notes = f". Ranks: {by_head.ranks.note}. Copying: {by_head.copies.note}."
    return el("p", join(parts, "; "), notes, class_="note")
