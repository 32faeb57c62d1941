"""The sections of the report, in the order of the page.

A section is a function in a file of its own, from the measurements to a `Section`, or None where the model has nothing
to show (no MLPs, a single token). A new one is a new file and a line here.
"""

from __future__ import annotations

from collections.abc import Callable

from analysis.report.measurements import Measurements
from analysis.report.section import Section
from analysis.report.sections.ablation import ablation
from analysis.report.sections.attribution import attribution
from analysis.report.sections.claims import claims
from analysis.report.sections.composition import composition
from analysis.report.sections.findings import findings
from analysis.report.sections.model import model
from analysis.report.sections.parameters import parameters
from analysis.report.sections.paths import paths
from analysis.report.sections.patterns import patterns
from analysis.report.sections.prompt import prompt
from analysis.report.sections.scores import scores
from analysis.report.sections.weights import weights

SECTIONS: tuple[Callable[[Measurements], Section | None], ...] = (
    findings,
    model,
    parameters,
    prompt,
    patterns,
    scores,
    weights,
    composition,
    ablation,
    attribution,
    paths,
    claims,
)
