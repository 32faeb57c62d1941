"""Parameters in closed form."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.config import GPTConfig

_NORM_NAMES = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", None: "norm"}


@runtime_checkable
class HasConfig(Protocol):
    """A model, as far as counting needs one."""

    @property
    def config(self) -> GPTConfig:
        """What the model is made of."""


def config_of(subject: GPTConfig | HasConfig) -> GPTConfig:
    """The configuration itself, or that of a model.

    Raises:
        TypeError: Neither.
    """
    config = subject if isinstance(subject, GPTConfig) else getattr(subject, "config", None)
    if not isinstance(config, GPTConfig):
        raise TypeError(f"expected a model or a GPTConfig, not {subject!r:.80}")
    return config


@result
class ParameterTable(Result):
    """Parameters by component, with their shares of the total.

    Attributes:
        parts: What each row counts.
        parameters: Trainable scalars of each part.
        share: ``parameters / total``, between 0 and 1.
        total: All of them; equal to the sum of ``numel()`` over the model's parameters.
        total_if_tied: What the total is, or would be, with ``W_U = W_E.T`` counted once (lecture, aside 5.3).
    """

    parts: tuple[str, ...]
    parameters: Int[Tensor, " part"]
    share: Float[Tensor, " part"]
    total: int
    total_if_tied: int

    def title(self) -> str:
        """The total, with and without tied embeddings."""
        if self.total == self.total_if_tied:
            return f"{self.total:,} parameters, embeddings tied"
        return f"{self.total:,} parameters ({self.total_if_tied:,} with tied embeddings)"


def parameter_table(subject: GPTConfig | HasConfig, detail: bool = False) -> ParameterTable:
    """Count the parameters in closed form (lecture, theorem 5.2, for every configuration).

    With the lecture's conventions the total is ``2 V d + T_max d + L (12 d² + 10 d) + 2 d``. Query, key and value maps
    have ``d (H + 2 H_kv) d_head`` weights, the output map ``H d_head d``; an MLP has ``2 d d_mlp``, or ``3 d d_mlp``
    where it is gated; a LayerNorm has 2 d, an RMSNorm d; gains on queries and keys, where a model has them, 2 d_head in
    each layer, stand with the attention.

    Args:
        subject: A configuration or a model.
        detail: One row for each kind of weight (``W_E``, ``b_in``, …) instead of the lecture's five rows.
    """
    config = config_of(subject)
    counts: dict[str, int] = {}
    for group, weights in parameter_counts(config).items():
        for weight, count in weights.items():
            row = weight if detail else group
            counts[row] = counts.get(row, 0) + count
    total = sum(counts.values())
    parameters = torch.tensor(list(counts.values()), dtype=torch.int64)
    return ParameterTable(
        parts=tuple(counts),
        parameters=parameters,
        share=parameters.double() / total,
        total=total,
        total_if_tied=total if config.tie_embeddings else total - config.d_model * config.d_vocab,
    )


def parameter_count(subject: GPTConfig | HasConfig) -> int:
    """The number of trainable scalars; ``config.replace(tie_embeddings=True)`` counts the tied model."""
    return sum(sum(weights.values()) for weights in parameter_counts(config_of(subject)).values())


def parameter_counts(config: GPTConfig) -> dict[str, dict[str, int]]:
    """Row of the lecture's table -> weight -> number of scalars, all layers together."""
    L, d, V = config.n_layers, config.d_model, config.d_vocab
    norm = _NORM_NAMES[config.norm]
    return {
        "token and positional embeddings": {
            "W_E": V * d,
            "W_pos": config.n_ctx * d if config.positions == "learned" else 0,
        },
        "attention in all blocks": {name: L * count for name, count in attention_parameters(config).items()},
        "MLPs in all blocks": {name: L * count for name, count in mlp_parameters(config).items()},
        f"block {norm}s": {f"block {norm}s": L * _norms_per_block(config) * norm_parameters(config)},
        f"final {norm} and unembedding": {
            f"final {norm}": norm_parameters(config) if config.final_norm else 0,
            "W_U": 0 if config.tie_embeddings else d * V,
            "b_U": V if config.bias_unembed else 0,
        },
    }


def attention_parameters(config: GPTConfig) -> dict[str, int]:
    """One layer's attention."""
    d, query, key = config.d_model, config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    bias = int(config.bias_qkv)
    return {
        "W_Q": d * query,
        "W_K": d * key,
        "W_V": d * key,
        "W_O": query * d,
        "b_Q": bias * query,
        "b_K": bias * key,
        "b_V": bias * key,
        "b_O": d if config.bias_out else 0,
        "query and key gains": 2 * config.d_head if config.qk_norm else 0,
    }


def mlp_parameters(config: GPTConfig) -> dict[str, int]:
    """One layer's MLP; zeros without one, since d_mlp is then 0."""
    d, d_mlp, bias = config.d_model, config.d_mlp, int(config.bias_mlp and config.has_mlp)
    return {
        "W_in": d * d_mlp,
        "W_gate": d * d_mlp if config.gated_mlp else 0,
        "W_out": d_mlp * d,
        "b_in": bias * d_mlp,
        "b_out": bias * d,
    }


def _norms_per_block(config: GPTConfig) -> int:
    if config.norm is None:
        return 0
    branches = 2 if config.has_mlp else 1
    read = 1 if config.parallel_blocks == "shared_norm" else branches
    return read + (branches if config.branch_norm else 0)


def norm_parameters(config: GPTConfig) -> int:
    """One norm over the stream: gain and shift, the gain alone, or nothing."""
    return {"layernorm": 2 * config.d_model, "rmsnorm": config.d_model, None: 0}[config.norm]
