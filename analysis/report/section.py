"""What a section of the report is: a value, made by one small file of `analysis.report.sections`."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.report.markup import Html


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        anchor: Its id, by which links reach it.
        title: Its heading, and its line in the contents.
        explanation: What is shown, in a sentence or two, with the formula and the units.
        html: The tables and pictures.
    """

    anchor: str
    title: str
    explanation: Html
    html: Html
