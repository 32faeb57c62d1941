"""The gradient path: what the product of the blocks' Jacobians does to a gradient on its way back."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.geometry.jacobians import reading
from analysis.results import Result, result
from circuits.arguments import require_model, seeded
from circuits.model import HookedGPT
from circuits.tokens import check_tokens


@result
class GradientPath(Result):
    """How large the Jacobian of the last stream at a position by every earlier stream is (remark 3.3).

    ``∂X⁽ᴸ⁾_t / ∂X⁽ˡ⁾`` is the product of the Jacobians of the blocks l … L−1; 1 means that a gradient neither grows nor
    shrinks.

    Attributes:
        gain: ``‖∂X⁽ᴸ⁾_t / ∂X⁽ˡ⁾_t‖_F / √d``, along the position itself; depth l counts the blocks before the stream, so
            the last entry, the identity, is 1.
        gain_all: The same over all positions s ≤ t of the earlier stream.
        largest: Largest singular value of ``∂X⁽ᴸ⁾_t / ∂X⁽ˡ⁾_t``; None where directions were sampled.
        smallest: Smallest singular value, likewise.
        position: t.
        probes: Random orthonormal directions that the norms were estimated from; None: exact, over a whole basis.
    """

    table = ("gain", "gain_all", "largest", "smallest")
    gain: Float[Tensor, " depth"]
    gain_all: Float[Tensor, " depth"]
    largest: Float[Tensor, " depth"] | None
    smallest: Float[Tensor, " depth"] | None
    position: int
    probes: int | None


def gradient_path(
    model: HookedGPT, tokens: Int[Tensor, "1 pos"], position: int = -1, probes: int | None = None, seed: int = 0
) -> GradientPath:
    """Send gradients from the last stream at one position back through all blocks.

    Args:
        model: A model.
        tokens: One sequence.
        position: Where the gradients start; negative from the end.
        probes: Estimate from this many random directions (unbiased for the squared norms) instead of all d_model.
        seed: Of the directions.

    Raises:
        ValueError: `probes` not between 1 and d_model, or more than one sequence.
        IndexError: A position that there is not.
    """
    require_model(model)
    tokens = check_tokens(tokens, model.config)
    if len(tokens) != 1:
        raise ValueError(f"a gradient path is that of one sequence [1 pos], not of {len(tokens)}")
    size, d_model = tokens.shape[1], model.config.d_model
    if not -size <= position < size:
        raise IndexError(f"position {position} is not among the {size} there are (0 to {size - 1})")
    if probes is not None and not 1 <= probes <= d_model:
        raise ValueError(f"probes must lie between 1 and d_model = {d_model}, not {probes}")
    at = position % size
    directions = _directions(model, probes, seed)
    gradients = _gradients(model, tokens[:, : at + 1], at, directions)
    scale = math.sqrt(len(directions))
    own = torch.stack([gradient[:, at] for gradient in gradients])
    singular_values = torch.linalg.svdvals(own) if probes is None else None
    return GradientPath(
        gain=own.flatten(1).norm(dim=-1) / scale,
        gain_all=torch.stack([gradient.norm() for gradient in gradients]) / scale,
        largest=None if singular_values is None else singular_values[:, 0],
        smallest=None if singular_values is None else singular_values[:, -1],
        position=at,
        probes=probes,
    )


def _directions(model: HookedGPT, probes: int | None, seed: int) -> Float[Tensor, "direction d_model"]:
    d_model = model.config.d_model
    if probes is None:
        return torch.eye(d_model, dtype=model.dtype, device=model.device)
    noise = torch.randn(d_model, probes, generator=seeded(seed), dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(noise).Q.T
    return basis.to(model.device, model.dtype)


def _gradients(
    model: HookedGPT, tokens: Tensor, at: int, directions: Tensor
) -> list[Float[Tensor, "direction pos d_model"]]:
    """Of every direction of the last stream at a position, by the stream before each block and after the last."""
    run = model.start(tokens)
    with torch.enable_grad():
        x = model.embedding(tokens, run).detach()
        streams = [x.expand(len(directions), -1, -1).clone().requires_grad_()]
        for block in list(model.blocks)[:-1]:
            streams.append(block(streams[-1], run))
        last = model.blocks[model.config.n_layers - 1](streams[-1], reading(run, at))
        gradients = torch.autograd.grad((last[:, 0] * directions).sum(), streams)
    final = torch.zeros_like(gradients[0])
    final[:, at] = directions
    return [*gradients, final]
