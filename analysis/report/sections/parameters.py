"""Parameters by component, and the closed form of their total."""

from __future__ import annotations

from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import bar, header, numeric, row_header, table
from circuits.config import GPTConfig


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
    form = closed_form(config, counted.total)
    return Section(
        anchor="parameters",
        title="Parameters",
        explanation=join(
            [
                "Trainable scalars of each component, in closed form from the configuration and equal to what the "
                "checkpoint holds",
                *([] if form is None else ["; the total is ", formula(form[0]), f", with {form[1]}"]),
                ".",
            ]
        ),
        html=Html(
            table(heads, rows, caption="Parameters by component", footer=total, class_="plain")
            + el("p", note, class_="note")
        ),
    )


def closed_form(config: GPTConfig, total: int) -> tuple[str, str] | None:
    """The total in d, L, V and T_max, and what these are; None for a configuration whose total is no such polynomial.

    ``2Vd + T_max d + L(12d² + 10d) + 2d`` for a GPT-2-style model, such as the course configuration.
    """
    d, V = config.d_model, config.d_vocab
    if config.n_heads * config.d_head != d or config.n_kv_heads != config.n_heads or config.d_mlp % d:
        return None
    wide = config.d_mlp // d
    of_norm = {"layernorm": 2, "rmsnorm": 1, None: 0}[config.norm]
    squares = 4 + (3 if config.gated_mlp else 2) * wide
    singles = 3 * config.bias_qkv + config.bias_out + (wide + 1) * (config.bias_mlp and config.has_mlp)
    singles += of_norm * (2 if config.has_mlp else 1)
    last = of_norm * config.final_norm
    maps = 1 if config.tie_embeddings else 2
    learned = config.positions == "learned"
    value = maps * V * d + learned * config.n_ctx * d + config.n_layers * (squares * d * d + singles * d) + last * d
    if value + config.bias_unembed * V != total:
        return None
    layer = f"L({squares}d^2 + {times(singles, 'd')})" if singles else f"{squares}Ld^2"
    terms = [times(maps, "Vd"), "T_max d" if learned else "", layer, times(last, "d"), "V" * config.bias_unembed]
    sizes = f"V = {V:,}, " + (f"T_max = {config.n_ctx:,}, " if learned else "") + f"d = {d:,} and L = {config.n_layers}"
    return " + ".join(filter(None, terms)), sizes


def times(count: int, name: str) -> str:
    """``2d``, ``d``, or nothing."""
    return "" if not count else name if count == 1 else f"{count}{name}"
