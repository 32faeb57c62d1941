"""What a model predicts along one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result

if TYPE_CHECKING:
    from circuits.model import HookedGPT


@result
class Predictions(Result):
    """At each position, how well the next token was predicted and which tokens were thought likeliest.

    Attributes:
        token: The token at the position.
        next_token: The token that follows; −1 at the last position.
        loss: ``−log p(next token)`` in nats; NaN at the last position.
        guess: The likeliest next tokens, best first.
        guess_probability: Their probabilities.
    """

    token: Int[Tensor, " pos"]
    next_token: Int[Tensor, " pos"]
    loss: Float[Tensor, " pos"]
    guess: Int[Tensor, "pos rank"]
    guess_probability: Float[Tensor, "pos rank"]

    @property
    def mean_loss(self) -> float:
        """Mean loss in nats over the positions that have a next token; NaN where none has."""
        return float(self.loss[:-1].mean())


def predictions(model: HookedGPT, tokens: Int[Tensor, "1 pos"], top: int = 5) -> Predictions:
    """Run one prompt and read off losses and the `top` likeliest next tokens at every position."""
    with torch.no_grad():
        log_probs = model(tokens)[0].float().log_softmax(dim=-1).cpu()
    ids = tokens[0].cpu()
    loss = torch.full((len(ids),), float("nan"))
    loss[:-1] = -log_probs[:-1].gather(1, ids[1:, None])[:, 0]
    best = log_probs.topk(min(top, log_probs.shape[-1]), dim=-1)
    return Predictions(
        token=ids,
        next_token=torch.cat([ids[1:], ids.new_tensor([-1])]),
        loss=loss,
        guess=best.indices,
        guess_probability=best.values.exp(),
    )
