"""The largest ways of one path through the positions of a prompt, found exactly.

With patterns and scales frozen, a path's value is a sum over positions ``Σ g[p₀] · a₁[p₁, p₀] · a₂[p₂, p₁] ⋯``: one
number per hop (attention over scales), times the leaf's inner product with the weights along the path. So the largest
products are found by dynamic programming, the k best per position and hop, and not by listing every combination.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from circuits.components import Component, Head, NormBias, ValueBias
from circuits.paths.frozen import FrozenRun, Suffix
from circuits.paths.result import Route


def largest_routes(
    run: FrozenRun,
    components: tuple[Component, ...],
    suffix: Suffix,
    value: Float[Tensor, " batch"],
    u: Float[Tensor, "batch d_model"],
    at: list[int],
    k: int,
) -> tuple[tuple[Route, ...], ...]:
    """The k largest ways of a path in each prompt, the largest first.

    Args:
        run: The frozen run.
        components: The path.
        suffix: Its heads, the head of a value bias included.
        value: Its value, over all ways.
        u: The direction of the logit at its own position.
        at: That position in each prompt.
        k: How many.
    """
    if len(components) == 1:  # no head carries it: it is read where it stands
        return tuple((Route((end,), v),) for end, v in zip(at, value.tolist(), strict=True))
    start, hops = _start(run, components, suffix, u)
    return tuple(_best(start[row], [hop[row] for hop in hops], end, k) for row, end in enumerate(at))


def _start(
    run: FrozenRun, components: tuple[Component, ...], suffix: Suffix, u: Float[Tensor, "batch d_model"]
) -> tuple[Float[Tensor, "batch pos"], list[Float[Tensor, "batch query key"]]]:
    """``g[p₀]`` and the factor of every hop, in the order from leaf to logit."""
    hops: list[Tensor] = []
    for head in reversed(suffix[1:]):
        u = u @ run.layers[head.layer].write[head.head].mT @ run.layers[head.layer].read[head.head].mT
        hops.insert(0, _hop(run, head))
    first, leaf = suffix[0], components[0]
    layer = run.layers[first.layer]
    inner = u @ layer.write[first.head].mT
    if isinstance(leaf, ValueBias):
        rows = layer.pattern[:, first.head].sum(-1)
        rows = rows if layer.post is None else rows / layer.post
        return rows * (inner @ layer.biases["value"][first.head])[:, None], hops
    if leaf == NormBias("ln1", first.layer):
        constant = (inner @ layer.biases["norm"][first.head])[:, None].expand(-1, layer.pattern.shape[-1])
        return constant, [_hop(run, first, scaled=False), *hops]
    return _leaf(run, leaf, inner @ layer.read[first.head].mT), [_hop(run, first), *hops]


def _leaf(run: FrozenRun, leaf: Component, u: Float[Tensor, "batch d_model"]) -> Float[Tensor, "batch pos"]:
    return (run.writes[run.leaves.index(leaf)] @ u[..., None])[..., 0]


def _hop(run: FrozenRun, head: Head, *, scaled: bool = True) -> Float[Tensor, "batch query key"]:
    layer = run.layers[head.layer]
    factor = layer.pattern[:, head.head]
    if scaled and layer.scale is not None:
        factor = factor / layer.scale[:, None]
    return factor if layer.post is None else factor / layer.post[..., None]


def _best(start: Float[Tensor, " pos"], hops: list[Float[Tensor, "query key"]], end: int, k: int) -> tuple[Route, ...]:
    """The ways with the largest products that arrive at a position."""
    values = start[:, None]
    # Where each kept value came from, hop by hop: (position, which of the values kept there).
    back: list[tuple[Tensor, Tensor]] = []
    for hop in hops:
        kept = values.shape[1]
        products = (hop[:, :, None] * values).flatten(1)
        chosen = products.abs().topk(min(k, products.shape[1]), dim=1).indices
        values = products.gather(1, chosen)
        back.append((chosen // kept, chosen % kept))
    arrived = [(which, value) for which, value in enumerate(values[end].tolist()) if value != 0.0]
    return tuple(Route((*_trace(back, end, which), end), value) for which, value in arrived)


def _trace(back: list[tuple[Tensor, Tensor]], position: int, which: int) -> tuple[int, ...]:
    way: list[int] = []
    for positions, places in reversed(back):
        position, which = int(positions[position, which]), int(places[position, which])
        way.append(position)
    return tuple(reversed(way))
