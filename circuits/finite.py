"""NaN and infinities in weights and matrices, named by where they stand first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that hold NaN or infinity.

    Raises:
        ValueError: The first such weight, in the order of `weights`, with its first such entry and how many there are.
    """
    for name, weight in weights.items():
        bad = ~torch.isfinite(weight)
        if bool(bad.any()):
            places = bad.nonzero()
            first = places[0].tolist()
            value = float(weight.detach()[tuple(first)])
            raise ValueError(f"weight {name} is {value} at {first} ({len(places)} of its entries are not finite)")


def finite_matrix(matrix: Tensor) -> Tensor:
    """The matrices ``[*batch m n]`` as they are, or an error: not every LAPACK survives what is not finite.

    Raises:
        ValueError: An entry that is NaN or infinite, with the first leading index where there is one.
    """
    bad = (~matrix.detach().isfinite()).flatten(-2).any(-1)
    if bool(bad.any()):
        where = f" at leading index {bad.nonzero()[0].tolist()}" if bad.ndim else ""
        raise ValueError(f"expected a matrix of finite entries, got NaN or infinity{where}")
    return matrix


def check_result(what: str, model: nn.Module, *results: Tensor) -> None:
    """Refuse what was computed from a model's weights if it is not finite, by the first weight that is not.

    Only the results are looked at as long as nothing is wrong with them.

    Raises:
        ValueError: NaN or infinity, with the weight it comes from, or that the sizes of the weights are to blame.
    """
    for x in results:
        if bool(x.isfinite().all()):
            continue
        check_finite(dict(model.named_parameters()))
        raise ValueError(f"{what} is not finite, though every weight is: it overflows {x.dtype}")
