"""Weights in front of a norm: a loss that does not see their scale, and what weight decay then does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import functional_call

from analysis.geometry.copies import private_copy
from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.config import GPTConfig
from circuits.finite import check_finite
from circuits.layers import Norm
from circuits.model import HookedGPT
from circuits.tokens import next_token_losses

FACTORS = (0.5, 1.0, 3.0)
# What writes to the stream: the state-dict names end so.
_WRITERS = ("embed.weight", "attn.out.weight", "attn.out.bias", "mlp.down.weight", "mlp.down.bias")
_POST_WRITERS = ("embed.weight", "ln1_post.w", "ln1_post.b", "ln2_post.w", "ln2_post.b")


@result
class ScaleInvariance(Result):
    """The loss as a function of the common scale c of everything that writes to the stream (exercise 4).

    Where every reader normalises, and with ε = 0, c changes nothing. Then ``⟨∇L(w), w⟩ = 0`` (Euler's relation for a
    function that is homogeneous of degree 0), and ``∇L(c w) = ∇L(w) / c``. Weight decay therefore does not hold back
    the function, only the scale: it shrinks c, and with it grows the effective learning rate, which goes as 1/c².

    Attributes:
        loss: At each factor c, nats.
        radial: ``⟨∇L, w⟩ / (‖∇L‖ ‖w‖)``: the cosine of gradient and weights.
        gradient: ``‖∇L(c w)‖``.
        scaled_gradient: ``c ‖∇L(c w)‖ / ‖∇L(w)‖``: 1 where the gradient shrinks as 1/c.
        factors: The factors c.
        eps: The ε of every norm in the experiment.
        weights: Scalars that were scaled.
    """

    table = ("loss", "radial", "gradient", "scaled_gradient")
    loss: Float[Tensor, " factor"]
    radial: Float[Tensor, " factor"]
    gradient: Float[Tensor, " factor"]
    scaled_gradient: Float[Tensor, " factor"]
    factors: tuple[float, ...]
    eps: float
    weights: int


def scale_blindness(config: GPTConfig) -> str | None:
    """Why the loss of such a model sees the scale of what writes to its stream; None where it does not."""
    if config.norm is None or config.norm_placement == "post":
        return (
            f"branches read the stream without a norm (norm {config.norm!r}, norm_placement {config.norm_placement!r})"
        )
    if not config.final_norm:
        return "the unembedding reads the stream without a norm (final_norm is False)"
    if config.tie_embeddings:
        return "the embedding, which writes to the stream, is also the unembedding (tie_embeddings is True)"
    return None


def scale_invariance(
    model: HookedGPT, tokens: Int[Tensor, "batch pos"], factors: Sequence[float] = FACTORS, eps: float = 0.0
) -> ScaleInvariance:
    """Scale everything that writes to the stream and look at loss and gradient.

    Args:
        model: A pre-norm model with a final norm and an unembedding of its own.
        tokens: Prompts of at least two tokens.
        factors: The scales c; gradients are compared with that at c = 1.
        eps: ε of every norm on the stream in the experiment; the model itself is left alone.

    Raises:
        ValueError: A model whose loss sees the scale, and why.
    """
    require_model(model)
    seen = scale_blindness(model.config)
    if seen is not None:
        raise ValueError(f"the loss of this model is not scale-invariant: {seen}")
    check_finite(dict(model.named_parameters()))
    ideal = private_copy(model)
    for name, module in ideal.named_modules():
        if isinstance(module, Norm) and not name.endswith(("_post", "q_norm", "k_norm")):
            module.eps = eps
    endings = _POST_WRITERS if model.config.branch_norm else _WRITERS
    weights = {name: p for name, p in ideal.named_parameters() if name.endswith(endings) and "unembed" not in name}
    measured = {c: _gradient(ideal, weights, tokens, c) for c in (1.0, *factors)}
    base = measured[1.0][2]
    rows = [torch.stack([measured[c][0], measured[c][1], measured[c][2], c * measured[c][2] / base]) for c in factors]
    loss, radial, gradient, scaled = torch.stack(rows, dim=1)
    return ScaleInvariance(
        loss=loss,
        radial=radial,
        gradient=gradient,
        scaled_gradient=scaled,
        factors=tuple(factors),
        eps=eps,
        weights=sum(p.numel() for p in weights.values()),
    )


def _gradient(
    model: HookedGPT, weights: Mapping[str, Tensor], tokens: Tensor, c: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, cosine of gradient and weights, and length of the gradient, at scale c."""
    with torch.enable_grad():
        scaled = {name: (c * weight).detach().requires_grad_() for name, weight in weights.items()}
        loss = next_token_losses(functional_call(model, scaled, (tokens,)), tokens).mean()
        gradients = torch.autograd.grad(loss, list(scaled.values()))
    pairs = list(zip(gradients, scaled.values(), strict=True))
    inner = torch.stack([(g * w.detach()).sum() for g, w in pairs]).sum()
    length = torch.stack([g.norm() for g, _ in pairs]).norm()
    size = torch.stack([w.detach().norm() for _, w in pairs]).norm()
    return loss.detach(), inner / (length * size), length
