"""What the loss does when a component writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import bar, header, number, numeric, row_header, shaded, table
from circuits.components import MLP, Block, Component, Head


def ablation(measured: Measurements) -> Section | None:
    """Change of the loss for every head, MLP and block."""
    if not measured.effects:
        return None
    return Section(
        anchor="ablation",
        title="Zero-ablation",
        explanation=join(
            [
                "How the mean loss on this prompt changes when one component writes zero to the residual stream, all "
                "else recomputed: ",
                formula("Δ = loss(ablated) − loss(clean)"),
                f" in nats, the clean loss being {number(measured.predictions.mean_loss, '.3f')}. Positive: the model "
                "needs the component here. Ablating a block drops its attention",
                " and its MLP. " if measured.model.config.has_mlp else ". ",
                "This is the total effect, on all predicted tokens, and through all later components; the attribution "
                "below is the direct effect alone, on one pair of tokens at one position: a head can be large in one "
                "and small in the other.",
            ]
        ),
        html=join([grid(measured), bars(measured)]),
    )


def grid(measured: Measurements) -> Html:
    """Heads by layer; beside them the MLP and the whole block of the layer."""
    config, effects = measured.model.config, measured.effects
    of_heads = largest(value for part, value in effects.items() if isinstance(part, Head))
    of_parts = largest(value for part, value in effects.items() if not isinstance(part, Head))
    rows = []
    for layer in range(config.n_layers):
        cells = [shaded_effect(effects, Head(layer, head), of_heads) for head in range(config.n_heads)]
        cells += [shaded_effect(effects, MLP(layer), of_parts)] if config.has_mlp else []
        cells += [shaded_effect(effects, Block(layer), of_parts)]
        rows.append([row_header(str(layer)), *cells])
    columns = [*(f"head {head}" for head in range(config.n_heads)), *(["MLP"] if config.has_mlp else []), "block"]
    caption = "Change of the loss in nats, by layer; heads on one colour scale, MLPs and blocks on another"
    return table([header("layer", numbers=False), *map(header, columns)], rows, caption=caption)


def shaded_effect(effects: Mapping[Component, float], component: Component, full: float) -> Html:
    """The cell of one component."""
    return shaded(effects[component], "+.3f", full=full, title=str(component))


KINDS = {Head: "Heads", MLP: "MLPs", Block: "Blocks, each with the heads and the MLP inside it"}
MOST = 40  # rows of a table


def bars(measured: Measurements) -> Html:
    """Each kind by the size of its effects: a block holds heads and an MLP, so it stands in no one list with them."""
    parts = [el("h3", "By size")]
    for kind, title in KINDS.items():
        effects = [(str(part), value) for part, value in measured.effects.items() if isinstance(part, kind)]
        if effects:
            parts.append(
                by_size(effects, title if measured.model.config.has_mlp else title.replace(" and the MLP", ""))
            )
    return join(parts)


def by_size(effects: Sequence[tuple[str, float]], title: str) -> Html:
    """One kind, the largest first, on an axis of its own."""
    ordered = sorted(effects, key=lambda item: -abs(item[1]))[:MOST]
    low, high = min(0.0, *(v for _, v in ordered)), max(0.0, *(v for _, v in ordered))
    rows = [[row_header(name), numeric(value, "+.4f"), bar(value, least=low, most=high)] for name, value in ordered]
    heads = [header("component", numbers=False, sort=True), header("Δ loss (nats)", sort=True), el("td")]
    left = len(effects) - len(ordered)
    return table(heads, rows, caption=title + (f"; {left} smaller ones are left out" if left else ""))


def largest(values: Iterable[float]) -> float:
    """The largest absolute value, 0 for none."""
    return max(map(abs, values), default=0.0)
