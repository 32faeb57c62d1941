"""One point of the gauge freedom for every head: singular vectors, balanced, with a sign rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from circuits.arguments import require_model
from circuits.attention import Attention
from circuits.config import GPTConfig
from circuits.finite import check_finite
from circuits.gauge.freedom import (
    Planes,
    copied,
    group_of,
    key_bias_matters,
    rotary_planes,
    score_forms,
    still_coordinates,
    widest,
)
from circuits.model import HookedGPT


class Factor(NamedTuple):
    """One side of a product: the rows of a weight, and those of the biases beside it, over the same columns."""

    weight: Tensor
    bias: Tensor

    def rows(self) -> Tensor:
        """Both, the biases last."""
        return torch.cat([self.weight, self.bias])


@torch.no_grad()
def canonical(model: HookedGPT) -> HookedGPT:
    """The same function with the factors of every `W_QK` and `W_OV` in one gauge, whatever gauge they came in.

    - ``W_QK = U S Vᵀ``: ``W_Q = U √S``, ``W_K = V √S``, singular values descending, the largest entry of each column of
      U positive; ``W_OV`` likewise with `W_V` and `W_Oᵀ`. Heads that share keys and values share U's columns: the
      decomposition is that of their stacked query (output) weights.
    - Rotary planes of one frequency: the same with the plane's coordinates as complex numbers, which balances the
      lengths and turns the largest entry onto the positive real axis; what does not turn: as above.
    - Key biases in coordinates that do not turn are 0, unless a cap on the scores lets them matter. Other biases
      transform along. Where a product lacks full rank they count as rows of the factors, so that nothing is lost.
    - Under query and key norms only the freedom left by them: signs, turns of a plane whose gains are equal, and a
      rotation among coordinates of equal gains, to the principal axes of the queries.

    Idempotent. Two gauges of one model come to the same weights where the spectra are simple; otherwise compare the
    products.

    Raises:
        ValueError: Weights that are not finite (where first).
    """
    require_model(model)
    check_finite(dict(model.named_parameters()))
    new = copied(model)
    config = model.config
    for layer, block in enumerate(new.blocks):
        for kv in range(config.n_kv_heads):
            heads = group_of(config, layer, kv * config.group_size)[1]
            _settle_qk(config, block.attn, kv, heads)
            _settle_ov(block.attn, kv, heads)
    return new


def _settle_ov(attn: Attention, kv: int, heads: range) -> None:
    rows = slice(heads.start, heads.stop)
    V = Factor(widest(attn.W_V[kv]), _bias(attn.b_V, slice(kv, kv + 1), attn))
    out = widest(attn.W_O[rows]).mT.flatten(0, 1)
    V, O_T = balanced(V, Factor(out, out.new_zeros(0, attn.d_head)))
    attn.W_V[kv].copy_(V.weight)
    attn.W_O[rows].copy_(O_T.weight.unflatten(0, (len(heads), -1)).mT)
    if attn.b_V is not None:
        attn.b_V[kv].copy_(V.bias[0])


def _settle_qk(config: GPTConfig, attn: Attention, kv: int, heads: range) -> None:
    rows = slice(heads.start, heads.stop)
    Q = Factor(widest(attn.W_Q[rows]).flatten(0, 1), _bias(attn.b_Q, rows, attn))
    K = Factor(widest(attn.W_K[kv]), _bias(attn.b_K, slice(kv, kv + 1), attn))
    if config.qk_norm:
        Q, K = _turned_under_norms(config, attn, Q, K)
    else:
        for planes in rotary_planes(config):
            parts = [Factor(*(planes.complex(x) for x in side)) for side in (Q, K)]
            Q, K = (_put_complex(side, planes, part) for side, part in zip((Q, K), balanced(*parts), strict=True))
        still = still_coordinates(config)
        parts = [Factor(*(x[:, still] for x in side)) for side in (Q, K)]
        if not key_bias_matters(config):
            parts[1].bias.zero_()
        Q, K = (_put(side, still, part) for side, part in zip((Q, K), balanced(*parts), strict=True))
    attn.W_Q[rows].copy_(Q.weight.unflatten(0, (len(heads), -1)))
    attn.W_K[kv].copy_(K.weight)
    if attn.b_Q is not None and attn.b_K is not None:
        attn.b_Q[rows].copy_(Q.bias)
        attn.b_K[kv].copy_(K.bias[0])


def balanced(A: Factor, B: Factor) -> tuple[Factor, Factor]:
    """``A Bᴴ = U S Vᴴ`` as ``(U √S, V √S)``, real or complex; biases along, as rows where the rank is not full."""
    inner = A.weight.shape[-1]
    if not inner:
        return A, B
    U, S, V = _svd(A.weight, B.weight)
    if len(S) == inner and bool((S > 0).all()):
        root = S.sqrt()
        return (
            Factor(U * root, A.bias @ B.weight.mH @ V / root),
            Factor(V * root, B.bias @ A.weight.mH @ U / root),
        )
    U, S, V = _svd(A.rows(), B.rows())
    sides = []
    for vectors, side in ((U, A), (V, B)):
        columns = torch.nn.functional.pad(vectors * S.sqrt(), (0, inner - len(S)))
        sides.append(Factor(*columns.split([len(side.weight), len(side.bias)])))
    return sides[0], sides[1]


def _svd(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S, V of ``A Bᴴ``; singular values below rounding are 0, and the largest entry of each column of U positive."""
    Q_A, R_A = torch.linalg.qr(A)
    Q_B, R_B = torch.linalg.qr(B)
    U, S, Vh = torch.linalg.svd(R_A @ R_B.mH, full_matrices=False)
    U, V = Q_A @ U, Q_B @ Vh.mH
    rounding = S[0] * max(len(A), len(B)) * torch.finfo(S.dtype).eps
    S = S.where(S.gt(rounding), 0.0)
    turn = _phase(U)
    return U * turn, S, V * turn


