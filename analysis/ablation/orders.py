"""Blocks left out, or run in another order (lecture, aside 3.5): how much does their order matter?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ablation.planning import AnyMetric
from analysis.ablation.tested import Tested
from analysis.metrics import Prompts, as_metric, measured
from analysis.results import result
from analysis.uncertainty import bootstrap_interval, check_level, sign_flip_p_values, weighted_mean
from circuits.arguments import require_model, seeded
from circuits.model import HookedGPT
from circuits.tokens import check_mask, check_tokens
from circuits.validity import require_whole


@result
class BlockOrders(Tested):
    """What running the blocks in other orders changes; an effect is changed minus clean.

    Attributes:
        orders: The layers in the order in which they were run, as text; a layer that is not named was left out.
        clean: The metric of the unchanged run, for each prompt.
        effect: Its change.
        weight: What each prompt counts in the mean.
        mean: Weighted mean effect.
        interval: Bootstrap interval of that mean over prompts; NaN for a single prompt.
        p: p-value of that mean being 0, by flipping the signs of prompts; 1 for a single prompt.
        metric: What was measured.
        level: Level of the interval.
    """

    table = ("mean", "interval", "p")
    orders: tuple[str, ...]
    clean: Float[Tensor, " batch"]
    effect: Float[Tensor, "order batch"]
    weight: Float[Tensor, " batch"]
    mean: Float[Tensor, " order"]
    interval: Float[Tensor, "order bound"]
    p: Float[Tensor, " order"]
    metric: str
    level: float

    def title(self) -> str:
        """What was done, what was measured, and how many effects stand out against how many by chance."""
        clean = float(weighted_mean(self.clean[None], self.weight))
        return (
            f"Change of {self.metric} (clean {clean:.4g}) when the blocks are run in another order, those not "
            f"named left out; {self._how_sure()}"
        )


@torch.no_grad()
def reorder_blocks(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    orders: Sequence[Sequence[int]],
    metric: AnyMetric = "loss",
    *,
    attention_mask: Tensor | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> BlockOrders:
    """Run the blocks in other orders, with some left out or run twice, and measure what changes.

    An order shares the clean run, and every other order, up to where they part.

    Args:
        model: A model.
        tokens: Prompts.
        orders: For each run the layers in order: ``[1, 0, 2, 3]`` swaps the first two, ``[0, 2, 3]`` leaves 1 out.
        metric: As for `ablate`.
        attention_mask: 1 for tokens, 0 for padding.
        level: Level of the bootstrap interval over prompts; the title counts effects with ``p ≤ 1 − level``.
        seed: Seed of the bootstrap and of the p-values.

    Raises:
        TypeError: No list of orders; a flat list of layers is one order, and goes into a list.
        IndexError: A layer that the model does not have.
        ValueError: No orders, or a metric that is not one number for each prompt.
    """
    require_model(model)
    tokens = check_tokens(tokens, model.config)
    mask = check_mask(attention_mask, tokens)
    check_level(level)
    seeded(seed)
    orders = _checked(orders, model.config.n_layers)
    n_layers = model.config.n_layers
    judge = as_metric(metric)
    streams: dict[tuple[int, ...], Tensor] = {(): model.embedding(tokens, model.start(tokens, mask))}
    prompts = Prompts(tokens, mask, model.unembedding(_through(model, tokens, mask, tuple(range(n_layers)), streams)))
    clean = measured(judge, prompts.clean, prompts, "the clean run")
    effects = []
    for order in orders:
        logits = model.unembedding(_through(model, tokens, mask, tuple(order), streams))
        effects.append(measured(judge, logits, prompts, f"running the blocks {list(order)}") - clean)
    effect, weight = torch.stack(effects), judge.weights(prompts)
    return BlockOrders(
        orders=tuple(" ".join(map(str, order)) for order in orders),
        clean=clean,
        effect=effect,
        weight=weight,
        mean=weighted_mean(effect, weight).to(effect.dtype),
        interval=bootstrap_interval(effect, weight, level, seed=seed),
        p=sign_flip_p_values(effect, weight, seed=seed),
        metric=judge.name,
        level=level,
    )


def _checked(orders: object, n_layers: int) -> list[list[int]]:
    """Orders of layers, or an error that says which is none."""
    expected = "orders must be a list of orders, each a list of layers, such as [[1, 0]]"
    if isinstance(orders, str) or not isinstance(orders, Iterable):
        raise TypeError(f"{expected}; not {orders!r}")
    found = []
    for order in orders:
        if isinstance(order, str) or not isinstance(order, Iterable):
            raise TypeError(f"{expected}; {order!r} is no order")
        layers = [require_whole("layer", layer, least=-(2**63)) for layer in order]
        outside = [layer for layer in layers if not 0 <= layer < n_layers]
        if outside:
            raise IndexError(f"layer {outside[0]} of order {layers} is not in a model of {n_layers} layers")
        found.append(layers)
    if not found:
        raise ValueError("no order of the blocks was given")
    return found


def _through(
    model: HookedGPT,
    tokens: Tensor,
    mask: Tensor | None,
    order: tuple[int, ...],
    streams: dict[tuple[int, ...], Tensor],
) -> Tensor:
    """The stream after these blocks; `streams` remembers it for every beginning of an order."""
    if order not in streams:
        before = _through(model, tokens, mask, order[:-1], streams)
        streams[order] = model.blocks[order[-1]](before, model.start(tokens, mask))
    return streams[order]
