"""Ablation: what changes when what a component writes is replaced by nothing, its mean, or another prompt's.

`targets` says which components, `replacements` what to put there, `runs` makes the runs, `measure` the numbers.
"""

from analysis.ablation.measure import Ablation, ablate
from analysis.ablation.targets import Target

__all__ = ["Ablation", "Target", "ablate"]
