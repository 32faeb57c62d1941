"""An intervention as a value: where, on which rows and positions, and what to put there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from circuits import names as vocabulary
from circuits.arguments import whole_numbers
from circuits.components import (
    MLP,
    Attn,
    AttnBias,
    Block,
    Component,
    Embed,
    Head,
    MLPBias,
    Neuron,
    PosEmbed,
    as_component,
    check_component,
)
from circuits.model import HookedGPT
from circuits.rerun.edits import Cells, Edit, From, Within
from circuits.rerun.stages import Entry, entries
from circuits.tokens import columns_of, token_span
from circuits.validity import require_whole

# Hook names whose third axis is heads ([batch pos head …]; [batch head query key] for scores and pattern).
_QUERY_HEADS: tuple[str, ...] = ("hook_q_input", "attn.hook_q", "attn.hook_rot_q", "attn.hook_z", "attn.hook_result")
_QUERY_HEADS += ("attn.hook_attn_scores", "attn.hook_pattern", "attn.q_norm.hook_scale", "attn.q_norm.hook_normalized")
_KV_HEADS: tuple[str, ...] = ("hook_k_input", "hook_v_input", "attn.hook_k", "attn.hook_v", "attn.hook_rot_k")
_KV_HEADS += ("attn.k_norm.hook_scale", "attn.k_norm.hook_normalized")


@dataclass(frozen=True, eq=False)
class Intervention:
    """One change to one activation.

    Attributes:
        site: A component (or its text, ``"L2H3"``) or a hook name. A head is changed at `z`, a neuron at the MLP's
            activation, everything else at what it adds to the stream; a block at all that it adds (0: the identity).
        edit: What to put there.
        positions: Positions counted over the real tokens of each row, negative ones from the last; or a mask of the
            cells ``[batch pos]``. None: all. An empty list, and a mask that marks no cell of any row, are refused.
        rows: Rows of the batch; None: all. An empty list is refused.
        head: For hook names with a head axis, the one head to change (a key/value head for k and v).
    """

    site: str | Component
    edit: Edit
    positions: int | Sequence[int] | Bool[Tensor, "batch pos"] | None = None
    rows: int | Sequence[int] | None = None
    head: int | None = None


Intervened = Intervention | Sequence[Intervention]


@dataclass(frozen=True, eq=False)
class Placed:
    """An intervention settled on one batch.

    Attributes:
        name: The hook name it acts on.
        entry: Where a pass that holds it can start.
        edit: What to put there.
        index: The head or neuron, or None for all.
        where: The cells that change; None for every one.
        whole_block: Whether what is edited is the sum of everything that a block adds.
    """

    name: str
    entry: Entry
    edit: Edit
    index: int | None = None
    where: Bool[Tensor, "batch pos"] | None = None
    whole_block: bool = False


@dataclass(frozen=True, eq=False)
class _Bias(Edit):
    """An edit of a bias that is one summand of the activation."""

    bias: Tensor
    edit: Edit

    def new(self, old: Tensor, cells: Cells) -> Tensor:
        bias = self.bias.expand_as(old)
        return old + (self.edit.new(bias, cells) - bias)


class Placer:
    """Settles interventions on one model and one batch."""

    def __init__(self, model: HookedGPT, tokens: Int[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None):
        self.model, self.shape = model, tokens.shape
        self.entries = entries(model.config)
        self.first, self.last = token_span(tokens, mask)
        # Masks that many interventions share are looked at once; the mask itself is kept so that its id stays its own.
        self._known: dict[int, tuple[Tensor, Bool[Tensor, "batch pos"] | None]] = {}

    def __call__(self, intervention: Intervention) -> Placed:
        """Where and what exactly.

        Raises:
            TypeError, KeyError, ValueError, IndexError: A site, head, row or position that this model and batch lack.
        """
        if not isinstance(intervention, Intervention):
            raise TypeError(f"expected an Intervention, not {type(intervention).__name__}")
        if not isinstance(intervention.edit, Edit):
            raise TypeError(
                f"the edit at {intervention.site} must be an Edit such as Zero(), not {intervention.edit!r}"
            )
        site = self._site(intervention.site)
        if isinstance(site, Component):
            name, index, edit = self._component(site, intervention)
        else:
            name, index, edit = self._hook(site, intervention)
        whole_block, where = isinstance(site, Block), self._cells(intervention)
        return Placed(name, self.entries[name], edit.at(name, index), index, where, whole_block)

    def _site(self, site: str | Component) -> str | Component:
        if isinstance(site, Component) or site in self.model.hook_names:
            return site
        if not isinstance(site, str):
            raise TypeError(f"the site of an intervention is a hook name or a component, not {site!r}")
        if "hook_" in site:
            raise KeyError(vocabulary.unknown_name(site, self.model.hook_names))
        return as_component(site)

    def _component(self, component: Component, given: Intervention) -> tuple[str, int | None, Edit]:
        check_component(component, self.model.config)
        if given.head is not None:
            raise ValueError(f"head {given.head} was given for {component}; it goes with a hook name")
        return _component_site(component, self.model, given.edit)

    def _hook(self, name: str, given: Intervention) -> tuple[str, int | None, Edit]:
        if given.head is not None:
            config = self.model.config
            sizes = {_QUERY_HEADS: config.n_heads, _KV_HEADS: config.n_kv_heads}
            size = next((size for tails, size in sizes.items() if name.endswith(tails)), None)
            if size is None:
                raise ValueError(f"head {given.head} was given for {name}, which has no head axis")
            head = require_whole(f"head of {name}", given.head, least=-(2**63))
            if not 0 <= head < size:
                raise IndexError(f"{name} has {size} heads (0 to {size - 1}), not head {head}")
            return name, head, given.edit
        return name, None, given.edit

    def _cells(self, given: Intervention) -> Bool[Tensor, "batch pos"] | None:
        if given.positions is None and given.rows is None:
            return None
        if not isinstance(given.positions, Tensor) or given.rows is not None:
            return self._where(given)
        if id(given.positions) not in self._known:
            self._known[id(given.positions)] = given.positions, self._where(given)
        return self._known[id(given.positions)][1]

    def _where(self, given: Intervention) -> Bool[Tensor, "batch pos"] | None:
        rows = self._indices(given.rows, len(self.last), "row")
        where = torch.zeros(self.shape, dtype=torch.bool, device=self.last.device)
        if given.positions is None:
            where[rows] = True
        elif isinstance(given.positions, Tensor):
            where[rows] = self._mask(given.positions, given.site)[rows]
            if not bool(where.any()):
                raise ValueError(f"the mask of the cells to change at {given.site} marks none: no position was given")
        else:
            for position in whole_numbers("position", given.positions):
                where[rows, columns_of(position, self.first[rows], self.last[rows], rows)] = True
        return None if bool(where.all()) else where

    def _mask(self, given: Tensor, site: str | Component) -> Bool[Tensor, "batch pos"]:
        if given.shape != self.shape:
            raise ValueError(
                f"the cells to change at {site} have shape {list(given.shape)}, expected {list(self.shape)}; positions "
                "that hold for every row are given as a list"
            )
        cells = given.to(device=self.last.device, dtype=torch.bool)
        if given.dtype != torch.bool and not bool((cells == given.to(self.last.device)).all()):
            raise TypeError(f"the mask of the cells to change at {site} must hold only 0 and 1")
        return cells

    def _indices(self, given: int | Sequence[int] | None, size: int, what: str) -> Tensor:
        indices = list(range(size)) if given is None else whole_numbers(what, given)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"{what} {index} is not in a batch of {size} {what}s")
        return torch.tensor([index % size for index in indices], device=self.last.device, dtype=torch.long)


# Field of BlockNames at which a component of a block is changed.
_FIELDS: dict[type[Component], str] = {
    Head: "z",
    Attn: "attn_out",
    AttnBias: "attn_out",
    MLP: "mlp_out",
    MLPBias: "mlp_out",
    Neuron: "post",
    Block: "resid_post",
}


def _component_site(component: Component, model: HookedGPT, edit: Edit) -> tuple[str, int | None, Edit]:
    """The hook name of a component, the index on its third axis, and the edit as it acts there."""
    if isinstance(component, Embed | PosEmbed):
        return (vocabulary.EMBED if isinstance(component, Embed) else vocabulary.POS_EMBED), None, edit
    if type(component) not in _FIELDS:
        raise ValueError(f"{component} cannot be intervened on: it is a leaf of paths, not something a pass computes")
    block = model.blocks[component.layer]  # type: ignore[attr-defined]  # every one of these has a layer
    if isinstance(component, AttnBias | MLPBias):
        if model.config.branch_norm:
            raise ValueError(f"{component} cannot be changed by itself: a norm stands between it and the stream")
        bias = block.attn.b_O if isinstance(component, AttnBias) else block.mlp and block.mlp.b_out
        assert isinstance(bias, Tensor)
        cached = isinstance(edit, From) or (isinstance(edit, Within) and not isinstance(edit.value, Tensor))
        if cached or not (edit.pointwise and edit.acts):
            raise ValueError(
                f"{component} is a parameter, the same in every run and at every position: it takes a value, a scaling "
                f"or a direction, not {type(edit).__name__}"
            )
        edit = _Bias(bias.detach(), edit)
    index = component.head if isinstance(component, Head) else getattr(component, "index", None)
    return getattr(block.names, _FIELDS[type(component)]), index, edit
