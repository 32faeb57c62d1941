"""What a model's card says of its training: in one line, and as a small curve of the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.report.markup import Html, el

WIDTH, HEIGHT = 300, 84
CURVES = {"train_loss": "training", "val_loss": "validation"}


def provenance(card: Mapping[str, Any]) -> str:
    """Data, updates and validation loss, as far as the card states them; a dash where it states none."""
    data, training, loss = (_mapping(card.get(name)) for name in ("data", "training", "loss"))
    parts = []
    if "file" in data:
        parts.append(str(data["file"]))
    elif "task" in data:
        parts.append(f"task {data['task']}")
    steps = card.get("steps", training.get("steps"))
    if isinstance(steps, int):
        parts.append(f"{steps:,} steps")
    if isinstance(loss.get("val"), int | float):
        parts.append(f"validation loss {loss['val']:.3f} nats")
    return ", ".join(parts) or "–"


def loss_curve(card: Mapping[str, Any]) -> Html | None:
    """Training and validation loss over the updates as a small picture; None where the card has no history."""
    history = _mapping(card.get("history"))
    steps = _numbers(history.get("step"))
    curves = {name: values for name in CURVES if len(values := _numbers(history.get(name))) == len(steps)}
    if len(steps) < 2 or not curves:
        return None
    top = max(max(values) for values in curves.values()) or 1.0
    last = ", ".join(f"{CURVES[name]} {values[-1]:.3f}" for name, values in curves.items())
    lines = [_line(steps, values, top, name) for name, values in curves.items()]
    said = f"Losses from step {steps[0]:,.0f} to {steps[-1]:,.0f}, in nats, from 0 to {top:.2f}; at the end {last}"
    picture = el("svg", *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said, class_="curve")
    keys = [el("span", el("i", class_=name), CURVES[name]) for name in curves]
    return el("figure", picture, el("figcaption", *keys, el("span", f"{said}.")), class_="curve")


def _line(steps: Sequence[float], values: Sequence[float], top: float, name: str) -> Html:
    across = (steps[-1] - steps[0]) or 1.0
    points = " ".join(
        f"{WIDTH * (step - steps[0]) / across:.1f},{HEIGHT - 1 - (HEIGHT - 2) * value / top:.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    return el("polyline", points=points, fill="none", stroke_width=2, class_=name)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(value: Any) -> list[float]:
    """A list of finite numbers; empty where the card, which may say anything, has something else."""
    listed = value if isinstance(value, list | tuple) else ()
    whole = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in listed)
    return [float(v) for v in listed] if whole else []
