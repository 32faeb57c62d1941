"""The attention pattern of every head, as pictures, and one of them enlarged."""

from __future__ import annotations

import base64
import zlib

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.report.heads import CLEAR
from analysis.report.markup import Html, el, formula, join
from analysis.report.measurements import Measurements
from analysis.report.png import data_uri, quantised, weights_png
from analysis.report.section import Section
from analysis.report.sections.prompt import json_script
from analysis.report.tables import legend
from circuits.config import GPTConfig

BESIDE = 6  # heads in a row up to which the enlarged pattern has room beside them


def patterns(measured: Measurements) -> Section:
    """One small picture per head; choosing one enlarges it and lets its weights be read off."""
    layout = "heads" if measured.model.config.n_heads <= BESIDE else "heads many"
    return Section(
        anchor="patterns",
        title="Attention patterns",
        explanation=join(
            [
                "How much each query position (row) takes from each key position (column) on this prompt: ",
                formula(equation(measured.model.config)),
                ", every row summing to 1; opacity is the weight, from 0 to 1. A head with a clear behaviour (a score "
                f"of at least {CLEAR} in the next section) is named after it.",
            ]
        ),
        html=join([el("div", tiles(measured), enlarged(measured), class_=layout), data(measured)]),
    )


def equation(config: GPTConfig) -> str:
    """The attention of this architecture: W_QK alone makes the scores only where nothing acts on queries and keys."""
    plain = config.positions != "rotary" and not config.qk_norm and not config.bias_qkv
    turned = "rot(q) rot(k)^T" if config.positions == "rotary" else "q k^T"
    product = "x W_QK x^T" if plain else turned
    scores = (
        f"{product} / √d_head" if config.attn_scale == config.d_head**-0.5 else f"{config.attn_scale:.4g} {product}"
    )
    capped = scores if config.attn_softcap is None else f"cap({scores})"
    return f"A = softmax({capped})"


def tiles(measured: Measurements) -> Html:
    """The pictures, a row for each layer."""
    n_heads = measured.model.config.n_heads
    buttons = []
    for head, pattern in zip(measured.heads, measured.pattern.flatten(0, 1), strict=True):
        role, score = measured.by_head.role(head) or ("", 0.0)
        said = f"{role} score {score:.3f}" if role else ""
        picture = el("img", src=data_uri(weights_png(pattern)), alt=f"Attention pattern of {head} {said}".strip())
        name = el("span", el("b", str(head)), el("small", role, title=said))
        buttons.append(el("button", picture, name, type="button", aria_pressed="false"))
    grid = el("div", *buttons, class_="tiles", style=f"--across:{n_heads}", role="group", aria_label="Heads")
    return el("div", legend("weight 0", "1", "var(--accent)"), el("div", grid, class_="scroll"))


def enlarged(measured: Measurements) -> Html:
    """Where the page's script draws the chosen head; the most telling one at first."""
    chosen = measured.heads.index(measured.most_telling)
    return el(
        "div",
        el("h3", str(measured.most_telling), id="pattern-title"),
        el("canvas", id="pattern", data_head=chosen, tabindex=0, role="img", width=480, height=480),
        el("p", class_="readout", id="readout", aria_live="polite"),
        id="large",
        class_="large js-only",
        hidden=True,
    )


def data(measured: Measurements) -> Html:
    """The weights for the script: every head's lower triangle in 256 levels, row by row, compressed."""
    return json_script(
        "attention-data",
        {
            "labels": measured.labels,
            "names": [str(head) for head in measured.heads],
            "packed": base64.b64encode(packed(measured.pattern)).decode("ascii"),
        },
    )


def packed(pattern: Float[Tensor, "layer head query key"]) -> bytes:
    """The visible weights, ``key ≤ query``, of all heads after one another, quantised and deflated."""
    size = pattern.shape[-1]
    rows, columns = torch.tril_indices(size, size).unbind()
    return zlib.compress(quantised(pattern[..., rows, columns]).numpy().tobytes(), 9)
