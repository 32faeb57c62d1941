"""The last block where one position of each sequence is read: no keys or values are formed.

With one query, ``score_s = q (x_s W_K)ᵀ = (q W_Kᵀ) x_sᵀ`` and ``z = Σ_s A_s (x_s W_V) = (Σ_s A_s x_s) W_V``: the maps
are applied once for each query in place of once for each position. Where keys are turned or normalised behind their
map, it cannot be moved so.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.attention import Attention, attention_pattern
from circuits.block import TransformerBlock
from circuits.config import GPTConfig
from circuits.rerun.clean import Clean, SpreadOut
from circuits.rerun.layout import Layout
from circuits.run import Run

# Positions for each query from which on this is less work.
_WORTHWHILE = 3
_INSIDE = "q_input k_input v_input q k v scores pattern".split()


def applies(config: GPTConfig, block: TransformerBlock, before: Layout, after: Layout, run: Run) -> bool:
    """Whether this pass through the last block can go without keys and values."""
    movable = config.positions != "rotary" and not config.qk_norm
    single = all(part.shape[1] == 1 for part in after.parts)
    inside = [getattr(block.names, field) for field in _INSIDE]
    unseen = not run.tap.touches(*inside)
    return movable and single and unseen and before.cells >= _WORTHWHILE * after.cells


def heads(
    block: TransformerBlock, normed: Float[Tensor, "1 cell d_model"], run: Run, clean: Clean, spread: SpreadOut
) -> Float[Tensor, "1 query head d_head"]:
    """`z` at the cells that are read, from what the heads of the block read at all of them."""
    attn, stop = block.attn, spread.run.positions.shape[1]
    read = block.normalised(clean.captured[block.names.resid_pre][:, :stop])[spread.rows]
    read.flatten(0, 1)[spread.keys] = normed[0]
    q = attn.project_queries(run.wanted(normed))[0]
    return heads_of_one(attn, q, read, spread.run.visibility(attn.window).allowed[:, 0])[None]


def heads_of_one(
    attn: Attention,
    q: Float[Tensor, "sequence head d_head"],
    read: Float[Tensor, "sequence key d_model"],
    allowed: Bool[Tensor, "#sequence 1 key"],
) -> Float[Tensor, "sequence head d_head"]:
    """`z` of one query of each sequence, from the stream that its keys and values would be made from."""
    grouped = q.unflatten(1, (attn.n_kv_heads, attn.group_size))
    directions = torch.einsum("nkge,kde->nkgd", grouped, attn.W_K).flatten(1, 2)
    scores = directions @ read.mT
    if attn.b_K is not None:
        scores = scores + (grouped * attn.b_K[:, None]).sum(-1).flatten(1, 2)[..., None]
    scores = scores * attn.scale
    if attn.softcap is not None:
        scores = attn.softcap * torch.tanh(scores / attn.softcap)
    pattern = attention_pattern(scores.masked_fill(~allowed, float("-inf"))[:, :, None])[:, :, 0]
    mixed = (pattern @ read).unflatten(1, (attn.n_kv_heads, attn.group_size))
    z = torch.einsum("nkgd,kde->nkge", mixed, attn.W_V)
    if attn.b_V is not None:
        z = z + attn.b_V[:, None] * pattern.sum(-1).unflatten(1, (attn.n_kv_heads, attn.group_size))[..., None]
    return z.flatten(1, 2)
