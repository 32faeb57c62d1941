"""Which heads read what earlier heads write, in the weights alone."""

from __future__ import annotations

from analysis.composition import CompositionScores
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.png import data_uri, weights_png
from analysis.report.section import Section
from analysis.report.tables import bar, header, legend, number, numeric, row_header, table

PAIRS = 12  # of each table
READS = {"Q": "asks by it", "K": "is found by it", "V": "moves it on"}


def composition(measured: Measurements) -> Section | None:
    """A picture for each of Q, K and V, and the strongest pairs; nothing where there is a single layer."""
    if not measured.composition:
        return None
    first = measured.composition[0]
    return Section(
        anchor="composition",
        title="Composition",
        explanation=join(
            [
                "How much of what an earlier head writes lies where a later one reads: ",
                formula("‖W_OV W_QK‖ / (‖W_OV‖ ‖W_QK‖)"),
                " for its queries (Q), the same with ",
                formula("W_QK^T"),
                " for its keys (K) and with its ",
                formula("W_OV"),
                " for its values (V), in Frobenius norms. Factors that have nothing to do with each other give about ",
                formula("1 / √d_model"),
                f" = {first.baseline:.3f}; what counts is the excess over that.",
            ]
        ),
        html=join([pictures(measured), pairs_table(measured), el("p", f"Weights: {first.note}.", class_="note")]),
    )


def pictures(measured: Measurements) -> Html:
    """One picture per kind: heads that write downwards, heads that read across, where any can compose."""
    most = max(largest_excess(found) for found in measured.composition)
    tiles = []
    for found in measured.composition:
        excess = found.excess[:-1, :, 1:].flatten(2).flatten(0, 1) / most
        alt = f"{found.kind}-composition: earlier head downwards, later head across"
        name = el("span", el("b", found.kind), el("small", f"the later head {READS[found.kind]}"))
        tiles.append(el("div", el("img", src=data_uri(weights_png(excess)), alt=alt), name))
    ramp = legend("by chance or less", f"{number(most, '+.3f')}", "var(--accent)")
    last, n_heads = measured.heads[-1], measured.model.config.n_heads
    said = (
        f"Rows: the head that writes, {measured.heads[0]} to {measured.heads[-1 - n_heads]}; columns: the head that "
        f"reads, {measured.heads[n_heads]} to {last}. Opacity: the excess."
    )
    grid = el("div", *tiles, class_="tiles", style=f"grid-template-columns:repeat({len(tiles)},minmax(5rem,15rem))")
    return join([ramp, grid, el("p", said, class_="note")])


def largest_excess(found: CompositionScores) -> float:
    """The largest excess, or a tiny number where none is positive."""
    return max(float(found.excess.nan_to_num(0.0).max()), 1e-9)


def pairs_table(measured: Measurements) -> Html:
    """The strongest pairs of all kinds together."""
    ranked = sorted(
        ((pair, found) for found in measured.composition for pair in found.strongest(PAIRS)),
        key=lambda item: item[0][2],
        reverse=True,
    )[:PAIRS]
    most = max((score - found.baseline for (_, _, score), found in ranked), default=0.0)
    least = min((score - found.baseline for (_, _, score), found in ranked), default=0.0)
    rows = []
    for (writer, reader, score), found in ranked:
        excess = score - found.baseline
        cells = [row_header(f"{writer} → {reader}"), el("td", found.kind), numeric(score, ".3f")]
        rows.append([*cells, numeric(excess, "+.3f"), bar(excess, least=min(least, 0.0), most=max(most, 0.0))])
    columns = [
        header("heads", numbers=False),
        header("through", numbers=False),
        header("score", sort=True),
        header("excess", sort=True),
        el("td"),
    ]
    return table(columns, rows, caption="The pairs of heads that compose most", class_="plain")
