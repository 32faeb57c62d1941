"""Which head of one model is which head of another: compared in token space, which two models share."""

from __future__ import annotations

from analysis.matching.heads import HeadMatching, match_heads

__all__ = ["HeadMatching", "match_heads"]
