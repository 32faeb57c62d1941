"""A block as one forward Euler step of ``Ẋ = F(X)``, and what smaller steps would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.model import HookedGPT
from circuits.names import block_names

STEPS = (1, 2, 4, 8, 16)


@result
class EulerSteps(Result):
    """The distance of n Euler steps of size 1/n from the flow of ``Ẋ = F(X)`` at time 1, block by block (remark 3.2).

    Attributes:
        error: ``‖X_n − X(1)‖ / ‖X(1) − X(0)‖`` over all tokens; at n = 1 X_n is what the block itself puts out.
        order: ``log₂`` of the ratio of the last two errors over that of their steps: 1 for Euler's method.
        steps: The numbers n of steps.
        reference_steps: Steps of the fourth-order Runge–Kutta method that X(1) was found with.
    """

    table = ("error",)
    error: Float[Tensor, "layer step"]
    order: Float[Tensor, " layer"]
    steps: tuple[int, ...]
    reference_steps: int


@torch.no_grad()
def euler_steps(model: HookedGPT, tokens: Int[Tensor, "batch pos"], steps: Sequence[int] = STEPS) -> EulerSteps:
    """Follow ``X ← X + h F(X)`` with ``F = block − identity`` and h = 1/n, from the stream that each block reads.

    Args:
        model: A model.
        tokens: Prompts.
        steps: Numbers of steps, ascending; each at least 1.

    Raises:
        ValueError: Fewer than two numbers of steps, or not ascending from 1.
    """
    require_model(model)
    if len(steps) < 2 or steps[0] < 1 or list(steps) != sorted(set(steps)):
        raise ValueError(f"steps must be at least two ascending whole numbers from 1 on, not {list(steps)}")
    names = [block_names(layer).resid_pre for layer in range(model.config.n_layers)]
    _, cache = model.run_with_cache(tokens, names_filter=names)
    run = model.start(tokens)
    errors = []
    for layer, block in enumerate(model.blocks):

        def field(x: Tensor, block: Callable[..., Tensor] = block) -> Tensor:
            return block(x, run) - x

        start = cache[names[layer]]
        flow = _runge_kutta(field, start, 2 * steps[-1])
        length = (flow - start).norm()
        errors.append(torch.stack([(_euler(field, start, n) - flow).norm() / length for n in steps]))
    error = torch.stack(errors)
    order = (error[:, -2] / error[:, -1]).log2() / math.log2(steps[-1] / steps[-2])
    return EulerSteps(error=error, order=order, steps=tuple(steps), reference_steps=2 * steps[-1])


def _euler(field: Callable[[Tensor], Tensor], x: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x + field(x) / n
    return x


def _runge_kutta(field: Callable[[Tensor], Tensor], x: Tensor, n: int) -> Tensor:
    h = 1 / n
    for _ in range(n):
        a = field(x)
        b = field(x + h / 2 * a)
        c = field(x + h / 2 * b)
        d = field(x + h * c)
        x = x + h / 6 * (a + 2 * b + 2 * c + d)
    return x
