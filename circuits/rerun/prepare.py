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
from circuits.rerun.stages import Stage, clean_names, entries

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
    placer = Placer(model, tokens, mask)
    frozen = frozen_names(model, freeze)
    stages = entries(model.config)
    kept = [Placed(name, stages[name], Keep()) for name in frozen]
    lanes = []
    for number, given in enumerate(interventions):
        together = [given] if isinstance(given, Intervention) else list(given)
        lanes.append(_lane(number, tuple(map(placer, together)), kept, tokens))
    return lanes


def _lane(number: int, placed: tuple[Placed, ...], kept: list[Placed], tokens: Tensor) -> Lane:
    batch, pos = tokens.shape
    acting = [p for p in placed if p.edit.acts]
    everywhere = torch.arange(batch, device=tokens.device)
    if not acting:
        return Lane(number, (), (0, Stage.START), pos, everywhere)
    entry = min(p.entry for p in acting)
    held = tuple(p for p in kept if p.entry >= entry)
    if any(p.where is None for p in acting):
        return Lane(number, held + placed, entry, 0, everywhere)
    touched = torch.stack([p.where for p in acting if p.where is not None]).any(0)
    columns = touched.any(0).nonzero()[:, 0]
    start = int(columns[0]) if len(columns) else pos
    return Lane(number, held + placed, entry, start, touched.any(1).nonzero()[:, 0])


def frozen_names(model: HookedGPT, freeze: Iterable[str]) -> list[str]:
    """The hook names that a freeze option holds at the clean run.

    Raises:
        ValueError: An option that does not exist.
    """
    options = [freeze] if isinstance(freeze, str) else list(freeze)
    for option in options:
        if option not in FREEZES:
            raise ValueError(f"freeze option {option!r} is not one of {', '.join(map(repr, FREEZES))}")
    wanted = tuple(FREEZES[option] for option in options)
    return [name for name in model.hook_names if wanted and name.endswith(wanted)]


def needs(model: HookedGPT, lanes: Iterable[Lane]) -> frozenset[str]:
    """The activations of the clean run that these lanes go on from or are held at."""
    names: set[str] = set()
    for lane in lanes:
        names |= set(clean_names(lane.entry, model.config))
        names |= {placed.name for placed in lane.placed if not placed.edit.acts}
    return frozenset(names & set(vocabulary.hook_names(model.config)))
