"""How large a single path can be that has not been looked at.

A path that goes on below a direction ``D`` writes some ``x[p]`` to the stream there, and adds ``Σ_p D[p] · x[p]``, at
most ``Σ_p ‖D[p]‖ ‖x[p]‖``. The largest ``‖x[p]‖`` of any one path follows layer by layer: a leaf's own norm, or through
a head ``‖V O‖₂ / post[p] · Σ_s A[p, s] / scale[s] · (the largest at s)``. With root mean square gains in place of
spectral norms, the same recursion says how large to expect a path to be: the search goes by that, a proof by the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.paths.frozen import FrozenLayer, FrozenRun


@dataclass(frozen=True)
class Reach:
    """What the paths through heads below each layer can write.

    Attributes:
        most: Layer by layer, a bound on ``‖x[p]‖`` of any single path through a head below it, ``[batch pos]``.
        expected: The same for directions drawn at random, divided by ``√d_model``: the usual size of ``D · x / ‖D‖``.
        gram: ``VᵀV`` of each layer's heads: norms of directions without forming them.
    """

    most: tuple[Float[Tensor, "batch pos"], ...]
    expected: tuple[Float[Tensor, "batch pos"], ...]
    gram: tuple[Float[Tensor, "head d_head d_head"], ...]


def reach(run: FrozenRun) -> Reach:
    """The reach of every layer of a frozen run."""
    d_model = run.writes.shape[-1]
    sizes = run.writes.norm(dim=-1)
    grams = [torch.einsum("hde,hdf->hef", layer.read, layer.read) for layer in run.layers]
    spectral, mean_square = zip(*(_gains(layer) for layer in run.layers), strict=True)
    return Reach(
        most=_recursion(run, sizes, spectral),
        expected=_recursion(run, sizes / d_model**0.5, mean_square),
        gram=tuple(grams),
    )


SQUARINGS = 8


def _gains(layer: FrozenLayer) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """A bound on each head's ``‖V O‖₂``, and its root mean square gain ``‖V O‖_F / √d_model``; at d_head size.

    The eigenvalues of ``K = VᵀV OOᵀ`` are the squared singular values of ``V O``, so ``tr(Kⁿ)^(1/2n)`` is at least the
    largest of these and, for n = 256, at most ``d_head^(1/512)`` times it (0.8% at 64). Only products are needed.
    """
    read, write = layer.read, layer.write
    info = torch.finfo(read.dtype)
    K = read.mT @ read @ (write @ write.mT)
    trace = _trace(K).clamp(min=info.tiny)
    frobenius, log_scale = trace.sqrt(), trace.log()
    power = K / trace[:, None, None]  # trace 1: no power of it overflows
    for _ in range(SQUARINGS):
        power = power @ power
        trace = _trace(power).clamp(min=info.tiny)
        power, log_scale = power / trace[:, None, None], 2 * log_scale + trace.log()
    rounding = 1 + 4 * K.shape[-1] * info.eps
    largest = (log_scale / 2 ** (SQUARINGS + 1)).exp() * rounding
    return largest, frobenius / read.shape[1] ** 0.5


def _trace(x: Float[Tensor, "head n n"]) -> Float[Tensor, " head"]:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)


def _recursion(
    run: FrozenRun, sizes: Float[Tensor, "leaf batch pos"], gains: tuple[Tensor, ...]
) -> tuple[Float[Tensor, "batch pos"], ...]:
    """Per layer, the largest write at each position of a path through any head below that layer."""
    through_heads = torch.zeros_like(sizes[0])
    reached = []
    for layer, gain in zip(run.layers, gains, strict=True):
        reached.append(through_heads)
        best = torch.maximum(sizes[: layer.n_leaves].amax(0), through_heads)
        if layer.scale is not None:
            best = best / layer.scale
        attention = layer.pattern.abs()
        written = gain[:, None] * (attention @ best[:, None, :, None])[..., 0]
        rows = attention.sum(-1)
        for bias in layer.biases.values():
            norm = torch.einsum("hed,he->hd", layer.write, bias).norm(dim=-1)
            written = torch.maximum(written, norm[:, None] * rows)
        if layer.post is not None:
            written = written / layer.post[:, None]
        through_heads = torch.maximum(through_heads, written.amax(1))
    return tuple(reached)
