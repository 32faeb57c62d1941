"""Ablation: what changes when what a component writes is replaced by nothing, its mean, or another prompt's.

`targets` says which components, `writes` where they stand, `replacements` what to put there, `planning` the runs and
their cost, `sweeps` the measurements. To see a cost beforehand, ``print(plan(model, tokens, "heads"))``.
"""

from analysis.ablation.orders import BlockOrders, reorder_blocks
from analysis.ablation.planning import Options, Plan, plan
from analysis.ablation.result import Ablation, PairAblation, Sufficiency
from analysis.ablation.sweeps import ablate, ablate_all_but, ablate_in_order, knock_out_attention
from analysis.ablation.targets import Target

__all__ = [
    "Ablation",
    "BlockOrders",
    "Options",
    "PairAblation",
    "Plan",
    "Sufficiency",
    "Target",
    "ablate",
    "ablate_all_but",
    "ablate_in_order",
    "knock_out_attention",
    "plan",
    "reorder_blocks",
]
