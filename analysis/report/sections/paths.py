"""The same lead as a sum over paths through the heads."""

from __future__ import annotations

from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.sections.attribution import REFUSED
from analysis.report.tables import bar, header, number, numeric, row_header, table
from circuits.paths import Path, PathExpansion, counted


def paths(measured: Measurements) -> Section:
    """The largest paths from a leaf through heads to the logits."""
    explanation = join(
        [
            "With attention patterns and norm scales frozen and MLP outputs as sources, the lead is a sum over paths "
            "leaf → head → … → logit, each a product ",
            formula("Π attention ⊗ Π W_OV"),
            ". Listed are the largest, in logits, with the positions through which each adds most; all others together "
            "are the remainder, so the table sums to the lead exactly.",
        ]
    )
    found = measured.paths
    body = (
        el("p", REFUSED, class_="note")
        if found is None
        else join([el("p", join([sure(found), *cancelling(found)], " ")), path_table(measured, found)])
    )
    return Section("paths", "Paths", explanation, body)


def sure(found: PathExpansion) -> str:
    """How sure it is that these are the largest."""
    if found.proof == "enumeration":
        return f"All {counted(found.n_paths)} paths were looked at, so these are the largest."
    looked = f"{found.n_found:,} of {counted(found.n_paths)} paths were looked at"
    if found.proven:
        return f"{looked}; a bound on the norms of the others proves that these are the largest."
    return (
        f"{looked}. These are the largest of them, not proven the largest of all; the remainder is exact all the same."
    )


def cancelling(found: PathExpansion) -> list[str]:
    """What it means that the unlisted paths together are larger than the lead."""
    total, remainder = float(found.total), float(found.remainder)
    if abs(remainder) <= abs(total):
        return []
    return [
        f"The others together ({number(remainder, '+.3f')}) are larger than the lead itself ({number(total, '+.3f')}): "
        "they and the listed paths largely cancel, so no list this short explains the lead."
    ]


def path_table(measured: Measurements, found: PathExpansion) -> Html:
    """One row per path, the remainder below."""
    total, remainder = float(found.total), float(found.remainder)
    values = [float(path.value) for path in found.paths]
    low, high = min(0.0, remainder, *values), max(0.0, remainder, *values)
    rows = [
        [row_header(str(path)), numeric(v, "+.4f"), bar(v, least=low, most=high), el("td", through(measured, path))]
        for path, v in zip(found.paths, values, strict=True)
    ]
    if found.n_paths > len(found.paths):
        others = f"{counted(found.n_paths - len(found.paths))} other paths together"
        rows.append([row_header(others), numeric(remainder, "+.4f"), bar(remainder, least=low, most=high), el("td")])
    footer = [row_header("total"), numeric(total, "+.4f"), el("td"), el("td")]
    heads = [
        header("path", numbers=False),
        header("logits", sort=True),
        el("td"),
        header("mostly through", numbers=False, title="token and position where each step writes, and what it adds"),
    ]
    return table(heads, rows, caption="Paths by what they add", footer=footer)


def through(measured: Measurements, path: Path) -> Html:
    """The largest way of a path through the positions: token and position of each step."""
    if not path.routes or not path.routes[0]:
        return Html("")
    way = path.routes[0][0]
    steps = (join([el("bdi", measured.labels[p]), el("small", f" {p}")]) for p in way.positions)
    return join([join(steps, " → "), el("small", f" ({number(way.value, '+.4f')})")])
