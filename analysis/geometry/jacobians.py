"""Exact Jacobians of a block, at a position and between positions.

Row vectors: ``J[i, j] = ∂x'_j / ∂x_i``, so that a small change `dx` of the stream becomes ``dx @ J``. Each output
coordinate is differentiated in a copy of the sequence of its own; the copies are one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.run import Run
from circuits.tokens import check_tokens

# Numbers of one activation that a batch of copies may hold at once.
_BUDGET = 2**24

Step = Callable[[Tensor], Tensor]


@result
class BlockJacobians(Result):
    """The Jacobian of one block's output at one position by its input at every position up to there.

    Attributes:
        jacobian: ``J[s, i, j] = ∂x'_{t, j} / ∂x_{s, i}``.
        singular_values: Of each ``J[s]``, descending.
        gain: ``‖J[s]‖_F / √d``: root mean square factor on a random direction; 1 for the identity.
        distance_to_identity: ``‖J[t] − I‖_F / √d``.
        distance_spectral: ``‖J[t] − I‖₂``: in a pre-norm block the largest singular value of the branches' Jacobian.
        layer: Which block.
        position: The output's position t.
        norm_placement: ``"pre"`` or ``"post"``.
    """

    table = ("gain",)
    jacobian: Float[Tensor, "source d_model d_model2"]
    singular_values: Float[Tensor, "source k"]
    gain: Float[Tensor, " source"]
    distance_to_identity: float
    distance_spectral: float
    layer: int
    position: int
    norm_placement: str


def block_jacobians(model: HookedGPT, tokens: Int[Tensor, "1 pos"], layer: int, position: int = -1) -> BlockJacobians:
    """Differentiate one block exactly (lecture 3.1, exercise 7).

    In a pre-norm block ``J[t] = I + DF``; in a post-norm block the norm's own Jacobian, of rank at most d − 1 (RMSNorm)
    or d − 2 (LayerNorm) at ε = 0, stands behind the sum, so that no identity is left.

    Args:
        model: A model.
        tokens: One sequence.
        layer: The block; negative from the end.
        position: The output position t; negative from the end.

    Raises:
        IndexError: A layer or position that there is not.
    """
    require_model(model)
    x, layer, at = _stream_before(model, tokens, layer, position)
    run = reading(model.start(tokens[:, : at + 1]), at)
    block = model.blocks[layer]
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    jacobian = pullbacks(lambda copies: block(copies, run)[:, 0], x, eye).permute(1, 2, 0)
    wide = jacobian if jacobian.dtype in (torch.float32, torch.float64) else jacobian.float()
    singular_values = torch.linalg.svdvals(wide)
    own = wide[at] - torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    root = math.sqrt(wide.shape[-1])
    return BlockJacobians(
        jacobian=jacobian,
        singular_values=singular_values,
        gain=singular_values.norm(dim=-1) / root,
        distance_to_identity=float(own.norm()) / root,
        distance_spectral=float(torch.linalg.matrix_norm(own, 2)),
        layer=layer,
        position=at,
        norm_placement=model.config.norm_placement,
    )


def _stream_before(
    model: HookedGPT, tokens: Tensor, layer: int, position: int
) -> tuple[Float[Tensor, "pos d_model"], int, int]:
    """The stream before a block up to a position, and both numbers counted from the front."""
    tokens = check_tokens(tokens, model.config)
    if len(tokens) != 1:
        raise ValueError(f"a Jacobian is that of one sequence [1 pos], not of {len(tokens)}")
    for axis, index, size in (("layer", layer, model.config.n_layers), ("position", position, tokens.shape[1])):
        if not -size <= index < size:
            raise IndexError(f"{axis} {index} is not among the {size} there are (0 to {size - 1})")
    layer, at = layer % model.config.n_layers, position % tokens.shape[1]
    name = block_names(layer).resid_pre
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[:, : at + 1], names_filter=name)
    return cache[name][0], layer, at


def reading(run: Run, position: int) -> Run:
    """The same run, in which only one position is read after the attention."""
    at = torch.tensor([position], device=run.positions.device)
    return replace(run, read=at, queries=at[None], _seen={})


def pullbacks(
    step: Step, x: Float[Tensor, "pos d_model"], directions: Float[Tensor, "direction n"]
) -> Float[Tensor, "direction pos d_model"]:
    """``∂(y · u) / ∂x`` for each direction u, where ``y = step(x)``: rows of the Jacobian where u runs over a basis.

    Args:
        step: From copies of the sequence ``[copy pos d_model]`` to an output of each ``[copy n]``.
        x: The sequence.
        directions: The directions u.
    """
    at_once = max(1, _BUDGET // (x.numel() * 8))
    gradients = []
    for some in directions.split(at_once):
        with torch.enable_grad():
            copies = x.detach().expand(len(some), *x.shape).clone().requires_grad_()
            (gradient,) = torch.autograd.grad((step(copies) * some).sum(), copies)
        gradients.append(gradient)
    return torch.cat(gradients)


def sequence_jacobian(step: Step, x: Float[Tensor, "pos d_model"]) -> Float[Tensor, "size size2"]:
    """The Jacobian of a whole sequence by a whole sequence, both flattened to ``pos · d_model``: for short ones.

    Args:
        step: From copies of the sequence to the sequence that each becomes, ``[copy pos d_model]``.
        x: The sequence.
    """
    eye = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    return pullbacks(lambda copies: step(copies).flatten(1), x, eye).flatten(1).T
