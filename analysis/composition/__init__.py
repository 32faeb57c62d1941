"""Composition: how much of what one component writes lies where a later one reads, in the weights alone."""

from __future__ import annotations

from analysis.composition.components import ComponentComposition, component_composition
from analysis.composition.heads import CompositionScores, composition_scores

__all__ = ["ComponentComposition", "CompositionScores", "component_composition", "composition_scores"]
