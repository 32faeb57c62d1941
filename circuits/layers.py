"""Normalisation, rotary positions and the MLP: pure functions first, thin modules round them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from circuits.config import Activation, GPTConfig, NormKind, RotaryScaling
from circuits.hooks import NO_TAP, Tap
from circuits.names import BlockNames
from circuits.products import linear

# --- normalisation --------------------------------------------------------------------------------------------------


def norm_scale(x: Float[Tensor, "*batch d"], kind: NormKind, eps: float) -> Float[Tensor, "*batch 1"]:
    """What a norm divides by: ``sqrt(var(x) + ε)`` for LayerNorm, ``sqrt(mean(x²) + ε)`` for RMSNorm (lecture 4.1)."""
    return _root_mean_square(centred(_at_least_float32(x), kind), eps)


def _root_mean_square(x: Float[Tensor, "*batch d"], eps: float) -> Float[Tensor, "*batch 1"]:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def centred(x: Float[Tensor, "*batch d"], kind: NormKind) -> Float[Tensor, "*batch d"]:
    """``x`` less its coordinate mean where the norm does that."""
    return x - x.mean(-1, keepdim=True) if kind == "layernorm" else x


class Norm(nn.Module):
    """``γ ⊙ (x − mean) / scale + β`` over the last axis; RMSNorm has neither the mean nor β.

    Attributes:
        w: The gain γ, ``[d]``.
        b: The shift β, ``[d]``; None for RMSNorm.
    """

    w: Float[nn.Parameter, " d"]
    b: Float[nn.Parameter, " d"] | None

    def __init__(self, kind: NormKind, size: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.kind: NormKind = kind
        self.eps = eps
        self.w = nn.Parameter(torch.ones(size, **factory))
        if kind == "layernorm":
            self.b = nn.Parameter(torch.zeros(size, **factory))
        else:
            self.register_parameter("b", None)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Normalise, in one fused kernel."""
        if self.kind == "layernorm":
            return F.layer_norm(x, x.shape[-1:], self.w, self.b, self.eps)
        return F.rms_norm(x, x.shape[-1:], self.w, self.eps)

    def tapped(self, x: Float[Tensor, "*batch d"], tap: Tap, scale: str, normalized: str) -> Float[Tensor, "*batch d"]:
        """Normalise, showing the scale and the normalised value under the two names where somebody asks for them."""
        if not tap.touches(scale, normalized):
            return self.forward(x)
        direction = centred(_at_least_float32(x), self.kind)
        divisor = tap(scale, _root_mean_square(direction, self.eps).to(x.dtype))
        return self.affine(tap(normalized, direction.to(x.dtype) / divisor))

    def affine(self, normalized: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Gain and shift."""
        scaled = normalized * self.w
        return scaled if self.b is None else scaled + self.b


# --- rotary positions -----------------------------------------------------------------------------------------------


def rotary_frequencies(config: GPTConfig) -> Float[Tensor, " plane"]:
    """Radians per position of each plane, ``base^(-2i / rotary_dim)``, stretched as `config.rotary_scaling` says.

    In float64: a rounded frequency is multiplied by the position.
    Source: Su et al. 2021 (RoFormer); the llama-3 rule is that of the Llama 3.1 release.
    """
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    frequencies = config.rotary_base**-exponents
    scaling = config.rotary_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_frequencies(frequencies, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: RotaryScaling) -> Tensor:
    """Slow planes divided by the factor, quick ones left alone, a linear blend of the two between."""
    turns = scaling.original_n_ctx * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rotary_tables(
    frequencies: Float[Tensor, " plane"], positions: Int[Tensor, "*batch pos"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*batch pos 1 plane"], Float[Tensor, "*batch pos 1 plane"]]:
    """Cosine and sine of ``position × frequency``, with an axis for the heads."""
    angles = (positions.to(torch.float64)[..., None] * frequencies)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x: Float[Tensor, "*batch d_head"], tables: tuple[Tensor, Tensor], layout: str
) -> Float[Tensor, "*batch d_head"]:
    """Turn each plane of the first `rotary_dim` coordinates by its angle; the others stay.

    The planes are ``(i, i + rotary_dim/2)`` in the ``"half"`` layout and ``(2i, 2i + 1)`` in the ``"interleaved"`` one.
    """
    cos, sin = tables
    width = 2 * cos.shape[-1]
    turning, still = x[..., :width], x[..., width:]
    if layout == "half":
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, still), dim=-1) if still.shape[-1] else turned


# --- the MLP --------------------------------------------------------------------------------------------------------

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


# The same written over what it is made of: half the memory of the widest activation that there is.
_IN_PLACE: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_,  # `torch.nn.functional` has it out of place only
    "gelu_new": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "relu": torch.relu_,
    "silu": lambda x: F.silu(x, inplace=True),
}


def activation(
    x: Float[Tensor, "*batch d_mlp"], act: Activation, in_place: bool = False
) -> Float[Tensor, "*batch d_mlp"]:
    """``σ(x)``: exact GELU ``x Φ(x)``, its tanh approximation, ReLU or SiLU."""
    return (_IN_PLACE if in_place else _ACTIVATIONS)[act](x)


class MLPLayer(nn.Module):
    """``σ(x W_in + b_in) W_out + b_out``, or gated ``(σ(x W_gate) ⊙ (x W_in + b_in)) W_out + b_out`` (lecture 2.1)."""

    gate: nn.Linear | None

    def __init__(self, config: GPTConfig, **factory: object) -> None:
        super().__init__()
        self.act: Activation = config.act
        d_model, d_mlp, bias = config.d_model, config.d_mlp, config.bias_mlp
        self.up = nn.Linear(d_model, d_mlp, bias=bias, **factory)
        self.gate = nn.Linear(d_model, d_mlp, bias=False, **factory) if config.gated_mlp else None
        self.down = nn.Linear(d_mlp, d_model, bias=bias, **factory)

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:
        """A view of the parameter."""
        return self.up.weight.T

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"] | None:
        """A view of the parameter; None where the MLP is not gated."""
        return None if self.gate is None else self.gate.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """A view of the parameter."""
        return self.down.weight.T

    @property
    def b_in(self) -> Float[Tensor, " d_mlp"] | None:
        """The parameter itself; None without biases."""
        return self.up.bias

    @property
    def b_out(self) -> Float[Tensor, " d_model"] | None:
        """The parameter itself; None without biases."""
        return self.down.bias

    def forward(
        self, x: Float[Tensor, "batch pos d_model"], names: BlockNames, tap: Tap = NO_TAP
    ) -> Float[Tensor, "batch pos d_model"]:
        """The MLP's output for an input that is normalised already."""
        return self.write(self.neurons(x, names, tap), names, tap)

    def neurons(
        self, x: Float[Tensor, "batch pos d_model"], names: BlockNames, tap: Tap = NO_TAP
    ) -> Float[Tensor, "batch pos d_mlp"]:
        """``σ(x W_in + b_in)``, or ``σ(x W_gate) ⊙ (x W_in + b_in)``."""
        up = linear(x, self.up.weight, self.up.bias)
        gate = None if self.gate is None else linear(x, self.gate.weight)
        differentiated = up.requires_grad or (gate is not None and gate.requires_grad)
        own = tap.in_place and not (differentiated or tap.touches(names.pre, names.pre_linear))
        if gate is None:
            return activation(tap(names.pre, up), self.act, own)
        post = activation(tap(names.pre, gate), self.act, own)
        return post.mul_(up) if own else post * tap(names.pre_linear, up)

    def write(
        self, post: Float[Tensor, "batch pos d_mlp"], names: BlockNames, tap: Tap = NO_TAP
    ) -> Float[Tensor, "batch pos d_model"]:
        """``post W_out + b_out``."""
        return linear(tap(names.post, post), self.down.weight, self.down.bias)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
