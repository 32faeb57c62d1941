"""Which gauge matrices the scores of an architecture allow.

Rotary scores are ``Σ_planes Re(q k̄ e^{iθΔ})`` plus the inner product over what does not turn, with q and k the pairs of
coordinates of a plane as complex numbers. R must commute with every rotation: it acts on planes of one frequency as a
complex matrix (a scaled rotation, where there is one plane), on the rest as any matrix, and mixes nothing else. Query
and key norms also have to be left alone, and the gains behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.attention import Attention
from circuits.config import GPTConfig
from circuits.layers import rotary_frequencies
from circuits.model import HookedGPT
from circuits.validity import require_whole


@dataclass(frozen=True)
class Planes:
    """Rotary planes of one frequency: the coordinates of a head that hold their two halves."""

    first: Int[Tensor, " plane"]
    second: Int[Tensor, " plane"]

    def complex(self, x: Float[Tensor, "*batch d_head"]) -> Tensor:
        """These coordinates as complex numbers ``[*batch plane]``."""
        return torch.complex(x[..., self.first], x[..., self.second])


def rotary_planes(config: GPTConfig) -> list[Planes]:
    """The planes that turn, by frequency; usually one of each. None without rotary positions."""
    if config.positions != "rotary":
        return []
    half = config.rotary_dim // 2
    first = torch.arange(half) if config.rotary_layout == "half" else 2 * torch.arange(half)
    second = first + (half if config.rotary_layout == "half" else 1)
    frequencies = rotary_frequencies(config)
    return [Planes(first[same], second[same]) for same in (frequencies == f for f in frequencies.unique().flip(0))]


def still_coordinates(config: GPTConfig) -> Int[Tensor, " still"]:
    """The coordinates of a head that do not turn."""
    return torch.arange(config.rotary_dim if config.positions == "rotary" else 0, config.d_head)


def key_bias_matters(config: GPTConfig) -> bool:
    """Whether a key bias in coordinates that do not turn can change a pattern.

    It adds one amount to all scores of a query, which softmax does not see, unless a cap or a norm bends it first.
    """
    return config.attn_softcap is not None or config.qk_norm


def score_forms(config: GPTConfig, attn: Attention) -> Iterator[Float[Tensor, "d_head d_head"]]:
    """Matrices F such that every score is a combination of the ``q F kᵀ``, whatever the offset; in float64."""
    gains = [torch.ones(config.d_head, dtype=torch.float64)] * 2
    if attn.q_norm is not None and attn.k_norm is not None:
        gains = [norm.w.detach().cpu().double() for norm in (attn.q_norm, attn.k_norm)]

    def form(rows: Tensor, columns: Tensor, values: float) -> Tensor:
        F = torch.zeros(config.d_head, config.d_head, dtype=torch.float64)
        F[rows, columns] = values
        return F

    still = still_coordinates(config)
    forms = [form(still, still, 1.0)] if len(still) else []
    for planes in rotary_planes(config):
        forms.append(form(planes.first, planes.first, 1.0) + form(planes.second, planes.second, 1.0))
        forms.append(form(planes.first, planes.second, 1.0) - form(planes.second, planes.first, 1.0))
    for F in forms:
        yield gains[0][:, None] * F * gains[1]


def group_of(config: GPTConfig, layer: int, head: int) -> tuple[int, range]:
    """The key and value head that a query head reads, and all query heads that read it.

    Raises:
        IndexError: A layer or head that the model does not have.
    """
    for axis, index, size in (("layer", layer, config.n_layers), ("head", head, config.n_heads)):
        require_whole(axis, index, least=-(2**63))
        if not -size <= index < size:
            raise IndexError(f"{axis} {index} is not in a model of {size} {axis}s (0 to {size - 1})")
    kv = head % config.n_heads // config.group_size
    return kv, range(kv * config.group_size, (kv + 1) * config.group_size)


def copied(model: HookedGPT) -> HookedGPT:
    """A model of its own with the same weights; the tokenizer, which nobody changes, is shared."""
    return copy.deepcopy(model, {id(model.tokenizer): model.tokenizer})


def widest(x: Tensor) -> Tensor:
    """The tensor in float64 where its device has that, for weights that are then rounded once."""
    return x.detach().float() if x.device.type == "mps" else x.detach().double()
