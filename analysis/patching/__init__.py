"""Patching: activations of one run put into another, whole or along one edge only.

`pairs` says which position of one run stands for which of the other, `activation` patches activations, `edges` and
`paths` the direct edge from one component to another, `result` is what both return.
"""

from analysis.patching.activation import activation_patch, patch_plan
from analysis.patching.edges import Receiver
from analysis.patching.path_result import PathPatching
from analysis.patching.paths import path_cost, path_patch
from analysis.patching.plan import PatchOptions, PatchPlan
from analysis.patching.result import (
    HeadPatching,
    HeadPositionPatching,
    LayerPatching,
    LayerPositionPatching,
    Patching,
)

__all__ = [
    "HeadPatching",
    "HeadPositionPatching",
    "LayerPatching",
    "LayerPositionPatching",
    "PatchOptions",
    "PatchPlan",
    "Patching",
    "PathPatching",
    "Receiver",
    "activation_patch",
    "patch_plan",
    "path_cost",
    "path_patch",
]
