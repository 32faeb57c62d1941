"""What stands out: the few numbers to look at first."""

from __future__ import annotations

import math

from analysis.report.heads import CLEAR
from analysis.report.markup import Html, el
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import number
from circuits.components import MLP, Head

LEAST_EFFECT = 0.0005  # nats: what reads 0.000 matters to nobody


def findings(measured: Measurements) -> Section:
    """The strongest head of each kind, and the largest effects."""
    entries = [
        loss(measured),
        strongest(measured, "previous", "Strongest previous-token head"),
        strongest(measured, "induction", "Strongest induction head"),
        copying(measured),
        *effects(measured),
    ]
    return Section(
        anchor="findings",
        title="At a glance",
        explanation=Html(
            "The extremes of what follows, each with its number. A head is called after a score from "
            f"{CLEAR} up, here and below."
        ),
        html=el("dl", *(entry for entry in entries if entry), class_="findings"),
    )


def entry(title: str, value: str, detail: str) -> Html:
    """One finding."""
    return el("div", el("dt", title), el("dd", value, el("small", detail)))


def loss(measured: Measurements) -> Html | None:
    """The mean loss on the prompt."""
    mean = measured.predictions.mean_loss
    if math.isnan(mean):
        return None
    uniform = math.log(measured.model.config.d_vocab)
    return entry("Loss on the prompt", f"{mean:.3f} nats", f"{len(measured.labels) - 1} tokens; uniform: {uniform:.3f}")


def strongest(measured: Measurements, name: str, title: str) -> Html | None:
    """The head with the largest score of a kind."""
    ranked = [
        (v, head) for v, head in zip(measured.by_head.score(name), measured.heads, strict=True) if not math.isnan(v)
    ]
    if not ranked:
        return None
    value, head = max(ranked)
    if value < CLEAR:
        return entry(title, f"none above {CLEAR}", f"largest {name} score: {head}, {value:.3f}")
    return entry(title, str(head), f"{name} score {value:.3f}")


def copying(measured: Measurements) -> Html | None:
    """The head whose OV circuit copies most."""
    ranked = [(v, head) for v, head in zip(measured.by_head.copying, measured.heads, strict=True) if not math.isnan(v)]
    if not ranked:
        return None
    value, head = max(ranked)
    positive = sum(v > 0 for v, _ in ranked)
    shown, said = (str(head), "copying score") if value >= CLEAR else (f"none above {CLEAR}", f"largest score: {head},")
    return entry(
        "Most copying head", shown, f"{said} {number(value, '+.3f')}; {positive} of {len(ranked)} are positive"
    )


def effects(measured: Measurements) -> list[Html]:
    """The head, and the MLP, whose ablation costs most."""
    found = []
    for title, kind in (("Head that matters most here", Head), ("MLP that matters most here", MLP)):
        ranked = [(value, part) for part, value in measured.effects.items() if isinstance(part, kind)]
        if ranked:
            value, part = max(ranked)
            said = f"zero-ablation changes the loss by {number(value, '+.3f')} nats"
            needed = value >= LEAST_EFFECT
            found.append(entry(title, str(part) if needed else "none", said if needed else f"largest: {part}, {said}"))
    return found
