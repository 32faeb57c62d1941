"""The component vocabulary: what writes to the residual stream, and one text form for each.

Decompositions, attributions, ablations, patches and paths all speak of components, so that one result can be laid
beside another. ``str(Head(2, 3))`` is ``"L2H3"`` and ``parse_component("L2H3")`` is ``Head(2, 3)``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass

from circuits.config import GPTConfig


@dataclass(frozen=True, slots=True, order=True)
class Component:
    """Anything that writes to the residual stream."""


@dataclass(frozen=True, slots=True, order=True)
class Embed(Component):
    """The token embedding."""

    def __str__(self) -> str:
        return "embed"


@dataclass(frozen=True, slots=True, order=True)
class PosEmbed(Component):
    """The learned positional embedding."""

    def __str__(self) -> str:
        return "pos_embed"


@dataclass(frozen=True, slots=True, order=True)
class Head(Component):
    """One attention head, without the output bias of its layer."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True, slots=True, order=True)
class AttnBias(Component):
    """The output bias `b_O` of an attention layer."""

    layer: int

    def __str__(self) -> str:
        return f"L{self.layer}.attn_bias"


@dataclass(frozen=True, slots=True, order=True)
class MLP(Component):
    """A whole MLP, its output bias included."""

    layer: int

    def __str__(self) -> str:
        return f"L{self.layer}.mlp"


@dataclass(frozen=True, slots=True, order=True)
class Neuron(Component):
    """One hidden unit of an MLP: its activation times its row of `W_out`."""

    layer: int
    index: int

    def __str__(self) -> str:
        return f"L{self.layer}.n{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class MLPBias(Component):
    """The output bias `b_out` of an MLP."""

    layer: int

    def __str__(self) -> str:
        return f"L{self.layer}.mlp_bias"


@dataclass(frozen=True, slots=True, order=True)
class Attn(Component):
    """All heads of a layer and their output bias."""

    layer: int

    def __str__(self) -> str:
        return f"L{self.layer}.attn"


@dataclass(frozen=True, slots=True, order=True)
class Block(Component):
    """A whole block; dropping it leaves the identity, its norms skipped."""

    layer: int

    def __str__(self) -> str:
        return f"L{self.layer}"


@dataclass(frozen=True, slots=True, order=True)
class ValueBias(Component):
    """What the value bias of a head writes: ``b_V W_O``, carried by the row sum of its attention."""

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}.value_bias"


@dataclass(frozen=True, slots=True, order=True)
class NormBias(Component):
    """The shift β of a norm; `norm` is ``"ln1"``, ``"ln2"``, ``"ln1_post"``, ``"ln2_post"`` or ``"ln_final"``."""

    norm: str
    layer: int | None = None

    def __str__(self) -> str:
        return f"{'' if self.layer is None else f'L{self.layer}.'}{self.norm}_bias"


@dataclass(frozen=True, slots=True, order=True)
class UnembedBias(Component):
    """The bias `b_U` on the logits."""

    def __str__(self) -> str:
        return "unembed_bias"


_WHOLE = {str(c): c for c in (Embed(), PosEmbed(), UnembedBias(), NormBias("ln_final"))}
_NORMS = "ln1|ln2|ln1_post|ln2_post"
_PATTERN = re.compile(
    rf"L(?P<layer>\d+)(?:H(?P<head>\d+)(?P<value_bias>\.value_bias)?|\.n(?P<neuron>\d+)|\.(?P<norm>{_NORMS})_bias"
    r"|\.(?P<part>attn_bias|mlp_bias|attn|mlp))?"
)
_PARTS = {"attn_bias": AttnBias, "mlp_bias": MLPBias, "attn": Attn, "mlp": MLP}


