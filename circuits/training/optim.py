"""The optimizer: AdamW without decay on norms and biases, and one update with it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor, nn

from circuits.training.settings import TrainingConfig


def make_optimizer(model: nn.Module, settings: TrainingConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019); matrices and embeddings decay, norms' gains and all biases do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Int[Tensor, "batch pos"],
    targets: Int[Tensor, "batch pos"],
    settings: TrainingConfig,
    step: int,
) -> float:
    """One update of the weights, in place; returns the loss before it, in nats.

    Raises:
        ValueError: The loss or the gradient is not finite; the weights are then left as they were.
    """
    for group in optimizer.param_groups:
        group["lr"] = settings.lr_at(step)
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    value = loss.item()
    if not (math.isfinite(value) and math.isfinite(norm.item())):
        raise ValueError(
            f"at step {step} the loss is {value} and the gradient's norm {norm.item()}: the run diverged; "
            f"try a learning rate below {settings.lr:g} or a longer warm-up than {settings.warmup} steps"
        )
    optimizer.step()
    return float(value)
