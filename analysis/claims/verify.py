"""Checking the claims, in the lecture's order."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.claims import (
    attention,
    cost,
    counts,
    exercises,
    factors,
    heads,
    initialisation,
    jacobians,
    layernorm,
    mlp,
    notation,
    residual,
    specification,
)
from analysis.claims.claim import Claim
from analysis.claims.subject import size_of, subject_of
from analysis.claims.verdict import Verdict, Verification, verification
from circuits.arguments import require_model
from circuits.model import HookedGPT

_SECTIONS = (
    notation,
    attention,
    heads,
    mlp,
    residual,
    jacobians,
    layernorm,
    specification,
    counts,
    initialisation,
    cost,
    exercises,
    factors,
)


def _place(found: Claim) -> tuple[bool, int, int]:
    """Where a claim stands in the lecture: the numbers of its section and statement, exercises last."""
    match = re.match(r"(ex)?(\d+)(?:\.(\d+))?", found.identifier)
    assert match is not None
    return match[1] is not None, int(match[2]), int(match[3] or 0)


# Identifier -> claim, in the lecture's order.
CLAIMS: dict[str, Claim] = {
    found.identifier: found
    for found in sorted(
        (c for section in _SECTIONS for c in vars(section).values() if isinstance(c, Claim)), key=_place
    )
}


def find(identifier: str) -> Claim:
    """A claim by its identifier.

    Raises:
        KeyError: There is none; the message lists the nearest.
    """
    if identifier not in CLAIMS:
        near = difflib.get_close_matches(identifier, CLAIMS, n=3, cutoff=0.4)
        hint = f"; the nearest are {', '.join(near)}" if near else f"; they are {', '.join(CLAIMS)}"
        raise KeyError(f"no claim is called {identifier!r}{hint}")
    return CLAIMS[identifier]


@torch.no_grad()
def verify(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"] | None = None,
    *,
    claims: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda step: None,
) -> Verification:
    """Check the lecture's claims on a model.

    Small models are checked in float64, every layer and head; above 20 million parameters in the model's own precision
    (at least float32), on 16 tokens and on some of the layers and heads. The model is left alone.

    Args:
        model: A model.
        tokens: Prompts; by default one that suits the model, and as many random tokens.
        claims: Identifiers of the claims to check; by default all of `CLAIMS`.
        seed: Of everything that is drawn.
        progress: Called with the identifier of each claim before it is checked.

    Raises:
        KeyError: A claim that there is not, with the nearest.
        ValueError: A model within `with model.hooks(...)`.
    """
    require_model(model)
    chosen = list(CLAIMS.values()) if claims is None else [find(identifier) for identifier in claims]
    subject = subject_of(model, tokens, seed)
    verdicts = []
    for one in chosen:
        progress(one.identifier)
        verdicts.append(Verdict(one, one(subject)))
    config = model.config
    words = (
        f"{config.n_layers} layers × {config.n_heads} heads, d_model {config.d_model}, {size_of(model):,} parameters"
    )
    return verification(tuple(verdicts), words)
