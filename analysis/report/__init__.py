"""The self-contained HTML report: a model's circuits on one page that needs no network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from analysis.report.heads import Progress
from analysis.report.markup import el, join
from analysis.report.measurements import Measurements, measure
from analysis.report.page import page
from analysis.report.sections import SECTIONS
from circuits import __version__
from circuits.storage import written_whole

if TYPE_CHECKING:
    from circuits.model import HookedGPT

__all__ = ["Measurements", "Report", "measure", "report"]


@dataclass(frozen=True, repr=False)
class Report:
    """A finished report.

    Attributes:
        measurements: The numbers that it shows.
        html: The page.
    """

    measurements: Measurements
    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, which appears whole or not at all.

        Raises:
            OSError: The folder does not exist or cannot be written to.
        """
        with written_whole(path) as unfinished:
            unfinished.write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        return f"Report on {self.measurements.name}: {len(self.html.encode()):,} bytes of HTML; .save(path) writes it"


def report(
    model: HookedGPT,
    tokens: Int[Tensor, "1 pos"],
    name: str = "model",
    progress: Progress = lambda step: None,
    *,
    correct: int | None = None,
    wrong: int | None = None,
    position: int = -1,
) -> Report:
    """Measure a model on one prompt and lay the results out as one HTML page.

    Args:
        model: A model.
        tokens: The prompt, one sequence (`analysis.prompts.prompt_tokens` makes one from text, ids or nothing).
        name: What to call the model.
        progress: Called with the name of each step before it begins.
        correct: The next token whose lead attribution and paths explain; by default the likeliest.
        wrong: The token that it is compared with; by default the likeliest other one.
        position: Where the two are compared; −1 is the last token.

    Raises:
        IndexError: A token or position that does not exist.
    """
    measured = measure(model, tokens, name, progress, correct=correct, wrong=wrong, position=position)
    return Report(measured, render(measured))


def render(measured: Measurements) -> str:
    """The page of some measurements; nothing is computed here."""
    config = measured.model.config
    mlp = f"d_mlp {config.d_mlp:,}" if config.has_mlp else "attention only"
    subtitle = (
        f"{config.n_layers} layers × {config.n_heads} heads, d_model {config.d_model:,}, d_head {config.d_head}, "
        f"{mlp}, vocabulary {config.d_vocab:,}, context {config.n_ctx:,}: {measured.parameters.total:,} parameters."
    )
    sections = [section for make in SECTIONS if (section := make(measured)) is not None]
    footer = join(
        [
            f"Made with qkov {__version__}. Definitions follow ",
            el("i", "A Mathematical Framework for Transformer Circuits"),
            " (Elhage et al., 2021). This page holds everything it shows and asks for nothing from a network.",
        ]
    )
    return page(f"Circuits of {measured.name}", join([subtitle]), sections, footer)
