"""Section 0 of the lecture: architectural notation."""

from __future__ import annotations

import torch

from analysis.claims.claim import Finding, applies, claim, equal, within
from analysis.claims.subject import Subject

_LONGEST = 2**20


@claim(
    "0.width",
    "Section 0",
    "H divides d, and each head has width d_head = d/H.",
    "H · d_head − d, from the shapes of the head's weights",
)
def width(on: Subject) -> Finding:
    """With H heads and residual width d, ``d_head = d / H``, a whole number.

    Then the H blocks that a layer concatenates have total width d, and ``W_O`` is square. Models that choose d_head
    freely have ``W_O`` of shape ``(H d_head) × d``; nothing else in the lecture depends on it.
    """
    config = on.model.config
    applies(
        config.n_heads * config.d_head == config.d_model,
        f"d_head = {config.d_head} was chosen freely: {config.n_heads} heads of it are not d_model = {config.d_model}",
    )
    heads, d_model, d_head = on.model.blocks[0].attn.W_Q.shape
    return equal(heads * d_head, d_model)


@claim("0.length", "Section 0", "A sequence is at most T_max tokens long.", "whether T_max + 1 tokens are refused")
def length(on: Subject) -> Finding:
    """``T ≤ T_max``: ``P ∈ R^{T_max × d}`` has no row for a later position, and a longer sequence means nothing.

    The model must refuse it rather than read a wrong row.
    """
    n_ctx = on.model.config.n_ctx
    applies(n_ctx < _LONGEST, f"n_ctx = {n_ctx:,} is too long to try")
    try:
        on.model(torch.zeros(1, n_ctx + 1, dtype=torch.long, device=on.model.device))
    except ValueError:
        return within(0.0, 0.0, f"{n_ctx + 1:,} tokens are refused")
    return within(1.0, 0.0, f"{n_ctx + 1:,} tokens were taken")
