"""Direct logit attribution: what each component's own write adds to a logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.components import Component, component_row
from circuits.model import HookedGPT
from circuits.residual.positions import Position, Positions, resolve_positions
from circuits.residual.readout import Readout, Tokens, direction_readout, logit_readout
from circuits.residual.requirements import Unit, check_linear, check_unit, require_finite, stop_layer, write_names
from circuits.residual.sources import by_layer, by_source_position
from circuits.residual.table import value_frame
from circuits.residual.writes import stream_writes

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class LogitAttribution:
    """Rows that sum to a logit, a logit difference, or another readout of the stream.

    Attributes:
        components: Who each row belongs to, the constants (final norm's shift, `b_U`) last.
        values: ``[component batch]``, ``[component batch pos]`` for all positions; in logits.
        total: What the rows sum to, read off the run itself.
        error: The largest ``|Σ rows − total|``.
        quantity: What was attributed, in words.
        position: The position of each prompt; None for all positions.
        sources: On request, the rows split by the position that was read, ``[component batch source]``; what is not a
            head reads its own position.
    """

    components: tuple[Component, ...]
    values: Float[Tensor, "component batch *pos"]
    total: Float[Tensor, " batch *pos"]
    error: float
    quantity: str
    position: Int[Tensor, " batch"] | None
    sources: Float[Tensor, "component batch *pos source"] | None = None

    def __getitem__(self, component: Component | str) -> Float[Tensor, " batch *pos"]:
        """The row of one component, given as ``Head(0, 1)`` or ``"L0H1"``.

        Raises:
            KeyError: A component that is no row.
        """
        return self.values[component_row(component, self.components, "attribution")]

    def to_frame(self) -> pd.DataFrame:
        """One row per component and prompt (and position, and source position), in logits."""
        values = self.values if self.sources is None else self.sources
        axes = ["batch", *(["pos"] if self.position is None else []), *(["source"] if self.sources is not None else [])]
        return value_frame(self.components, dict(zip(axes, values.shape[1:], strict=True)), {"value": values})

    def __repr__(self) -> str:
        n, shape = len(self.components), list(self.values.shape[1:])
        mean = self.values.flatten(1).mean(1)
        lines = [
            f"LogitAttribution of the {self.quantity}: {n} components × {shape} prompts, "
            f"total {float(self.total.mean()):.4f} (mean), error {self.error:.1e}"
        ]
        lines += [
            f"  {self.components[i]!s:<16} {float(mean[i]):+.4f}" for i in mean.abs().argsort(descending=True)[:8]
        ]
        return "\n".join(lines + ([f"  … {n} rows in all"] if n > 8 else []))


@torch.no_grad()
def direct_logit_attribution(
    model: HookedGPT,
    cache: ActivationCache,
    correct: Tokens,
    wrong: Tokens | None = None,
    position: Position = -1,
    *,
    unit: Unit = "head",
    by_source: bool = False,
    layer: int | None = None,
    after_norm: bool = False,
) -> LogitAttribution:
    """Split a logit, or the lead of one logit over another, into what every write adds to it directly.

    ``logit = Σ_c write_c · centred(γ ⊙ w) / scale + β · w + b_U``, with ``w = W_U[:, correct]`` (less that of `wrong`)
    and the final norm frozen at the run's own scale. A head's row is ``z · (W_O centred(γ ⊙ w)) / scale``; what it
    writes is never formed. Where the model caps its logits, the logit before the cap is attributed, and `quantity` says
    so. A single logit moves with any shift of all logits, which no probability sees (centring `W_U` is such a shift); a
    difference does not. Source: Elhage et al. 2021; Nostalgebraist 2020 for the readout.

    Args:
        model: A pre-norm model, or one without norms.
        cache: Of the run in question, with the activations that `needed_names` lists.
        correct: The token, its id or its text: one for all prompts, one for each, or (all positions) one for each
            position. A tensor of floats is a direction instead, ``[d_model]`` or one for each prompt: the rows then sum
            to the inner product of the stream with it.
        wrong: The token to compare with, likewise.
        position: One position, or one for each prompt: −1 is the last real token. None attributes at every position.
        unit: ``"layer"`` (attention and MLP of each layer), ``"head"``, or ``"neuron"`` (heads and neurons).
        by_source: Also split heads by the position that they read; a value bias goes with its attention weight.
        layer: For a direction: of the stream before this block; None, after the last.
        after_norm: For a direction: what the final norm makes of the stream is projected, as for a token.

    Raises:
        KeyError: The cache lacks activations; the message says which, and how to capture them.
        ValueError: A post-norm model, a cache of another architecture, a shape that does not fit; NaN or infinities in
            activations or weights, with the first place.
        IndexError: A token, layer or position that does not exist.
    """
    check_unit(unit)
    check_linear(model, cache)
    stop = stop_layer(model.config, layer)
    used = write_names(model.config, unit, stop, by_source=by_source)
    cache.require(*used)
    at = resolve_positions(position, cache, cache[names.EMBED].shape, model.W_E)
    readout = _readout(model, cache, correct, wrong, at, layer, after_norm)
    # By source, the sum over a layer's heads is taken after the split.
    rows = stream_writes(model, cache, "head" if by_source and unit == "layer" else unit, stop, at)
    u, shape = readout.direction, readout.total.shape
    values = readout.divided(torch.cat([row.along(u).expand(-1, *shape) for row in rows]))
    values = torch.cat([values, *(value.expand(shape)[None] for _, value in readout.constants)])
    components = tuple(component for row in rows for component in row.components)
    components += tuple(component for component, _ in readout.constants)
    sources = by_source_position(model, cache, rows, values, readout, at) if by_source else None
    if by_source and unit == "layer":
        values = by_layer(components, values)[1]
        assert sources is not None
        components, sources = by_layer(components, sources)
    require_finite(f"the attribution of the {readout.quantity}", values, model, cache, [*used, *readout.used])
    summed = values.sum(0) if sources is None else sources.sum((0, -1))
    return LogitAttribution(
        components=components,
        values=at.squeeze(values, 2),
        total=at.squeeze(readout.total, 1),
        error=float((summed - readout.total).abs().max()),
        quantity=readout.quantity,
        position=at.index,
        sources=None if sources is None else at.squeeze(sources, 2),
    )


def _readout(
    model: HookedGPT,
    cache: ActivationCache,
    correct: Tokens,
    wrong: Tokens | None,
    at: Positions,
    layer: int | None,
    after_norm: bool,
) -> Readout:
    if isinstance(correct, Tensor) and correct.is_floating_point():
        if wrong is not None:
            raise TypeError("a direction has no wrong token: give the difference of two directions")
        stop = stop_layer(model.config, layer)
        return direction_readout(model, cache, correct, stop, at, after_norm=after_norm)
    if layer is not None or after_norm:
        raise ValueError("layer and after_norm are for directions: a token's logit is read after the final norm")
    return logit_readout(model, cache, correct, wrong, at)
