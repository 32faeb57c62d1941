"""Moving along the gauge freedom of one head (of one key and value group): another model, the same function."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.arguments import require_model
from circuits.attention import Attention
from circuits.config import GPTConfig
from circuits.finite import check_finite
from circuits.gauge.freedom import copied, group_of, score_forms, widest
from circuits.model import HookedGPT


@torch.no_grad()
def transform_qk(model: HookedGPT, layer: int, head: int, R: Float[Tensor, "d_head d_head"]) -> HookedGPT:
    """``W_Q → W_Q R``, ``b_Q → b_Q R``, ``W_K → W_K R⁻ᵀ``, ``b_K → b_K R⁻ᵀ``: the scores stay what they are.

    Under grouped-query attention every query head that shares the key head of `head` is transformed with it.

    Args:
        model: A model; it is left alone.
        layer: The layer.
        head: A query head.
        R: The gauge matrix.

    Raises:
        TypeError: No model; R no tensor of real floating-point numbers.
        IndexError: A layer or head that the model does not have.
        ValueError: R of another shape, singular, not finite, or not allowed: of a rotary model it must commute with the
            rotations, under query and key norms it must also be orthogonal and commute with their gains.
    """
    require_model(model)
    config = model.config
    kv, heads = group_of(config, layer, head)
    attn = model.blocks[layer].attn
    R = _checked(R, config)
    _check_allowed(R, config, attn)
    check_finite(dict(model.named_parameters()))
    inverse = torch.linalg.inv(R)
    new = copied(model)
    attn = new.blocks[layer].attn
    for h in heads:
        _multiply(attn.W_Q[h], R.to(model.device))
        _multiply(None if attn.b_Q is None else attn.b_Q[h], R.to(model.device))
    _multiply(attn.W_K[kv], inverse.mT.to(model.device))
    _multiply(None if attn.b_K is None else attn.b_K[kv], inverse.mT.to(model.device))
    return new


@torch.no_grad()
def transform_ov(model: HookedGPT, layer: int, head: int, R: Float[Tensor, "d_head d_head"]) -> HookedGPT:
    """``W_V → W_V R``, ``b_V → b_V R``, ``W_O → R⁻¹ W_O``: what the head writes stays what it is.

    Under grouped-query attention the output weights of every query head that shares the value head are transformed.

    Args:
        model: A model; it is left alone.
        layer: The layer.
        head: A query head.
        R: The gauge matrix.

    Raises:
        TypeError: No model; R no tensor of real floating-point numbers.
        IndexError: A layer or head that the model does not have.
        ValueError: R of another shape, or singular; weights that are not finite (where first).
    """
    require_model(model)
    kv, heads = group_of(model.config, layer, head)
    R = _checked(R, model.config)
    check_finite(dict(model.named_parameters()))
    inverse = torch.linalg.inv(R)
    new = copied(model)
    attn = new.blocks[layer].attn
    _multiply(attn.W_V[kv], R.to(model.device))
    _multiply(None if attn.b_V is None else attn.b_V[kv], R.to(model.device))
    for h in heads:
        _multiply(attn.W_O[h].mT, inverse.mT.to(model.device))
    return new


def _multiply(view: Tensor | None, right: Tensor) -> None:
    """``view ← view right``, in place, rounded once."""
    if view is not None:
        wide = widest(view)
        view.copy_(wide @ right.to(wide.dtype))


def _checked(R: Tensor, config: GPTConfig) -> Tensor:
    """R in float64, invertible."""
    if not isinstance(R, Tensor) or not R.is_floating_point():
        came = R.dtype if isinstance(R, Tensor) else type(R).__name__
        raise TypeError(f"expected a gauge matrix R of real floating-point numbers, a tensor, not {came}")
    expected = (config.d_head, config.d_head)
    if tuple(R.shape) != expected:
        raise ValueError(f"expected a gauge matrix R of shape {list(expected)} (d_head × d_head), got {list(R.shape)}")
    if not R.isfinite().all():
        raise ValueError("the gauge matrix R holds NaN or infinity")
    wide = R.detach().cpu().double()
    s = torch.linalg.svdvals(wide)
    if s[-1] <= config.d_head * torch.finfo(R.dtype).eps * s[0]:
        raise ValueError(f"the gauge matrix R is singular: its singular values run from {s[0]:.3g} down to {s[-1]:.3g}")
    return wide


def _check_allowed(R: Tensor, config: GPTConfig, attn: Attention) -> None:
    # A matrix given in float32 commutes to float32's precision.
    tolerance = 1e-5 * float(torch.linalg.cond(R))
    if config.qk_norm:
        off = float((R @ R.mT - torch.eye(config.d_head, dtype=R.dtype)).abs().max())
        if off > tolerance:
            raise ValueError(
                f"under query and key norms R must be orthogonal, or the norms see another vector; R Rᵀ is {off:.3g} "
                "away from the identity"
            )
    inverse = torch.linalg.inv(R)
    for F in score_forms(config, attn):
        off = float((R @ F @ inverse - F).abs().max() / F.abs().max())
        if off > tolerance:
            what = " and ".join(
                ["the rotations of its positions"] * (config.positions == "rotary")
                + ["the gains of the query and key norms"] * config.qk_norm
            )
            raise ValueError(
                f"R does not commute with {what}, so that the scores would change (by {off:.3g} of themselves); "
                f"allowed are {_allowed(config)}"
            )


def _allowed(config: GPTConfig) -> str:
    if config.positions != "rotary":
        return "orthogonal matrices that mix only coordinates of equal gains"
    planes = "rotations" if config.qk_norm else "scaled rotations"
    pairs = "(i, i + rotary_dim/2)" if config.rotary_layout == "half" else "(2i, 2i + 1)"
    rest = f", and any matrix on the other {config.d_head - config.rotary_dim}" if not config.qk_norm else ""
    return f"{planes} of each plane {pairs} of the first {config.rotary_dim} coordinates{rest}"
