"""What the model is, and where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from analysis.report.card import loss_curve, provenance
from analysis.report.markup import Html, el
from analysis.report.measurements import Measurements
from analysis.report.section import Section
from circuits.config import GPTConfig

SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_mlp", "n_ctx", "d_vocab")
# What `GPTConfig(n_layers=…, …)` is unless told otherwise: what "differs" is measured from.
USUAL = (
    "pre-norm LayerNorm, learned positions, exact GELU, d_mlp = 4 d_model, biases on the attention’s output and the "
    "MLP alone, and an unembedding of its own"
)


def model(measured: Measurements) -> Section:
    """Sizes, conventions that differ from those of a GPT-2-style GPT, and the model card."""
    config, card = measured.model.config, measured.model.card
    blocks = [
        el("div", el("h3", "Sizes"), definitions(sizes(config))),
        el("div", el("h3", "Conventions"), definitions(conventions(config))),
    ]
    if card:
        blocks.append(el("div", el("h3", "Card"), *carded(card)))
    return Section(
        anchor="model",
        title="The model",
        explanation=Html(
            "The architecture as its configuration states it, and the card that the checkpoint carries. Conventions "
            f"are listed where they differ from those of a GPT in GPT-2’s style: {USUAL}."
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
    """Fields that differ from those of a GPT-2-style GPT of the same sizes."""
    usual = GPTConfig(
        **{name: getattr(config, name) for name in ("n_layers", "d_model", "n_heads", "n_ctx", "d_vocab")}
        | {"d_head": config.d_head}
    )
    differing = {
        field.name: plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in SIZES and getattr(config, field.name) != getattr(usual, field.name)
    }
    return differing or {"GPT-2’s style": "in every field"}


def carded(card: Mapping[str, Any]) -> list[Html]:
    """The key facts of a card, the curve of its losses, and all the rest folded."""
    parts: list[Html] = []
    if (trained := provenance(card)) != "–":
        parts.append(el("p", trained))
    if (curve := loss_curve(card)) is not None:
        parts.append(curve)
    entries = definitions(dict(flattened(once(card))))
    return [*parts, el("details", el("summary", "The whole card"), entries, open=not parts)]


def once(card: Mapping[str, Any]) -> dict[str, Any]:
    """The card without entries that say again what the settings of its training say."""
    settings = card.get("training")
    if not isinstance(settings, Mapping):
        return dict(card)
    return {name: value for name, value in card.items() if name not in settings or settings[name] != value}


# Entries whose name does not say what the number is.
UNITS = {"training.final_lr": "of lr", "loss.train": "nats", "loss.val": "nats"}


def flattened(card: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """A card's entries, nested ones under dotted names; long lists by their ends."""
    for key, value in card.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif isinstance(value, list | tuple) and len(value) > 3:
            yield name, f"{plain(value[0])}, …, {plain(value[-1])} ({len(value)} entries)"
        else:
            yield name, " ".join([plain(value), *([UNITS[name]] if name in UNITS else [])])


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