def _phase(columns: Tensor) -> Tensor:
    """The number of length 1 by which each column is multiplied to make its largest entry positive."""
    largest = columns.gather(0, columns.abs().argmax(0, keepdim=True))[0]
    return torch.where(largest == 0, torch.ones_like(largest), torch.sgn(largest).conj())


def _turned_under_norms(config: GPTConfig, attn: Attention, Q: Factor, K: Factor) -> tuple[Factor, Factor]:
    """Query and key factors after the orthogonal transformation that norms and their gains leave free."""
    forms = list(score_forms(config, attn))
    still = still_coordinates(config)
    if len(still):
        gains = forms.pop(0).diagonal()[still]
        for value in gains.unique():
            same = still[gains == value]
            # Gram matrices: rows of the queries alone, for the key's rows follow.
            axes = torch.linalg.eigh(Q.rows()[:, same].mT @ Q.rows()[:, same])[1].flip(-1)
            axes = axes * _phase(Q.rows()[:, same] @ axes)
            Q, K = (_put(side, same, Factor(*(x[:, same] @ axes for x in side))) for side in (Q, K))
    for planes, square, turn in zip(rotary_planes(config), forms[::2], forms[1::2], strict=True):
        numbers = planes.complex(Q.rows())
        isotropic = torch.equal(square[planes.first, planes.first], square[planes.second, planes.second])
        isotropic &= torch.equal(turn[planes.first, planes.second], -turn[planes.second, planes.first])
        phase = _phase(numbers) if isotropic else _sign(numbers)
        Q, K = (_put_complex(side, planes, Factor(*(planes.complex(x) * phase for x in side))) for side in (Q, K))
    return Q, K


def _sign(numbers: Tensor) -> Tensor:
    """±1 for each column, so that its largest real or imaginary part is positive."""
    return _phase(torch.cat([numbers.real, numbers.imag]))


def _bias(bias: Tensor | None, rows: slice, attn: Attention) -> Tensor:
    return (
        widest(attn.qkv.weight).new_zeros(rows.stop - rows.start, attn.d_head) if bias is None else widest(bias[rows])
    )


def _put(side: Factor, columns: Tensor, part: Factor) -> Factor:
    return Factor(*(x.index_copy(1, columns.to(x.device), new) for x, new in zip(side, part, strict=True)))


def _put_complex(side: Factor, planes: Planes, part: Factor) -> Factor:
    side = _put(side, planes.first, Factor(*(x.real for x in part)))
    return _put(side, planes.second, Factor(*(x.imag for x in part)))
