"""How much of their width heads use: spectra and ranks of their circuits, of a layer's, of a run's; copying scores.

All ranks are functions of the singular values s, which come from the factors at the size of d_head.
"""

from __future__ import annotations

from analysis.ranks.copying import CopyingScores, copying_scores
from analysis.ranks.heads import HeadRanks, head_ranks
from analysis.ranks.layers import LayerRanks, layer_ranks
from analysis.ranks.runs import ScoreRanks, score_ranks
from analysis.ranks.spectra import (
    effective_rank,
    energy_rank,
    numerical_rank,
    participation_ratio,
    ranks_of,
    stable_rank,
)

__all__ = [
    "CopyingScores",
    "HeadRanks",
    "LayerRanks",
    "ScoreRanks",
    "copying_scores",
    "effective_rank",
    "energy_rank",
    "head_ranks",
    "layer_ranks",
    "numerical_rank",
    "participation_ratio",
    "ranks_of",
    "score_ranks",
    "stable_rank",
]
