"""The lecture's parameter table."""

from __future__ import annotations

from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import bar, header, numeric, row_header, table


def parameters(measured: Measurements) -> Section:
    """Component, parameters, share."""
    counted = measured.parameters
    config = measured.model.config
    most = float(counted.share.max())
    rows = [
        [row_header(part), numeric(count, ","), numeric(share, ".2%"), bar(share, least=0.0, most=most)]
        for part, count, share in zip(counted.parts, counted.parameters.tolist(), counted.share.tolist(), strict=True)
    ]
    total = [el("th", "total", scope="row"), numeric(counted.total, ","), numeric(1.0, ".0%"), el("td")]
    heads = [
        header("component", numbers=False),
        header("parameters"),
        header("share of the total"),
        el("td"),
    ]
    note = (
        "The embedding and the unembedding are one parameter, counted once."
        if config.tie_embeddings
        else f"Counted once, tied to the embedding, the unembedding would leave {counted.total_if_tied:,} parameters."
    )
    return Section(
        anchor="parameters",
        title="Parameters",
        explanation=join(
            [
                "Trainable scalars of each component, in closed form from the configuration and equal to what the "
                "checkpoint holds; with the lecture’s conventions the total is ",
                formula("2Vd + T_max d + L(12d^2 + 10d) + 2d"),
                ".",
            ]
        ),
        html=Html(
            table(heads, rows, caption="Parameters by component", footer=total, class_="plain")
            + el("p", note, class_="note")
        ),
    )
