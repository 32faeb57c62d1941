"""What every component adds directly to the lead of one next token over another."""

from __future__ import annotations

from analysis.attribution import Attribution
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import bar, header, number, numeric, row_header, shaded, table
from circuits.components import MLP, Component, Head

MOST = 25


def attribution(measured: Measurements) -> Section:
    """Direct logit attribution at one position of the prompt."""
    explanation = join(
        [
            "The last stream is the sum of everything written to it, so a logit difference is a sum over components: ",
            formula("Δ = Σ write · centred(γ ⊙ ΔW_U) / scale + β · ΔW_U + Δb_U"),
            ", the final norm frozen at this run’s scale. In logits. This is the direct effect, at one position and on "
            "one pair of tokens; what a component does through later ones does not count here, while zero-ablation "
            "measures the total effect on the mean loss, so that the two need not agree.",
        ]
    )
    found = measured.attribution
    shown = el("p", REFUSED, class_="note") if found is None else join([asked(measured, found), grid(measured, found)])
    rows = Html("") if found is None else bars(found)
    return Section("attribution", "Direct logit attribution", explanation, join([shown, rows]))


REFUSED = (
    "Not shown: in a post-norm model every norm after an addition rescales all earlier writes, so the stream is not a "
    "sum of them."
)


def asked(measured: Measurements, found: Attribution) -> Html:
    """Which two tokens are compared, and how exactly the rows add up."""
    return el(
        "p",
        f"{pair(measured, found)} The {found.quantity} is "
        f"{number(float(found.total), '+.3f')}; the rows below sum to it within {found.error:.0e}.",
    )


def pair(measured: Measurements, found: Attribution) -> str:
    """Where the two tokens are compared, and whether they are the likeliest there or were asked for."""
    correct, wrong = measured.answers
    place = int(found.position)
    last = place == len(measured.labels) - 1
    where = "At the last position" if last else f"After position {place}, ‘{measured.labels[place]}’,"
    if measured.predictions.guess[place, :2].tolist() == [int(found.correct), int(found.wrong)]:
        return f"{where} the likeliest next token is ‘{correct}’, then ‘{wrong}’."
    return f"{where} the next token ‘{correct}’ is compared with ‘{wrong}’."


def grid(measured: Measurements, found: Attribution) -> Html:
    """Heads by layer, beside them the MLP of the layer."""
    config = measured.model.config
    values = dict(zip(found.components, found.value[:, 0].tolist(), strict=True))
    full = max((abs(v) for c, v in values.items() if isinstance(c, Head | MLP)), default=0.0)
    rows = []
    for layer in range(config.n_layers):
        parts: list[Component] = [Head(layer, head) for head in range(config.n_heads)]
        parts += [MLP(layer)] if config.has_mlp else []
        cells = [shaded(values[part], "+.3f", full=full, title=str(part)) for part in parts]
        rows.append([row_header(str(layer)), *cells])
    columns = [*(f"head {head}" for head in range(config.n_heads)), *(["MLP"] if config.has_mlp else [])]
    caption = "What each head and MLP adds to the lead, in logits"
    return table([header("layer", numbers=False), *map(header, columns)], rows, caption=caption)


def bars(found: Attribution) -> Html:
    """All components, embeddings and biases too, by the size of what they add; the rest in one row."""
    values = found.value[:, 0]
    order = values.abs().argsort(descending=True, stable=True)
    kept, left = order[:MOST], order[MOST:]
    shown = [(str(found.components[i]), v) for i, v in zip(kept.tolist(), values[kept].tolist(), strict=True)]
    if len(left):
        shown.append((f"{len(left)} others together", float(values[left].sum())))
    low, high = min(0.0, *(v for _, v in shown)), max(0.0, *(v for _, v in shown))
    rows = [[row_header(name), numeric(v, "+.4f"), bar(v, least=low, most=high)] for name, v in shown]
    footer = [row_header("total"), numeric(float(found.total), "+.4f"), el("td")]
    heads = [header("component", numbers=False, sort=True), header("logits", sort=True), el("td")]
    return join([el("h3", "By size"), table(heads, rows, caption="Components by what they add", footer=footer)])
