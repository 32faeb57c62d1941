"""Which components a sweep takes out, one group after the other."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from circuits.components import (
    MLP,
    Attn,
    Block,
    Component,
    Head,
    Neuron,
    as_component,
    check_component,
    parse_component,
)
from circuits.config import GPTConfig

# One component, or several that are taken out together.
Target = Component | tuple[Component, ...]
# How a caller may write one: a component or its text, or several of them.
Given = Component | str | Sequence[Component | str]

_WORDS = ("heads", "mlps", "attns", "blocks", "neurons")


def targets_of(
    components: str | Component | Sequence[Given], config: GPTConfig, what: str = "components"
) -> tuple[Target, ...]:
    """The targets that a word (``"heads"``, ``"mlps"``, ``"attns"``, ``"blocks"``, ``"neurons"``) or a list stands for.

    Components may be given as their text, ``"L0H1"``.

    Args:
        components: What a caller gave.
        config: The architecture.
        what: The argument's name, for messages.

    Raises:
        ValueError: An unknown word (with the nearest), an empty list, or a part that the model lacks.
        IndexError: A layer, head or neuron that the model does not have.
        TypeError: Something that is no component.
    """
    if isinstance(components, str):
        return _of_word(components, config, what)
    if not isinstance(components, Component | Iterable):
        words = ", ".join(map(repr, _WORDS))
        raise TypeError(
            f"{what} must be one of {words}, a component, such as Head(0, 1) or its text 'L0H1', or a list of them, "
            f"not {components!r}"
        )
    given = [components] if isinstance(components, Component) else list(components)
    targets = tuple(_target(target) for target in given)
    if not targets or () in targets:
        raise ValueError(f"{what}: expected at least one component to ablate, got {given}")
    for target in targets:
        for component in members(target):
            check_component(component, config)
    return targets


def _target(given: Given) -> Target:
    if isinstance(given, list | tuple):
        return tuple(as_component(component) for component in given)
    return as_component(given)  # type: ignore[arg-type]  # what else it is, is said there


def members(target: Target) -> tuple[Component, ...]:
    """The components of a target."""
    return target if isinstance(target, tuple) else (target,)


def with_pairs(targets: Sequence[Target]) -> tuple[Target, ...]:
    """The targets, then every two of them together: ``(0, 1), (0, 2), …``.

    Raises:
        ValueError: Fewer than two.
    """
    if len(targets) < 2:
        raise ValueError(f"pairs need at least 2 components, got {len(targets)}")
    return (*targets, *((*members(a), *members(b)) for a, b in itertools.combinations(targets, 2)))


def _of_word(word: str, config: GPTConfig, what: str) -> tuple[Target, ...]:
    if word not in _WORDS and any(character.isdigit() for character in word):
        component = parse_component(word)
        check_component(component, config)
        return (component,)
    if word not in _WORDS:
        near = difflib.get_close_matches(word, _WORDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; the words are {', '.join(_WORDS)}"
        raise ValueError(f"{what} {word!r} names no kind of component{hint}")
    if word in ("mlps", "neurons") and not config.has_mlp:
        raise ValueError(f"{what} {word!r}: the model is attention-only")
    layers = range(config.n_layers)
    if word == "heads":
        return tuple(Head(layer, head) for layer in layers for head in range(config.n_heads))
    if word == "neurons":
        return tuple(Neuron(layer, index) for layer in layers for index in range(config.d_mlp))
    kind = {"attns": Attn, "mlps": MLP, "blocks": Block}[word]
    return tuple(kind(layer) for layer in layers)
