"""Direct edges between components: who writes before whom, what a write changes, what a receiver makes of it.

Everything between the two is held, so a receiver reads the stream of the unpatched run plus the change of one write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from analysis.patching.pairs import Pair
from circuits.components import MLP, Attn, Component, Embed, Head, Neuron, PosEmbed, as_component, check_component
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.names import EMBED, POS_EMBED, block_names
from circuits.run import Run

INPUTS = ("q", "k", "v")
_HEAD_INPUT = re.compile(r"L(?P<layer>\d+)(?P<kind>H|KV)(?P<head>\d+)\.(?P<input>[qkv])")


@dataclass(frozen=True)
class Receiver:
    """Where an edge ends: one input of a head, the input of an MLP, or the logits.

    Attributes:
        layer: Its layer; None for the logits.
        head: Its head, a key/value head for the inputs k and v; None for an MLP.
        input: ``"q"``, ``"k"`` or ``"v"``; None for an MLP.
    """

    layer: int | None = None
    head: int | None = None
    input: str | None = None

    def text(self, config: GPTConfig) -> str:
        """``L3H2.q``, ``L3.mlp`` or ``logits``; ``L3KV1.k`` where heads share keys and values."""
        if self.layer is None:
            return "logits"
        if self.head is None:
            return f"L{self.layer}.mlp"
        shared = self.input != "q" and config.n_kv_heads < config.n_heads
        return f"L{self.layer}{'KV' if shared else 'H'}{self.head}.{self.input}"


def senders_of(senders: str | Sequence[Component | str], config: GPTConfig) -> tuple[Component, ...]:
    """The senders that ``"heads"``, ``"mlps"`` or a list stands for.

    Raises:
        TypeError: Neither a word nor a list of components.
        ValueError: Another word, an empty list, or a component that does not write by itself.
        IndexError: A layer, head or neuron that the model does not have.
    """
    layers = range(config.n_layers)
    if senders == "heads":
        return tuple(Head(layer, head) for layer in layers for head in range(config.n_heads))
    if senders == "mlps" and config.has_mlp:
        return tuple(MLP(layer) for layer in layers)
    expected = "senders must be 'heads', 'mlps' (where there are any) or a list of components"
    if isinstance(senders, str):
        raise ValueError(f"{expected}, not {senders!r}")
    if not isinstance(senders, Iterable):
        raise TypeError(f"{expected}, not {senders!r}")
    components = tuple(as_component(sender) for sender in senders)
    if not components:
        raise ValueError(f"{expected}, not {senders!r}")
    for sender in components:
        check_component(sender, config)
        if not isinstance(sender, Embed | PosEmbed | Head | MLP | Neuron | Attn):
            raise ValueError(f"{sender} is no sender: it writes the same on every prompt, or more than one write")
    return components


def receivers_of(
    receivers: str | Sequence[Component | str], inputs: Sequence[str], config: GPTConfig
) -> tuple[Receiver, ...]:
    """The receivers that ``"heads"``, ``"mlps"``, ``"logits"`` or a list of heads, MLPs and ``"logits"`` stands for.

    Raises:
        TypeError: Neither a word nor a list.
        ValueError: Something else, an empty list, or an input other than q, k and v.
        IndexError: A layer or head that the model does not have.
    """
    if not isinstance(inputs, Iterable):
        raise TypeError(f"inputs of heads must be a list of {', '.join(INPUTS)}, not {inputs!r}")
    unknown = [name for name in inputs if name not in INPUTS]
    if unknown or not inputs:
        raise ValueError(f"inputs of heads are among {', '.join(INPUTS)}, not {unknown or list(inputs)}")
    given: Iterable[Component | str]
    if receivers == "heads":
        given = [Head(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    elif receivers == "mlps" and config.has_mlp:
        given = [MLP(layer) for layer in range(config.n_layers)]
    else:
        given = [receivers] if isinstance(receivers, str) else receivers
    expected = "receivers must be 'heads', 'mlps', 'logits' or a list of heads, MLPs and 'logits'"
    if not isinstance(given, Iterable):
        raise TypeError(f"{expected}, not {given!r}")
    found: dict[Receiver, None] = {}
    for receiver in given:
        found.update(dict.fromkeys(_receivers(receiver, inputs, config)))
    if not found:
        raise ValueError(f"{expected}, not {receivers!r}")
    return tuple(found)


def _receivers(given: Component | str, inputs: Sequence[str], config: GPTConfig) -> Iterator[Receiver]:
    if given == "logits":
        yield Receiver()
        return
    named = _HEAD_INPUT.fullmatch(given) if isinstance(given, str) else None
    if named is not None:
        yield _one_input(named, config)
        return
    if isinstance(given, str) and any(character.isdigit() for character in given):
        given = as_component(given)
    if not isinstance(given, Head | MLP):
        raise ValueError(f"receivers are 'heads', 'mlps', 'logits', heads and MLPs; {given!r} is none")
    check_component(given, config)
    if isinstance(given, MLP):
        yield Receiver(given.layer)
        return
    for name in inputs:
        yield Receiver(given.layer, given.head if name == "q" else given.head // config.group_size, name)


def _one_input(named: re.Match[str], config: GPTConfig) -> Receiver:
    """The receiver that ``L1H2.q`` or ``L1KV0.k`` names, as `Receiver.text` does."""
    layer, head, name = int(named["layer"]), int(named["head"]), named["input"]
    if named["kind"] == "KV":
        if name == "q":
            raise ValueError(f"{named.string!r} is no receiver: every head has queries of its own, as in L0H0.q")
        head *= config.group_size
    check_component(Head(layer, head), config)
    return Receiver(layer, head if name == "q" else head // config.group_size, name)


def has_edge(sender: Component, receiver: Receiver, config: GPTConfig) -> bool:
    """Whether what the sender writes is in the stream that the receiver reads."""
    return _written_at(sender, config) < _read_at(receiver, config)


def _written_at(sender: Component, config: GPTConfig) -> float:
    layer: int | None = getattr(sender, "layer", None)
    if layer is None:
        return -1
    behind_attention = isinstance(sender, MLP | Neuron) and not config.parallel_blocks
    return layer + (0.5 if behind_attention else 0)


def _read_at(receiver: Receiver, config: GPTConfig) -> float:
    if receiver.layer is None:
        return math.inf
    behind_attention = receiver.head is None and not config.parallel_blocks
    return receiver.layer + (0.5 if behind_attention else 0)


# --- what a sender's write changes ----------------------------------------------------------------------------------


def written_names(senders: Iterable[Component]) -> list[str]:
    """The activations from which the writes of these senders are made."""
    return list(dict.fromkeys(_written_name(sender) for sender in senders))


def _written_name(sender: Component) -> str:
    if isinstance(sender, Embed | PosEmbed):
        return EMBED if isinstance(sender, Embed) else POS_EMBED
    names = block_names(sender.layer)  # type: ignore[attr-defined]  # every other sender has a layer
    fields = {Head: names.z, Attn: names.attn_out, MLP: names.mlp_out, Neuron: names.post}
    return fields[type(sender)]


def write_change(
    model: HookedGPT, sender: Component, base: Mapping[str, Tensor], source: Mapping[str, Tensor]
) -> Float[Tensor, "batch pos d_model"]:
    """What the sender writes in the source run less what it writes in the base run, nothing else changed.

    Args:
        model: The model.
        sender: The component.
        base: The base run, with `written_names`.
        source: The same activations of the source run, laid out like the base's.
    """
    name = _written_name(sender)
    change = source[name] - base[name]
    if not isinstance(sender, Head | Neuron):
        return change
    block = model.blocks[sender.layer]
    index = sender.head if isinstance(sender, Head) else sender.index
    if not model.config.branch_norm:
        if isinstance(sender, Head):
            return change[:, :, index] @ block.attn.W_O[index]
        assert block.mlp is not None
        return change[:, :, index, None] * block.mlp.W_out[index]
    swapped = base[name].clone()
    swapped[:, :, index] += change[:, :, index]
    return _branch(model, sender, swapped) - _branch(model, sender, base[name])


def _branch(model: HookedGPT, sender: Head | Neuron, activation: Tensor) -> Tensor:
    """What the branch of a sender adds, given every head's z or every neuron's activation."""
    block = model.blocks[sender.layer]
    run = model.start(torch.zeros(activation.shape[:2], dtype=torch.long, device=activation.device))
    if isinstance(sender, Head):
        return block.attention_write(block.attn.combine(activation, block.names, run), run)
    return block.mlp_write(activation, run)


# --- what heads make of it ------------------------------------------------------------------------------------------


def heads_reading(
    model: HookedGPT,
    layer: int,
    pair: Pair,
    resid_pre: Float[Tensor, "batch pos d_model"],
    changes: Float[Tensor, "sender batch pos d_model"],
    inputs: Iterable[str],
) -> dict[str, Float[Tensor, "sender batch pos head d_head"]]:
    """`z` of every head of a layer when one of its inputs reads the stream with one sender's change.

    Args:
        model: The model.
        layer: The layer.
        pair: The runs.
        resid_pre: The base run's stream before the layer.
        changes: What each sender changes.
        inputs: Which inputs to change, each by itself.
    """
    block, senders = model.blocks[layer], len(changes)
    attn, names = block.attn, block.names
    mask: Bool[Tensor, "rows pos"] | None = None if pair.base.mask is None else pair.base.mask.repeat(senders, 1)
    run = model.start(pair.base.tokens.repeat(senders, 1), mask)
    plain = model.start(pair.base.tokens, pair.base.mask)

    def projected(stream: Tensor, of: Run) -> list[Tensor]:
        normed = block.normalised(stream)
        q, k, v = attn.project((normed, normed, normed))
        return [*attn.positioned(q, k, names, of), v]

    clean = [part.repeat(senders, 1, 1, 1) for part in projected(resid_pre, plain)]
    changed = projected((resid_pre + changes).flatten(0, 1), run)
    found = {}
    for name in inputs:
        place = INPUTS.index(name)
        q, k, v = (changed[i] if i == place else clean[i] for i in range(3))
        found[name] = attn.attend(q, k, v, names, run).unflatten(0, (senders, -1))
    return found
