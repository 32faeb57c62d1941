"""How distinct the attention distributions of a layer's heads are."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.patterns import attention_patterns
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.model import HookedGPT


@result
class HeadDiversity(Result):
    """Distances between the attention distributions of heads of one layer (remark 1.4).

    Attributes:
        divergence: Jensen–Shannon divergence ``H((A + B)/2) − (H(A) + H(B))/2`` in nats, between 0 and ln 2, mean over
            the queries that see at least two keys.
        mean: Its mean over pairs of different heads, by layer; NaN with a single head.
    """

    table = ("divergence",)
    divergence: Float[Tensor, "layer head head2"]
    mean: Float[Tensor, " layer"]


@torch.no_grad()
def head_diversity(model: HookedGPT, tokens: Int[Tensor, "batch pos"]) -> HeadDiversity:
    """Compare the attention of all pairs of heads of each layer, query by query.

    Args:
        model: A model.
        tokens: Prompts of at least two tokens.

    Raises:
        ValueError: Prompts of a single token, where every head looks at the same place.
    """
    require_model(model)
    if tokens.shape[1] < 2:
        raise ValueError("head diversity needs prompts of at least 2 tokens; got 1")
    pattern = attention_patterns(model, tokens).pattern[:, :, :, 1:]
    entropy = torch.special.entr(pattern).sum(-1)
    heads = range(pattern.shape[2])
    rows = []
    for head in heads:
        mixed = (pattern[:, :, head, None] + pattern) / 2
        spread = torch.special.entr(mixed).sum(-1) - (entropy[:, :, head, None] + entropy) / 2
        rows.append(spread.clamp(min=0).mean((0, 3)))
    divergence = torch.stack(rows, dim=1)
    n = len(heads)
    off_diagonal = divergence.sum((1, 2)) - divergence.diagonal(dim1=1, dim2=2).sum(-1)
    pairs = n * (n - 1) or math.nan
    return HeadDiversity(divergence=divergence, mean=off_diagonal / pairs)
