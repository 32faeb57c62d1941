"""`path_patch`: the effect of a component on another through the edge between them, everything between held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.metrics import Metric, as_metric
from analysis.patching.edges import (
    Receiver,
    has_edge,
    heads_reading,
    receivers_of,
    senders_of,
    write_change,
    written_names,
)
from analysis.patching.pairs import Pair, paired
from analysis.patching.path_result import PathPatching
from analysis.patching.plan import PatchOptions, check_options
from analysis.patching.result import summed_up
from analysis.patching.runs import both_runs, reader_of, source_value, weights_of
from analysis.readings import ReadMetric
from circuits.arguments import require_model
from circuits.components import Component
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.rerun import Add, Intervention, Put
from circuits.rerun.cost import Cost
from circuits.rerun.sweep import Sweep

# Numbers of heads' outputs that are held at once.
_HELD = 2**26


@torch.no_grad()
def path_patch(
    model: HookedGPT,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch2 pos2"],
    senders: str | Sequence[Component | str] = "heads",
    receivers: str | Sequence[Component | str] = "heads",
    *,
    metric: str | Metric | Callable[[Tensor], Tensor],
    inputs: Sequence[str] = ("q", "k", "v"),
    direction: str = "denoise",
    **options: Unpack[PatchOptions],
) -> PathPatching:
    """Patch one edge at a time: a receiver reads the stream with one sender's write taken from the other run.

    The receiver's input is ``stream + (write in the other run − write in this run)``, the write of every other
    component as in the unpatched run; what the receiver then makes of it goes on to everything behind it (unless
    `freeze` holds that). This is the path patching of Wang et al. 2022 with one edge as the path.

    Args:
        model: A model.
        clean: The clean prompts.
        corrupt: The corrupted prompts, row by row.
        senders: ``"heads"``, ``"mlps"``, or a list of heads, MLPs, attention layers, neurons and embeddings.
        receivers: ``"heads"``, ``"mlps"``, ``"logits"``, or a list of heads, MLPs and ``"logits"``; a head's text may
            name the one input that reads, as results do: ``"L1H1.k"``.
        metric: As for `activation_patch`.
        inputs: Which inputs of a receiving head, each by itself; k and v over the stored heads.
        direction: As for `activation_patch`, like `options`.
        options: See `PatchOptions`.

    Raises:
        TypeError: An argument or option of the wrong kind.
        ValueError: Something that is no sender or receiver; edges of which none can exist, with the first; norms
            behind the additions, where a write is no summand of what is read; otherwise as for `activation_patch`.
        IndexError: A layer or head that the model does not have.
    """
    edges = _settled(model, clean, corrupt, senders, receivers, metric, inputs, direction, options)
    pair, judge, sources, targets = edges.pair, edges.metric, edges.senders, edges.receivers
    effect = edges.source.new_full((len(sources), len(targets), len(pair.base.tokens)), float("nan"))
    for layer, at in edges.by_layer():
        edges.fill(effect, at, layer)
    level = options.get("level", 0.95)
    summary = summed_up(
        effect.flatten(0, 1),
        edges.clean,
        edges.source,
        weights_of(judge, pair, edges.reader),
        judge,
        normalise=options.get("normalise", True),
        level=level,
        seed=options.get("seed", 0),
    )
    fields: Any = summary.laid_out(len(sources), len(targets))
    return PathPatching(
        **fields,
        senders=sources,
        receivers=tuple(receiver.text(model.config) for receiver in targets),
        effect=effect,
        base=edges.clean,
        source=edges.source,
        direction=direction,
        metric=judge.name,
        level=level,
    )


@torch.no_grad()
def path_cost(
    model: HookedGPT,
    clean: Int[Tensor, "batch pos"],
    corrupt: Int[Tensor, "batch2 pos2"],
    senders: str | Sequence[Component | str] = "heads",
    receivers: str | Sequence[Component | str] = "heads",
    *,
    metric: str | Metric | Callable[[Tensor], Tensor],
    inputs: Sequence[str] = ("q", "k", "v"),
    direction: str = "denoise",
    **options: Unpack[PatchOptions],
) -> Cost:
    """What `path_patch` with these arguments takes behind the receivers, beside the two unpatched runs.

    What a receiver makes of each sender's change, one attention layer's work for each of them, is not counted.

    Args and errors as for `path_patch`.
    """
    edges = _settled(model, clean, corrupt, senders, receivers, metric, inputs, direction, options)
    costs = [edges.cost(at, layer) for layer, at in edges.by_layer()]
    return Cost(
        sum(cost.interventions for cost in costs),
        sum(cost.batches for cost in costs),
        sum(cost.flops for cost in costs),
        sum(cost.forwards for cost in costs),
        max(cost.bytes for cost in costs),
    )


def _settled(
    model: HookedGPT,
    clean: Tensor,
    corrupt: Tensor,
    senders: str | Sequence[Component | str],
    receivers: str | Sequence[Component | str],
    metric: str | Metric | Callable[[Tensor], Tensor],
    inputs: Sequence[str],
    direction: str,
    options: PatchOptions,
) -> _Edges:
    """The edges that were asked for, checked, and the two runs."""
    require_model(model)
    check_options(options)
    if model.config.norm_placement == "post":
        raise ValueError("paths need pre-norm blocks: behind a norm, a write is no summand of what is read")
    sources, targets = senders_of(senders, model.config), receivers_of(receivers, inputs, model.config)
    _refuse_impossible(sources, targets, model.config)
    masks = (options.get("clean_mask"), options.get("corrupt_mask"))
    pair = paired(model.config, clean, corrupt, direction, *masks, options.get("alignment"))
    return _Edges.between(model, pair, sources, targets, as_metric(metric), options)


def _refuse_impossible(senders: Sequence[Component], receivers: Sequence[Receiver], config: GPTConfig) -> None:
    """Refuse edges of which none can exist: the result would be NaN everywhere."""
    if not any(has_edge(sender, receiver, config) for sender in senders for receiver in receivers):
        raise ValueError(
            f"no edge that was asked for exists, the first being {senders[0]} → {receivers[0].text(config)}: "
            "a receiver reads only what was written before it"
        )


@dataclass(frozen=True, eq=False)
class _Edges:
    """What all edges share: the two runs, and what each sender changes."""

    model: HookedGPT
    pair: Pair
    senders: tuple[Component, ...]
    receivers: tuple[Receiver, ...]
    metric: Metric
    reader: ReadMetric
    options: PatchOptions
    base: dict[str, Tensor]
    changes: Float[Tensor, "sender batch pos d_model"]
    source: Float[Tensor, " batch"]
    clean: Float[Tensor, " batch"]

    @staticmethod
    def between(
        model: HookedGPT,
        pair: Pair,
        senders: tuple[Component, ...],
        receivers: tuple[Receiver, ...],
        metric: Metric,
        options: PatchOptions,
    ) -> _Edges:
        written = written_names(senders)
        streams = [block_names(layer).resid_pre for layer in range(model.config.n_layers)]
        runs = both_runs(model, pair, {*written, *streams})
        base, batch = runs[0].captured, len(pair.base.tokens)
        aligned = {name: pair.aligned(_whole(runs[1].captured[name], batch)) for name in written}
        changes = torch.stack([write_change(model, sender, base, aligned) for sender in senders])
        changes = changes.where(pair.patched[..., None], 0)
        reader = reader_of(metric, pair)
        source = source_value(metric, pair, *runs, reader)
        edges = _Edges(model, pair, senders, receivers, metric, reader, options, base, changes, source, source)
        return replace(edges, clean=edges.sweep([], []).prepared().reading.clean)

    def sweep(self, sets: Sequence[Sequence[Intervention]], labels: Sequence[str]) -> Sweep:
        return Sweep(
            self.model,
            self.pair.base.tokens,
            sets,
            self.reader,
            labels,
            attention_mask=self.pair.base.mask,
            freeze=self.options.get("freeze", ()),
            budget=self.options.get("budget"),
        )

    def by_layer(self) -> list[tuple[int | None, list[tuple[int, Receiver]]]]:
        """The receivers of each layer, with their places; the logits (None) come last."""
        layers = sorted({r.layer for r in self.receivers}, key=lambda layer: (layer is None, layer))
        return [(layer, [(i, r) for i, r in enumerate(self.receivers) if r.layer == layer]) for layer in layers]

    def cost(self, receivers: Sequence[tuple[int, Receiver]], layer: int | None) -> Cost:
        """What the edges into one layer (or the logits) take; it does not depend on the values that are put there."""
        edges = [(s, r) for s in range(len(self.senders)) for _, r in receivers if self._has(self.senders[s], r)]
        edges = edges if bool(self.pair.patched.any()) else []
        config, tokens = self.model.config, self.pair.base.tokens
        nothing = self.changes.new_zeros(()).expand(*tokens.shape, config.n_heads, config.d_head)
        sets = [self._patch(r, s, dict.fromkeys(("q", "k", "v"), nothing)) for s, r in edges]
        return self.sweep(sets, [""] * len(sets)).cost()

    def fill(self, effect: Tensor, receivers: Sequence[tuple[int, Receiver]], layer: int | None) -> None:
        """Measure the edges into one layer (or the logits), some senders at a time, and write their effects."""
        senders = [i for i, s in enumerate(self.senders) if any(self._has(s, r) for _, r in receivers)]
        inputs = sorted({r.input for _, r in receivers if r.input})
        width = self.model.config.n_heads * self.model.config.d_head * max(len(inputs), 1)
        step = max(_HELD // (self.pair.base.tokens.numel() * width), 1)
        for start in range(0, len(senders), step):
            chosen = senders[start : start + step]
            edges = [(s, i, r) for s in chosen for i, r in receivers if self._has(self.senders[s], r)]
            if not bool(self.pair.patched.any()):  # both runs are the same
                for s, i, _ in edges:
                    effect[s, i] = 0.0
                continue
            z = self._heads(layer, chosen, inputs)
            sets = [
                self._patch(r, s, {name: values[chosen.index(s)] for name, values in z.items()}) for s, _, r in edges
            ]
            labels = [f"patching {self.senders[s]} → {r.text(self.model.config)}" for s, _, r in edges]
            sweep = self.sweep(sets, labels)
            outcome = sweep.run(
                executor=self.options.get("executor"),
                progress=self.options.get("progress", True),
                resume=self._file(layer, start),
                title=f"paths into {'logits' if layer is None else f'layer {layer}'}",
            )
            for (s, i, _), values in zip(edges, outcome.values, strict=True):
                effect[s, i] = values - outcome.clean

    def _has(self, sender: Component, receiver: Receiver) -> bool:
        return has_edge(sender, receiver, self.model.config)

    def _heads(self, layer: int | None, senders: Sequence[int], inputs: Sequence[str]) -> dict[str, Tensor]:
        if layer is None or not inputs:
            return {}
        before = self.base[block_names(layer).resid_pre]
        return heads_reading(self.model, layer, self.pair, before, self.changes[list(senders)], inputs)

    def _patch(self, receiver: Receiver, sender: int, z: dict[str, Tensor]) -> list[Intervention]:
        """The receiver's output (or what it reads), with the sender's change read."""
        where, config = self.pair.patched, self.model.config
        if receiver.layer is None:
            last = block_names(config.n_layers - 1).resid_post
            return [Intervention(last, Add(self.changes[sender]), where)]
        names = block_names(receiver.layer)
        if receiver.head is None:
            return [Intervention(names.mlp_in, Add(self.changes[sender]), where)]
        assert receiver.input is not None
        group = config.group_size
        heads = [receiver.head] if receiver.input == "q" else range(receiver.head * group, (receiver.head + 1) * group)
        return [Intervention(names.z, Put(z[receiver.input][:, :, head]), where, head=head) for head in heads]

    def _file(self, layer: int | None, start: int) -> Path | None:
        resume = self.options.get("resume")
        return None if resume is None else Path(f"{resume}.{'logits' if layer is None else layer}.{start}")


def _whole(activation: Tensor, batch: int) -> Tensor:
    """An activation that is the same for every prompt, for each of them."""
    return activation.expand(batch, *activation.shape[1:])
