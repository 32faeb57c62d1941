"""One step of the search: everything directly below some suffixes, evaluated at once and at `d_head` size.

Each head below a suffix makes a longer suffix. Its leaves are paths, whose values are found exactly; its total over all
paths comes from the run's own z. What lies between the two is what further heads carry, and is known without looking at
any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.paths.bounds import Reach
from circuits.paths.frozen import FrozenLayer, FrozenRun


@dataclass(frozen=True)
class Children:
    """What stands below some suffixes through the heads of one layer.

    Attributes:
        layer: The layer.
        values: The paths that start at each head's leaves and biases, ``[suffix batch head start]``.
        deeper: All longer paths through each head together, ``[suffix batch head]``.
        bound: The most that one of those can be, its mean over the prompts, ``[suffix head]``; None if not computed.
        expected: How large one of those may be expected to be, likewise.
    """

    layer: int
    values: Float[Tensor, "suffix batch head start"]
    deeper: Float[Tensor, "suffix batch head"]
    bound: Float[Tensor, "suffix head"] | None
    expected: Float[Tensor, "suffix head"] | None


def children(
    run: FrozenRun, D: Float[Tensor, "suffix batch pos d_model"], below: int, reach: Reach | None
) -> list[Children]:
    """Expand suffixes of one depth.

    Args:
        run: The frozen run.
        D: Their directions.
        below: The layer of their earliest heads: only heads below it are reached.
        reach: Where a search needs bounds; None for a full enumeration.
    """
    return [_through_layer(run.layers[layer], layer, D, reach) for layer in range(below)]


def _through_layer(
    layer: FrozenLayer, index: int, D: Float[Tensor, "suffix batch pos d_model"], reach: Reach | None
) -> Children:
    n_heads, d_head, _ = layer.write.shape
    carried = (D @ layer.write.flatten(0, 1).T).view(*D.shape[:-1], n_heads, d_head)
    if layer.post is not None:
        carried = carried / layer.post[..., None, None]
    total = (carried * layer.z).sum((2, 4))
    mix = layer.pattern.mT @ carried.transpose(2, 3)  # suffix batch head key d_head
    summed = mix.sum(3)
    own = [(summed * bias).sum(-1) for bias in layer.biases.values()]
    if layer.scale is not None:
        mix = mix / layer.scale[:, None, :, None]
    values = (layer.leaves @ mix.flatten(3)[..., None])[..., 0]
    values = torch.cat([values, *(value[..., None] for value in own)], dim=-1)
    bound = expected = None
    if reach is not None and index > 0:
        size = ((mix @ reach.gram[index]) * mix).sum(-1).clamp(min=0).sqrt()  # ‖D[p]‖ before the head
        bound = (size * reach.most[index][:, None]).sum(-1).mean(1)
        expected = (size * reach.expected[index][:, None]).sum(-1).mean(1)
    return Children(index, values, total - values.sum(-1), bound, expected)