def parse_component(text: str) -> Component:
    """The component that a text names; the inverse of ``str``.

    Raises:
        ValueError: The text names none; the message shows the forms.
    """
    if text in _WHOLE:
        return _WHOLE[text]
    match = _PATTERN.fullmatch(text)
    if match is None:
        close = difflib.get_close_matches(text, _WHOLE, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        forms = "L2H3, L2.mlp, L2.n17, L2.attn, L2.attn_bias, L2.mlp_bias, L2, embed, pos_embed"
        raise ValueError(f"{text!r} is not a component{hint} (the forms are {forms})")
    layer = int(match["layer"])
    if match["head"] is not None:
        return (ValueBias if match["value_bias"] else Head)(layer, int(match["head"]))
    if match["neuron"] is not None:
        return Neuron(layer, int(match["neuron"]))
    if match["norm"] is not None:
        return NormBias(match["norm"], layer)
    if match["part"] is not None:
        part: Component = _PARTS[match["part"]](layer)
        return part
    return Block(layer)


def as_component(given: Component | str) -> Component:
    """The component itself, or the one that a text names: wherever a component is taken, its text is taken too.

    Raises:
        TypeError: Neither a component nor text.
        ValueError: A text that names none; the message shows the forms.
    """
    if isinstance(given, Component):
        return given
    if isinstance(given, str):
        return parse_component(given)
    raise TypeError(f"expected a component, such as Head(0, 1) or its text 'L0H1', not {given!r}")


def as_head(given: Component | str, config: GPTConfig) -> Head:
    """The head of a model that a component or a text is.

    Raises:
        IndexError: A head that the model does not have.
        ValueError: A component that is no head.
        TypeError: No component, as for `as_component`.
    """
    head = as_component(given)
    if not isinstance(head, Head):
        raise ValueError(f"expected a head, such as Head(0, 1) or 'L0H1', not {given!r}")
    check_component(head, config)
    return head


def component_row(given: Component | str, rows: tuple[Component, ...], of: str) -> int:
    """Which row of a table of components is that of one component.

    Raises:
        KeyError: A component that has no row; the message shows those that have.
        TypeError, ValueError: No component, as for `as_component`.
    """
    component = as_component(given)
    if component not in rows:
        written = f"{type(component).__name__}({', '.join(map(repr, dataclasses.astuple(component)))})"
        raise KeyError(f"{written} is no row of this {of}; they are {few_components(rows)}")
    return rows.index(component)


def few_components(components: tuple[Component, ...], most: int = 12) -> str:
    """The first components as text, and how many there are where some are left out."""
    shown = ", ".join(map(str, components[:most]))
    return shown if len(components) <= most else f"{shown}, … ({len(components)} in all)"


def check_component(component: Component, config: GPTConfig) -> None:
    """Refuse a component that a model of this architecture does not have.

    Raises:
        TypeError: Not a component at all.
        IndexError: A layer, head or neuron out of range; the message says how many there are.
        ValueError: A part that the architecture lacks (positions, biases, MLPs).
    """
    if not isinstance(component, Component):
        raise TypeError(f"expected a component, such as Head(0, 1), not {component!r}")
    layer = getattr(component, "layer", None)
    if layer is not None:
        _in_range(component, "layer", layer, config.n_layers)
    if isinstance(component, Head):
        _in_range(component, "head", component.head, config.n_heads)
        return  # every architecture has heads
    if isinstance(component, ValueBias):
        _in_range(component, "head", component.head, config.n_heads)
    if isinstance(component, MLP | Neuron | MLPBias) and config.attn_only:
        raise ValueError(f"{component} does not exist: the model is attention-only")
    if isinstance(component, Neuron):
        _in_range(component, "neuron", component.index, config.d_mlp)
    reason = _lacking(component, config)
    if reason is not None:
        raise ValueError(f"{component} does not exist in this model: {reason}")


def _lacking(component: Component, config: GPTConfig) -> str | None:
    """Why an architecture has no such component; None where it has."""
    match component:
        case PosEmbed() if config.positions != "learned":
            return "positions are not learned"
        case AttnBias() if not config.bias_out:
            return "bias_out is False"
        case MLPBias() if not config.bias_mlp:
            return "bias_mlp is False"
        case ValueBias() if not config.bias_qkv:
            return "bias_qkv is False"
        case UnembedBias() if not config.bias_unembed:
            return "bias_unembed is False"
        case NormBias() if config.norm != "layernorm":
            return "its norms have no shift"
        case _:
            return None


def _in_range(component: Component, axis: str, index: int, size: int) -> None:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(f"{axis} must be a whole number, not {index!r}")
    if not 0 <= index < size:
        raise IndexError(f"{component}: {axis} {index} is not in a model of {size} {axis}s (0 to {size - 1})")
