"""What the model is, and where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.report.markup import Html, el
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from circuits.config import GPTConfig

SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "n_ctx", "d_vocab")


def model(measured: Measurements) -> Section:
    """Sizes, conventions that differ from the lecture's, and the model card."""
    config = measured.model.config
    blocks = [
        el("div", el("h3", "Sizes"), definitions(sizes(config))),
        el("div", el("h3", "Conventions"), definitions(conventions(config))),
    ]
    card = dict(flattened(measured.model.card))
    if card:
        blocks.append(el("div", el("h3", "Card"), definitions(card)))
    return Section(
        anchor="model",
        title="The model",
        explanation=Html(
            "The architecture as its configuration states it, and the card that the checkpoint carries. Conventions "
            "are listed where they differ from those of the lecture’s GPT."
        ),
        html=el("div", *blocks, class_="columns"),
    )


def sizes(config: GPTConfig) -> dict[str, str]:
    """The sizes that the architecture has."""
    shown = {name: f"{getattr(config, name):,}" for name in SIZES}
    if config.n_kv_heads == config.n_heads:
        del shown["n_kv_heads"]
    if not config.has_mlp:
        del shown["d_mlp"]
    return shown


def conventions(config: GPTConfig) -> dict[str, str]:
    """Fields that differ from the lecture's GPT of the same sizes."""
    usual = GPTConfig(
        **{name: getattr(config, name) for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab")}
        | {"d_head": config.d_head}
    )
    differing = {
        field.name: plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in SIZES and getattr(config, field.name) != getattr(usual, field.name)
    }
    return differing or {"as in the lecture": "learned positions, pre-norm LayerNorm, exact GELU"}


def flattened(card: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A card's entries, nested ones under dotted names; long lists by their length."""
    for key, value in card.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif isinstance(value, list | tuple) and len(value) > 8:
            yield name, f"{len(value)} entries, last {plain(value[-1])}"
        else:
            yield name, plain(value)


def plain(value: Any) -> str:
    """A value as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    return str(value)


def definitions(entries: Mapping[str, str]) -> Html:
    """Names and what they stand for."""
    cells = [cell for name, value in entries.items() for cell in (el("dt", name), el("dd", value))]
    return el("dl", *cells, class_="card")
