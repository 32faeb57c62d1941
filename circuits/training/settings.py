"""How a model is trained: one frozen, validated value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# A count that may be left open: its rule fills it in, so whoever reads it finds a number.
_BY_RULE: Any = None
if TYPE_CHECKING:
    _Count = int
else:
    _Count = int | None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything besides the data and the architecture that the trained weights depend on.

    Attributes:
        steps: Number of updates.
        batch_size: Sequences per update.
        lr: Highest learning rate, reached after the warm-up.
        final_lr: Where the cosine ends, as a fraction of `lr`.
        warmup: Updates over which the learning rate rises linearly; at most `steps`. By default a tenth of them, or 100
            where that is less.
        weight_decay: Decoupled decay of matrices and embeddings; norms and biases have none.
        beta1: Decay of AdamW's first moment.
        beta2: Decay of AdamW's second moment.
        init_scale: Factor on the initial matrices and embeddings. Above 1 for models without norms, whose first
            gradients, products of all the matrices on a path, are otherwise too small to learn from.
        clip: Largest norm of the whole gradient; longer ones are scaled down to it.
        eval_every: Updates between two entries of the loss history (and two saves of the training state). By default a
            quarter of `steps`, or 250 where that is less.
        seed: Seed of the initial weights and, with the number of the update, of every batch.

    Raises:
        TypeError: A setting of the wrong type.
        ValueError: A value out of range; the message names the setting.
    """

    steps: int = 2500
    batch_size: int = 32
    lr: float = 2e-3
    final_lr: float = 0.1
    warmup: _Count = _BY_RULE
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    init_scale: float = 1.0
    clip: float = 1.0
    eval_every: _Count = _BY_RULE
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("warmup", 0), ("eval_every", 1), ("seed", 0)):
            if getattr(self, name) is None and name in _RULES:
                object.__setattr__(self, name, _RULES[name](self.steps))
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.warmup > self.steps:
            raise ValueError(f"warmup {self.warmup} is longer than the run of {self.steps} steps")
        for name, low, high in (
            ("lr", 0.0, math.inf),
            ("final_lr", 0.0, 1.0),
            ("weight_decay", 0.0, math.inf),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("init_scale", 0.0, math.inf),
            ("clip", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not (math.isfinite(value) and low <= value <= high):
                raise ValueError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")
        for name in ("lr", "init_scale", "clip"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be positive, not 0")
        for name in ("beta1", "beta2"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} must be below 1, not 1")

    def lr_at(self, step: int) -> float:
        """Learning rate of update `step` (from 0): linear warm-up, then half a cosine down to ``final_lr * lr``."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress)))

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON data."""
        return dataclasses.asdict(self)


# What a setting that was left open becomes, from the number of steps.
_RULES: dict[str, Callable[[int], int]] = {
    "warmup": lambda steps: min(100, steps // 10),
    "eval_every": lambda steps: max(1, min(250, steps // 4)),
}
