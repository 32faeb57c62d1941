"""The prompt, how well each of its tokens was predicted, and what was expected instead."""

from __future__ import annotations

import json
import math
from typing import Any

from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.tables import header, legend, numeric, row_header, table


def prompt(measured: Measurements) -> Section:
    """Tokens shaded by loss, the predictions at the one pointed at, and the same as a table."""
    uniform = math.log(measured.model.config.d_vocab)
    mean = measured.predictions.mean_loss
    summary = (
        "A single token: nothing in it is predicted."
        if math.isnan(mean)
        else f"Mean loss {mean:.3f} nats over {len(measured.labels) - 1} predicted tokens."
    )
    return Section(
        anchor="prompt",
        title="Prompt and predictions",
        explanation=join(
            [
                "Each token is shaded by its loss ",
                formula("−log p(x_t | x_{<t})"),
                f" in nats, from 0 to log d_vocab = {uniform:.3f}, which is the loss of a uniform guess. "
                "White space has visible marks: · for a space, ⏎ for a line break.",
            ]
        ),
        html=join(
            [
                el("p", summary, *([] if measured.built_in is None else [f" {measured.built_in}"])),
                legend("0 nats", f"{uniform:.2f} nats or more", "var(--warm)"),
                chips(measured, uniform),
                el("div", id="guesses", class_="panel js-only", aria_live="polite"),
                data(measured),
                el("details", el("summary", "All positions as a table"), predictions_table(measured)),
            ]
        ),
    )


def chips(measured: Measurements, full: float) -> Html:
    """The tokens in reading order, line breaks kept; one more stands for what comes next."""
    losses = [0.0, *measured.predictions.loss[:-1].tolist()]
    parts: list[Html] = []
    for place, (label, loss) in enumerate(zip(measured.labels, losses, strict=True)):
        said = f"{label}, position {place}" + (f", loss {loss:.3f} nats" if place else "")
        shade = f"--v:{min(loss / full, 1.0):.3f}" if full else "--v:0"
        parts.append(el("button", el("bdi", label), type="button", style=shade, title=said, aria_pressed="false"))
        if "⏎" in label:
            parts.append(el("span", class_="break"))
    parts.append(el("button", "▸", type="button", style="--v:0", title="what comes next", aria_pressed="false"))
    return el("div", *parts, class_="prompt", role="group", aria_label="The prompt, token by token")


def data(measured: Measurements) -> Html:
    """What the page's script shows at each token, as JSON that cannot end the element it stands in."""
    predicted = measured.predictions
    entries: list[dict[str, Any]] = [{"label": measured.labels[0], "loss": None, "probability": None, "top": []}]
    for place, loss in enumerate(predicted.loss.tolist()):
        last = place == len(measured.labels) - 1
        entries.append(
            {
                "label": None if last else measured.labels[place + 1],
                "loss": None if last else round(loss, 4),
                "probability": None if last else float(f"{math.exp(-loss):.4g}"),
                "top": [[label, round(probability, 4)] for label, probability in measured.guesses(place)],
            }
        )
    return json_script("prompt-data", entries)


def json_script(identifier: str, value: Any) -> Html:
    """JSON for the page's script."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return el("script", Html(safe), type="application/json", id=identifier)


def predictions_table(measured: Measurements) -> Html:
    """Every position: its token, the next one, the loss, and the likeliest tokens."""
    predicted = measured.predictions
    following = [*measured.labels[1:], None]
    rows = []
    for place, (label, after, loss) in enumerate(zip(measured.labels, following, predicted.loss.tolist(), strict=True)):
        likeliest = (
            el("span", el("bdi", guess, class_="token"), f" {probability:.3f}")
            for guess, probability in measured.guesses(place)
        )
        rows.append(
            [
                row_header(str(place)),
                token_cell(label),
                el("td", "–") if after is None else token_cell(after),
                numeric(loss, ".3f"),
                numeric(math.exp(-loss), ".3f"),
                el("td", join(likeliest, "   "), class_="wrap"),
            ]
        )
    heads = [
        header("position", numbers=False, sort=True),
        header("token", numbers=False),
        header("next token", numbers=False),
        header("loss (nats)", sort=True),
        header("probability", sort=True),
        header("likeliest next tokens, with probabilities", numbers=False),
    ]
    return table(heads, rows, caption="At each position: the next token’s loss, and the likeliest next tokens")


def token_cell(label: str) -> Html:
    """A cell with a token."""
    return el("td", el("bdi", label, class_="token"))
