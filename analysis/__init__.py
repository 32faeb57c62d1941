"""Measurements on transformers: functions of a model, tokens or a cache that return a frozen result.

Every public name is imported from its module when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits import __version__ as __version__
from circuits._lazy import attach

# A public name stands twice, once for type checkers and once for the interpreter; a test holds the two lists equal.
if TYPE_CHECKING:
    from analysis.ablation import (
        ablate as ablate,
        ablate_all_but as ablate_all_but,
        ablate_in_order as ablate_in_order,
        knock_out_attention as knock_out_attention,
        plan as plan,
        reorder_blocks as reorder_blocks,
    )
    from analysis.accounting import flops as flops, parameter_table as parameter_table
    from analysis.attribution import logit_attribution as logit_attribution, logit_paths as logit_paths
    from analysis.claims import verify as verify
    from analysis.composition import composition_scores as composition_scores
    from analysis.patching import (
        activation_patch as activation_patch,
        patch_plan as patch_plan,
        path_patch as path_patch,
    )
    from analysis.patterns import attention_patterns as attention_patterns, head_scores as head_scores
    from analysis.ranks import copying_scores as copying_scores, head_ranks as head_ranks
else:
    _PUBLIC: dict[str, str] = {
        "ablate": "analysis.ablation",
        "ablate_all_but": "analysis.ablation",
        "ablate_in_order": "analysis.ablation",
        "activation_patch": "analysis.patching",
        "attention_patterns": "analysis.patterns",
        "copying_scores": "analysis.ranks",
        "composition_scores": "analysis.composition",
        "flops": "analysis.accounting",
        "head_ranks": "analysis.ranks",
        "head_scores": "analysis.patterns",
        "knock_out_attention": "analysis.ablation",
        "logit_attribution": "analysis.attribution",
        "logit_paths": "analysis.attribution",
        "parameter_table": "analysis.accounting",
        "patch_plan": "analysis.patching",
        "path_patch": "analysis.patching",
        "plan": "analysis.ablation",
        "reorder_blocks": "analysis.ablation",
        "verify": "analysis.claims",
    }
    __all__ = list(_PUBLIC)
    __getattr__, __dir__ = attach(__name__, _PUBLIC)
