"""The rank of the score matrix of a run."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.ranks.spectra import ranks_of
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.attention import per_query_head
from circuits.cache import ActivationCache
from circuits.config import GPTConfig
from circuits.factored import FactoredMatrix
from circuits.finite import check_result
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.tokens import check_mask, check_tokens


@result
class ScoreRanks(Result):
    """Spectra and ranks of ``S = scale · q kᵀ`` of every head on a batch of prompts.

    Attributes:
        singular_values: Descending, min(d_head, pos) of them.
        numerical_rank: How many singular values are above rounding.
        stable_rank: ``Σ s² / s_1²``.
        effective_rank: ``exp(H(s / Σ s))``.
        participation_ratio: ``(Σ s²)² / Σ s⁴``.
        energy_rank: How many hold 90% of ``Σ s²``.
        bound: What no rank can exceed, ``min(d_head, pos)``.
        tokens: The prompts.
    """

    table = ("numerical_rank", "stable_rank", "effective_rank", "participation_ratio", "energy_rank")
    singular_values: Float[Tensor, "batch layer head k"]
    numerical_rank: Int[Tensor, "batch layer head"]
    stable_rank: Float[Tensor, "batch layer head"]
    effective_rank: Float[Tensor, "batch layer head"]
    participation_ratio: Float[Tensor, "batch layer head"]
    energy_rank: Int[Tensor, "batch layer head"]
    bound: int
    tokens: Int[Tensor, "batch pos"]

    def title(self) -> str:
        """What was measured, and the bound."""
        return f"Ranks of the score matrices S of {len(self.tokens)} prompts; none can exceed {self.bound}"


@torch.no_grad()
def score_ranks(model: HookedGPT, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None) -> ScoreRanks:
    """Singular values of the unmasked, scaled ``S = q kᵀ · attn_scale``, and five ranks made of them.

    Queries and keys as the scores are made from them: with biases, query and key norms and rotation; before any soft
    cap and before the mask, both of which can raise a rank above d_head. The factors are never multiplied out. Rows
    and columns of padding are 0 and add nothing.

    Args:
        model: A model.
        tokens: Prompts.
        attention_mask: 1 for tokens, 0 for padding.

    Raises:
        TypeError, ValueError, IndexError: Tokens or a mask that cannot mean anything; activations that are not finite.
    """
    require_model(model)
    tokens = check_tokens(tokens, model.config)
    mask = check_mask(attention_mask, tokens)
    config, pos = model.config, tokens.shape[1]
    layers = range(config.n_layers)
    wanted = [name for layer in layers for name in _names(config, layer)]
    _, cache = model.run_with_cache(tokens, wanted, attention_mask)
    s = torch.stack([_matrices(model, cache, layer, mask).singular_values() for layer in layers], dim=1)
    bound = min(config.d_head, pos)
    return ScoreRanks(singular_values=s, **ranks_of(s, pos, pos), bound=bound, tokens=tokens)


def _names(config: GPTConfig, layer: int) -> tuple[str, str]:
    """The last names that queries and keys have before they become scores."""
    n = block_names(layer)
    if config.positions == "rotary":
        return n.rot_q, n.rot_k
    return (n.q_norm_normalized, n.k_norm_normalized) if config.qk_norm else (n.q, n.k)


def _matrices(
    model: HookedGPT, cache: ActivationCache, layer: int, mask: Bool[Tensor, "batch pos"] | None
) -> FactoredMatrix:
    """``S`` of every prompt and head of a layer, ``[batch head pos pos]`` as factors."""
    config, attn = model.config, model.blocks[layer].attn
    q, k = (cache[name] for name in _names(config, layer))
    if config.positions != "rotary" and attn.q_norm is not None and attn.k_norm is not None:
        q, k = attn.q_norm.affine(q), attn.k_norm.affine(k)
    if mask is not None:
        q, k = (x.masked_fill(~mask[..., None, None], 0.0) for x in (q, k))
    k = per_query_head(k, config.group_size)
    check_result(f"queries or keys of layer {layer}", model, q, k)
    return FactoredMatrix(config.attn_scale * q.transpose(1, 2), k.permute(0, 2, 3, 1))
