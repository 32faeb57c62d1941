"""Path expansion: from the logit back to the leaves, with an exact account of what was not looked at."""

from __future__ import annotations

from circuits.paths.counting import counted
from circuits.paths.expand import BUDGET, expand_paths
from circuits.paths.frozen import needed_names
from circuits.paths.result import OpenSuffix, Path, PathExpansion, Route
from circuits.paths.weights import ScorePath, VirtualHead, WeightPath, expand_scores, expand_weights, virtual_head

__all__ = [
    "BUDGET",
    "OpenSuffix",
    "Path",
    "PathExpansion",
    "Route",
    "ScorePath",
    "VirtualHead",
    "WeightPath",
    "counted",
    "expand_paths",
    "expand_scores",
    "expand_weights",
    "needed_names",
    "virtual_head",
]
