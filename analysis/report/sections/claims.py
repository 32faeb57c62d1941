"""The lecture's claims, checked on the model."""

from __future__ import annotations

from analysis.claims.verdict import Verdict, compared
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import header, row_header, table


def claims(measured: Measurements) -> Section:
    """A row for each claim: what it says, what was measured, whether it holds."""
    found = measured.verification
    rows = [row(verdict) for verdict in found.verdicts]
    heads = [
        header("claim", numbers=False, sort=True),
        header("status", numbers=False, sort=True),
        header("what the lecture says", numbers=False),
        header("measured", numbers=False),
        header("remark", numbers=False),
    ]
    return Section(
        anchor="claims",
        title="The lecture, checked",
        explanation=join(
            [
                "This toolkit follows a lecture, “The Transformer”, whose course configuration is ",
                formula("(V, T_max, d, H, L)"),
                " = (65, 64, 128, 4, 4). Every definition, proposition, theorem, remark, aside and exercise of it that "
                "says something checkable, checked on this model: the measured quantity beside the most (or least) "
                "that it may be. "
                "Empirical asides are measured, and nothing is claimed of them.",
            ]
        ),
        html=join(
            [
                el("p", found.title() + "."),
                # Long, and read for what fails: open where something does.
                el(
                    "details",
                    el("summary", "Every claim, one by one"),
                    table(heads, rows, caption="Claims of the lecture", class_="plain"),
                    open=bool(found.failures),
                ),
            ]
        ),
    )


def row(verdict: Verdict) -> list[Html]:
    """One claim; its source and what was measured are shown at the pointer."""
    claim, status = verdict.claim, verdict.finding.status
    shown = el("strong", status) if status == "does not hold" else status
    return [
        row_header(claim.identifier),
        el("td", shown),
        el("td", el("span", claim.source + ": "), claim.says, class_="wrap"),
        el("td", compared(verdict.to_dict()), title=claim.quantity),
        el("td", verdict.finding.because, class_="wrap"),
    ]
