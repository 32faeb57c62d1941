"""Floating-point operations in closed form, and the 6·N·D rule beside them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.accounting.parameters import (
    HasConfig,
    attention_parameters,
    config_of,
    mlp_parameters,
    parameter_counts,
)
from analysis.results import Result, result
from circuits.config import GPTConfig


@result
class FlopCount(Result):
    """Floating-point operations by component, a multiply-add counted as two.

    Attributes:
        parts: What each row counts.
        flops: Operations of each part, for the whole batch.
        share: ``flops / total``.
        total: All of them.
        batch: Sequences.
        tokens: Length of each sequence T.
        training: Whether the backward pass is counted too (three times the forward).
        rule_without_unembedding: ``6 N D`` (``2 N D`` for a forward pass), D = batch × tokens and N all parameters but
            the embeddings and the unembedding.
        rule_with_unembedding: The same with `W_U` and `b_U` in N.
        crossover: The length T from which attention's T² work exceeds everything else (`crossover_length`).
    """

    parts: tuple[str, ...]
    flops: Int[Tensor, " part"]
    share: Float[Tensor, " part"]
    total: int
    batch: int
    tokens: int
    training: bool
    rule_without_unembedding: int
    rule_with_unembedding: int
    crossover: float

    def title(self) -> str:
        """The total beside both readings of the 6·N·D rule."""
        what, factor = ("training step", 6) if self.training else ("forward pass", 2)
        rules = [
            f"{factor}·N·D is {rule / self.total:.1%} of it with N {which} the unembedding"
            for rule, which in ((self.rule_without_unembedding, "without"), (self.rule_with_unembedding, "with"))
        ]
        size = f"{self.batch} × {self.tokens} tokens"
        passes = f"attention's T² work passes the rest at T = {self.crossover:,.0f}"
        return f"{self.total:,} operations for one {what} on {size}; {'; '.join(rules)}; {passes}"


def flops(
    subject: GPTConfig | HasConfig, tokens: int | None = None, batch: int = 1, training: bool = False
) -> FlopCount:
    """Count the operations of the matrix products of one pass (lecture, section 6).

    Per layer and sequence: projections ``2 T d (2 H + 2 H_kv) d_head``, scores and aggregation ``4 T² H d_head`` (the
    full square: what a causal mask or a window hides is counted), MLP ``4 T d d_mlp`` or ``6 T d d_mlp`` gated; once
    ``2 T d V`` for the unembedding. Norms, activations and softmax are left out, as in PyTorch's counter. Each product
    ``y = x W`` costs its forward work twice more in the backward pass, for ``∂x`` and for ``∂W``; hence training is
    three times the forward.

    Args:
        subject: A configuration or a model.
        tokens: Length of each sequence; by default n_ctx. Longer than n_ctx is allowed, since this only counts.
        batch: Sequences.
        training: Count the backward pass too.

    Raises:
        ValueError: `tokens` or `batch` below 1.
    """
    config = config_of(subject)
    length = config.n_ctx if tokens is None else tokens
    for name, value in (("tokens", length), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    factor = 3 if training else 1
    per_token = _flops_per_token(config)
    square = 4 * config.n_layers * config.n_heads * config.d_head
    counts = {
        "query, key, value and output projections": per_token["projections"] * length,
        "attention scores and value aggregation": square * length**2,
        "MLPs": per_token["mlp"] * length,
        "unembedding": per_token["unembedding"] * length,
    }
    work = torch.tensor(list(counts.values()), dtype=torch.int64) * factor * batch
    total = int(work.sum())
    without, with_unembedding = non_embedding_parameters(config)
    seen = 2 * factor * batch * length
    return FlopCount(
        parts=tuple(counts),
        flops=work,
        share=work.double() / total,
        total=total,
        batch=batch,
        tokens=length,
        training=training,
        rule_without_unembedding=seen * without,
        rule_with_unembedding=seen * with_unembedding,
        crossover=crossover_length(config),
    )


def non_embedding_parameters(subject: GPTConfig | HasConfig) -> tuple[int, int]:
    """The two readings of N in the 6·N·D rule: without and with the unembedding (counted even where it is tied)."""
    config = config_of(subject)
    weights = {name: count for group in parameter_counts(config).values() for name, count in group.items()}
    unembedding = config.d_model * config.d_vocab + weights["b_U"]
    without = sum(count for name, count in weights.items() if name not in ("W_E", "W_pos", "W_U", "b_U"))
    return without, without + unembedding


def crossover_length(subject: GPTConfig | HasConfig) -> float:
    """The length T at which scores and aggregation, ``4 L T² H d_head``, equal all other work.

    With the lecture's conventions and a negligible unembedding this is ``6 d``: below it the 6·N·D rule is about right,
    far above it the rule misses most of the work (lecture, exercise 8).
    """
    config = config_of(subject)
    return sum(_flops_per_token(config).values()) / (4 * config.n_layers * config.n_heads * config.d_head)


def _flops_per_token(config: GPTConfig) -> dict[str, int]:
    """Forward work that grows linearly with the number of tokens."""
    attention, mlp = attention_parameters(config), mlp_parameters(config)
    return {
        "projections": 2 * config.n_layers * sum(attention[name] for name in ("W_Q", "W_K", "W_V", "W_O")),
        "mlp": 2 * config.n_layers * sum(mlp[name] for name in ("W_in", "W_gate", "W_out")),
        "unembedding": 2 * config.d_model * config.d_vocab,
    }
