"""How sure a mean over prompts is, and how many effects stand out by chance.

Intervals say how large an effect may be, p-values whether there is one: only the p-values keep what they promise for
few prompts (see `bootstrap_interval`), so it is they that are counted against chance.
"""

from __future__ import annotations

import itertools
import math
from numbers import Real

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.arguments import seeded

# Up to this many prompts every choice of signs is tried, beyond it a sample.
_ENUMERATED = 12
# Choices of signs that are drawn at random beyond that, beside the observed one.
_DRAWN = 9999
# Components × choices of signs that are held at once.
_CELLS_AT_ONCE = 2**22


def weighted_mean(
    values: Float[Tensor, "component batch"], weights: Float[Tensor, " batch"]
) -> Float[Tensor, " component"]:
    """``Σ w v / Σ w`` over prompts."""
    return (values * weights).sum(-1) / weights.sum()


def bootstrap_interval(
    values: Float[Tensor, "component batch"],
    weights: Float[Tensor, " batch"] | Float[Tensor, "component batch"],
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
    over: Float[Tensor, " batch"] | None = None,
) -> Float[Tensor, "component bound"]:
    """Percentile bootstrap interval of the weighted mean ``Σ w v / Σ w`` over prompts (Efron 1979).

    Prompts are drawn with replacement; the interval holds the middle `level` of the means so found. It speaks of the
    prompts' spread only: other prompts of the same kind, not other kinds. All components see the same draws. One prompt
    has no spread to speak of: its interval is NaN. With `over` it is the interval of the ratio ``Σ w v / Σ w over``.

    With few prompts it is too narrow. Where the true mean is 0, intervals of 95% exclude 0 not in 5% of cases but, for
    normal effects, in about 25% with 3 prompts, 20% with 4, 11% with 8 and 6% with 64. Whether there is an effect at
    all is for `sign_flip_p_values` to say.

    Raises:
        TypeError, ValueError: A level that is no number between 0 and 1.
    """
    check_level(level)
    batch = values.shape[-1]
    if batch < 2:
        return values.new_full((len(values), 2), float("nan"))
    generator = seeded(seed)
    picks = torch.randint(batch, (draws, batch), generator=generator)
    counts = torch.zeros(draws, batch, dtype=torch.float64).scatter_add_(1, picks, torch.ones_like(picks).double())
    counts, weight = counts.to(values.device), weights.double().expand_as(values)
    below = weight if over is None else weight * over.double()
    means = (counts @ (weight * values.double()).mT) / (counts @ below.mT)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64, device=values.device)
    return torch.nanquantile(means, ends, dim=0).mT.to(values.dtype)


def check_level(level: object) -> None:
    """Refuse a level of an interval that is no number between 0 and 1.

    Raises:
        TypeError, ValueError: What came instead.
    """
    _check_share("level", level)


def _check_share(what: str, given: object) -> None:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{what} must be a number between 0 and 1, not {given!r}")
    if not 0 < float(given) < 1:
        raise ValueError(f"{what} must lie between 0 and 1, not {given}")


def prompts_and_interval(n_prompts: int, level: float) -> str:
    """What a mean was taken over, in words; one prompt has no interval to speak of."""
    return "1 prompt, which has no interval" if n_prompts == 1 else f"{n_prompts} prompts, {level:.0%} interval"


def sign_flip_p_values(
    values: Float[Tensor, "component batch"], weights: Float[Tensor, " batch"], draws: int = _DRAWN, seed: int = 0
) -> Float[Tensor, " component"]:
    """Two-sided p-values of the weighted mean being 0, by flipping the signs of prompts (Fisher's randomisation).

    Under the null hypothesis a prompt's effect is as likely to be v as −v. p is the share of sign choices whose mean is
    at least as far from 0 as the one observed: all of them up to 12 prompts, else `draws` random ones and the observed.
    So p ≤ α in at most a share α of null cases, however few the prompts. With n prompts p is never below ``2^(1−n)``.
    A metric that cannot fall below its clean value, such as a KL divergence, has no such null: any change stands out.
    """
    batch = values.shape[-1]
    if batch == 1:  # either sign is as far from 0
        return torch.ones(len(values), dtype=torch.float64, device=values.device)
    if batch <= _ENUMERATED:
        signs = torch.tensor(list(itertools.product((1.0, -1.0), repeat=batch)), dtype=torch.float64)
    else:
        generator = seeded(seed)
        signs = torch.randint(2, (draws, batch), generator=generator).double() * 2 - 1
        signs = torch.cat([torch.ones(1, batch, dtype=torch.float64), signs])
    signs = signs.to(values.device)
    weighted = values.double() * weights.double()
    return torch.cat([_share_as_far(part, signs) for part in weighted.split(max(_CELLS_AT_ONCE // len(signs), 1))])


def _share_as_far(weighted: Tensor, signs: Tensor) -> Tensor:
    """Under how many choices of signs a sum is at least as far from 0 as under the first, as a share of them."""
    sums = (weighted @ signs.mT).abs()
    # Sums of the same numbers in another order: what differs by rounding alone is as far from 0.
    slack = 1e-12 * weighted.abs().sum(-1, keepdim=True)
    return (sums >= sums[:, :1] - slack).double().mean(-1)


def chance_level(level: float) -> float:
    """What p is held against: ``1 − level``, without the rounding of the subtraction."""
    return round(1 - level, 12)


def n_significant(p_values: Float[Tensor, " component"], level: float) -> int:
    """How many p-values are at most ``1 − level``; of N true null hypotheses at most ``(1 − level) N`` on average."""
    return int((p_values <= chance_level(level)).sum())


def against_chance(p_values: Float[Tensor, " component"], level: float, n_prompts: int) -> str:
    """How many effects have ``p ≤ 1 − level``, beside how many would by chance; or that so few prompts allow none."""
    alpha, n = chance_level(level), len(p_values)
    needed = max(math.ceil(1 - math.log2(alpha)), 2)  # the least n with 2^(1 − n) ≤ α
    if alpha * (_DRAWN + 1) < 1:
        return f"p ≤ {alpha:g} would take more than the {_DRAWN} choices of signs that are drawn"
    if n_prompts < needed:
        return f"{needed} or more prompts are needed for p ≤ {alpha:g}"
    found = n_significant(p_values, level)
    has = "has" if found == 1 else "have"
    return f"{found} of {n} {has} p ≤ {alpha:g} by flipping signs, at most {alpha * n:.3g} would by chance"


def false_discovery(p_values: Float[Tensor, " component"], rate: float) -> Bool[Tensor, " component"]:
    """Which effects stand out with a false-discovery rate of at most `rate` (Benjamini and Hochberg 1995).

    Raises:
        TypeError, ValueError: A rate that is no number between 0 and 1.
    """
    _check_share("the false-discovery rate", rate)
    ordered, order = p_values.sort()
    n = len(p_values)
    below = ordered <= rate * torch.arange(1, n + 1, device=p_values.device) / n
    kept = int(below.nonzero().max()) + 1 if bool(below.any()) else 0
    found = torch.zeros(n, dtype=torch.bool, device=p_values.device)
    found[order[:kept]] = True
    return found
