"""Exercises 3 and 6 of the lecture: the freedom in the factors, and what bounds ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from analysis.claims.claim import Finding, applies, claim, within
from analysis.claims.subject import Subject, largest
from analysis.ranks import numerical_rank
from circuits.arguments import seeded
from circuits.attention import per_query_head
from circuits.gauge import fibre_dimension
from circuits.model import HookedGPT
from circuits.names import block_names

_SMALL_HEAD = 12


@claim(
    "ex3.fibre",
    "Exercise 3",
    "For a generic W_QK the factor pairs that represent it form a set of dimension d_head².",
    "largest distance of the measured dimension from d_head²",
)
def fibre(on: Subject) -> Finding:
    """The pairs (A, B) with ``A Bᵀ = M`` of rank r = d_head are ``(A₀ R, B₀ R⁻ᵀ)``, R ∈ GL(r): an orbit of dimension
    r².

    The differential ``(dA, dB) ↦ dA Bᵀ + A dBᵀ`` has kernel ``{(A X, −B Xᵀ)}``: with factors of ranks a and b its
    dimension is ``2 r d − d (a + b) + a b``, r² for a = b = r. The ranks are measured; for small heads the differential
    itself is formed in coordinates adapted to the factors, and its kernel counted.
    """
    config = on.model.config
    r, d = config.d_head, config.d_model
    applies(config.positions != "rotary", "under rotary positions R must commute with the rotations: a smaller set")
    applies(not config.qk_norm, "queries and keys are normalised, which sees R")
    applies(config.group_size == 1, "query heads that share keys share R")
    applies(r <= d, f"d_head = {r} is above d_model = {d}: no factors of rank d_head")
    found = {(layer, head): fibre_dimension(on.model, layer, head, "QK") for layer, head in on.heads}
    generic = [place for place, one in found.items() if one.of == "fibre"]
    applies(generic, "no W_QK has rank d_head: none is generic")
    off_by = max(abs(found[place].dimension - r**2) for place in generic)
    notes = [f"d_head² = {r**2}, {len(generic)} of {len(found)} heads generic"]
    if r <= _SMALL_HEAD:
        kernel = max(abs(_kernel_dimension(on, *place) - r**2) for place in generic)
        off_by = max(off_by, kernel)
        notes.append("kernel of the differential counted")
    return within(float(off_by), 0.0, ", ".join(notes))


def _kernel_dimension(on: Subject, layer: int, head: int) -> int:
    """Of ``(dA, dB) ↦ dA Bᵀ + A dBᵀ``, by its rank, with A and B reduced to their r × r triangular factors.

    What dA and dB have outside the columns of A and B is mapped injectively, so the kernel lies within them.
    """
    attn = on.model.blocks[layer].attn
    A, B = (torch.linalg.qr(W[head].double().cpu()).R for W in (attn.W_Q, attn.W_K))
    r = len(A)
    eye = torch.eye(r, dtype=A.dtype)
    differential = torch.cat([torch.kron(eye, B.T), torch.kron(A.T, eye)])
    return 2 * r * r - int(torch.linalg.matrix_rank(differential))


@claim(
    "ex6.scores",
    "Exercise 6",
    "The rank of the score matrix S^h is at most d_head.",
    "singular value d_head + 1 of S, over the largest",
)
def rank_of_scores(on: Subject) -> Finding:
    """``S^h = q kᵀ / √d_head`` with q and k of d_head columns, so ``rank(S^h) ≤ d_head`` however long the sequence:
    before the mask, the softmax and any cap, each of which raises the rank.
    """
    config = on.model.config
    length = min(config.n_ctx, 2 * config.d_head, 256)
    applies(length > config.d_head, f"n_ctx = {config.n_ctx} is not above d_head: every T × T matrix obeys the bound")
    generator = seeded(on.seed)
    tokens = torch.randint(config.d_vocab, (1, length), generator=generator).to(on.model.device)
    worst = 0.0
    seen = _queries_and_keys(on.model, tokens, sorted({layer for layer, _ in on.heads}))
    for layer, head in on.heads:
        q, k = seen[layer]
        s = torch.linalg.svdvals(config.attn_scale * q[0, :, head] @ k[0, :, head].T)
        worst = largest(worst, float(s[config.d_head] / s[0]) if s[0] > 0 else 0.0)
    return within(worst, on.tolerance, f"T = {length}, d_head = {config.d_head}")


def _queries_and_keys(model: HookedGPT, tokens: Tensor, layers: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Of each layer, as the scores see them: normalised and turned where the architecture does so."""
    config = model.config
    rotary = config.positions == "rotary"
    names = {layer: (n.rot_q, n.rot_k) if rotary else (n.q, n.k) for layer in layers for n in [block_names(layer)]}
    _, cache = model.run_with_cache(tokens, names_filter=[name for pair in names.values() for name in pair])
    seen = {}
    for layer, (query, key) in names.items():
        attn, q, k = model.blocks[layer].attn, cache[query], cache[key]
        if attn.q_norm is not None and attn.k_norm is not None and not rotary:
            q, k = attn.q_norm(q), attn.k_norm(k)
        seen[layer] = q, per_query_head(k, config.group_size)
    return seen


@claim(
    "ex6.heads",
    "Exercise 6",
    "Several heads alter the constraint, but do not remove it: rank(Σ_h W_OV^h) ≤ min(d, H d_head).",
    "largest numerical rank of a layer's Σ_h W_OV^h",
)
def several_heads(on: Subject) -> Finding:
    """``Σ_h W_V^h W_O^h = [W_V¹ ⋯ W_Vᴴ] W_O`` can have any rank up to ``min(d, H d_head)``: a layer as a whole is not
    confined to d_head directions, though each head is, and each with one pattern.
    """
    config = on.model.config
    ranks = []
    for layer in on.layers:
        total = sum((on.model.OV[layer, h].A @ on.model.OV[layer, h].B for h in range(config.n_heads)), torch.zeros(()))
        s = torch.linalg.svdvals(total.to(on.model.dtype))
        ranks.append(int(numerical_rank(s, config.d_model, config.d_model)))
    bound = min(config.d_model, config.n_heads * config.d_head)
    return within(float(max(ranks)), float(bound), f"one head has at most {min(config.d_head, config.d_model)}")
