"""From interventions to lanes: what each set of them can change, and what of the clean run that needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from circuits import names as vocabulary
from circuits.model import HookedGPT
from circuits.rerun.edits import Keep
from circuits.rerun.intervention import Intervened, Intervention, Placed, Placer
from circuits.rerun.layout import Lane
from circuits.rerun.stages import Entry, Stage, clean_names, entries

# What can be held at the clean run -> how the names of its activations end.
FREEZES = {"patterns": ".hook_pattern", "norms": ".hook_scale"}


def lanes_of(
    model: HookedGPT,
    tokens: Tensor,
    mask: Bool[Tensor, "batch pos"] | None,
    interventions: Sequence[Intervened],
    freeze: Iterable[str] = (),
) -> list[Lane]:
    """One lane for each intervention, or set of interventions that apply together.

    Raises:
        TypeError, KeyError, ValueError, IndexError: An intervention that this model and batch cannot have.
    """
    if isinstance(interventions, Intervention | str) or not isinstance(interventions, Iterable):
        raise TypeError(
            "interventions must be a list of interventions, such as [Intervention('L0H1', Zero())], not "
            f"{interventions!r}"
        )
    placer = Placer(model, tokens, mask)
    frozen = frozen_names(model, freeze)
    stages = entries(model.config)
    kept = [Placed(name, stages[name], Keep()) for name in frozen]
    lanes, cones = [], _Cones(tokens)
    for number, given in enumerate(interventions):
        together = [given] if isinstance(given, Intervention) else _listed(number, given)
        lanes.append(_lane(number, tuple(map(placer, together)), kept, cones))
    return lanes


def _listed(number: int, given: object) -> list[Intervention]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"set {number} must be an Intervention or a list of them, not {given!r}")
    return list(given)


class _Cones:
    """The first position and the rows that changes can reach; each mask is looked at once."""

    def __init__(self, tokens: Tensor) -> None:
        self.nowhere = tokens.shape[1]
        self.everywhere = torch.arange(len(tokens), device=tokens.device)
        self._known: dict[tuple[int, ...], tuple[int, Tensor]] = {}

    def of(self, acting: Sequence[Placed]) -> tuple[int, Tensor]:
        """Of changes that apply together."""
        masks = [placed.where for placed in acting if placed.where is not None]
        if len(masks) < len(acting):
            return 0, self.everywhere
        key = tuple(map(id, masks))  # the changes keep their masks, so an id is not used twice
        if key not in self._known:
            touched = masks[0] if len(masks) == 1 else torch.stack(masks).any(0)
            columns = touched.any(0).nonzero()[:, 0]
            start = int(columns[0]) if len(columns) else self.nowhere
            self._known[key] = start, touched.any(1).nonzero()[:, 0]
        return self._known[key]


def _lane(number: int, placed: tuple[Placed, ...], kept: list[Placed], cones: _Cones) -> Lane:
    acting = [p for p in placed if p.edit.acts]
    if not acting:
        return Lane(number, (), (0, Stage.START), cones.nowhere, cones.everywhere)
    entry = min(p.entry for p in acting)
    held = tuple(p for p in kept if p.entry >= entry)
    start, rows = cones.of(acting)
    return Lane(number, held + placed, entry, start, rows)


def freeze_options(freeze: object) -> tuple[str, ...]:
    """What a freeze option names: one of ``"patterns"`` and ``"norms"``, or several.

    Raises:
        TypeError: No option at all.
        ValueError: An option that does not exist.
    """
    if not isinstance(freeze, Iterable):
        raise TypeError(f"freeze must be {' or '.join(map(repr, FREEZES))}, or a list of them, not {freeze!r}")
    options = (freeze,) if isinstance(freeze, str) else tuple(freeze)
    for option in options:
        if not isinstance(option, str) or option not in FREEZES:
            raise ValueError(f"freeze option {option!r} is not one of {', '.join(map(repr, FREEZES))}")
    return options


def frozen_names(model: HookedGPT, freeze: Iterable[str]) -> list[str]:
    """The hook names that a freeze option holds at the clean run.

    Raises:
        TypeError, ValueError: See `freeze_options`.
    """
    wanted = tuple(FREEZES[option] for option in freeze_options(freeze))
    return [name for name in model.hook_names if wanted and name.endswith(wanted)]


def needs(model: HookedGPT, lanes: Iterable[Lane]) -> frozenset[str]:
    """The activations of the clean run that these lanes go on from or are held at."""
    names: set[str] = set()
    begun: set[Entry] = set()
    for lane in lanes:
        begun.add(lane.entry)
        for placed in lane.placed:
            if not placed.edit.acts:
                names.add(placed.name)
            if placed.whole_block:
                names.add(vocabulary.block_names(placed.entry[0]).resid_pre)
    for entry in begun:
        names.update(clean_names(entry, model.config))
    names.add(vocabulary.block_names(model.config.n_layers - 1).resid_pre)  # what the last block's keys are made from
    return frozenset(names & set(vocabulary.hook_names(model.config)))
