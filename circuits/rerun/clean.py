"""The one clean pass: streams, keys and values that every recomputation starts from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits import names as vocabulary
from circuits.hooks import Hooks, Tap
from circuits.model import HookedGPT
from circuits.run import Run, make_run, token_positions


class Recorder:
    """Keeps the keys and values of a pass as it makes them."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of one layer and hand them on."""
        self.kept.append((k, v))
        return k, v


@dataclass(frozen=True, eq=False)
class Clean:
    """A clean pass over one batch.

    Attributes:
        model: The model.
        tokens: The batch.
        mask: True for tokens, False for padding; None where all are tokens.
        positions: Position of each token as the embeddings count it.
        captured: The activations that recomputation needs, by hook name.
        keys_values: Keys and values of each layer, as the scores see them.
        final: What the unembedding reads.
    """

    model: HookedGPT
    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None
    positions: Int[Tensor, "batch pos"]
    captured: dict[str, Tensor] = field(repr=False)
    keys_values: list[tuple[Tensor, Tensor]] = field(repr=False)
    final: Float[Tensor, "batch pos d_model"] = field(repr=False)

    def select_batch(self, rows: slice) -> Clean:
        """Some of its rows, as views."""
        return Clean(
            self.model,
            self.tokens[rows],
            None if self.mask is None else self.mask[rows],
            self.positions[rows],
            {name: value if len(value) == 1 else value[rows] for name, value in self.captured.items()},
            [(k[rows], v[rows]) for k, v in self.keys_values],
            self.final[rows],
        )


def clean_pass(model: HookedGPT, tokens: Tensor, mask: Tensor | None, names: Iterable[str]) -> Clean:
    """Run the model once and keep what is needed: some activations, every key and value, the final stream."""
    last = vocabulary.block_names(model.config.n_layers - 1).resid_post
    tap = Tap(Hooks(capture=frozenset([*names, last])))
    positions = token_positions(tokens.shape[0], tokens.shape[1], mask, tokens.device)
    recorder = Recorder()
    run = make_run(model.config, positions, model.dtype, key_mask=mask, tap=tap, past=recorder)
    x = model.embedding(tokens, run)
    for block in model.blocks:
        x = block(x, run)
    final = (
        x
        if model.ln_final is None
        else model.ln_final.tapped(x, tap, vocabulary.FINAL_SCALE, vocabulary.FINAL_NORMALIZED)
    )
    whole = positions.expand(tokens.shape)
    return Clean(model, tokens, mask, whole, tap.captured, recorder.kept, final)


@dataclass(frozen=True, eq=False)
class Prefix:
    """A frozen past: the clean keys and values of the positions before a part's first, for its rows."""

    clean: Clean
    rows: Int[Tensor, " stack"]
    start: int

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The clean prefix, then the part's own."""
        clean_k, clean_v = self.clean.keys_values[layer]
        before = (clean_k[:, : self.start][self.rows], clean_v[:, : self.start][self.rows])
        return torch.cat((before[0], k), dim=1), torch.cat((before[1], v), dim=1)


@dataclass(frozen=True, eq=False)
class SpreadOut:
    """Parts laid out as one batch: each row over every position, the clean keys and values before it begins.

    Queries of positions before a row begins are 0 and what they see is dropped: with few positions that costs less than
    an attention of its own for each part.

    Attributes:
        clean: The clean run.
        rows: Row of the batch of each sequence.
        run: The attention's pass.
        keys: Where each cell of the flat axis stands among ``sequence × position``.
        queries: The same for the cells whose queries are made.
        shape: Sequences and queries of each.
    """

    clean: Clean
    rows: Int[Tensor, " stack"]
    run: Run
    keys: Int[Tensor, " cell"]
    queries: Int[Tensor, " query"]
    shape: tuple[int, int]

    def out(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the batch."""
        stop = self.run.positions.shape[1]
        spread = []
        for clean, own in zip(self.clean.keys_values[layer], (k, v), strict=True):
            whole = clean[self.rows, :stop]
            whole.flatten(0, 1)[self.keys] = own[0]
            spread.append(whole)
        queries = q.new_zeros(self.shape[0] * self.shape[1], *q.shape[2:])
        queries[self.queries] = q[0]
        return queries.unflatten(0, self.shape), spread[0], spread[1]

    def back(self, z: Tensor) -> Tensor:
        """`z` at the cells of the flat axis."""
        return z.flatten(0, 1)[self.queries][None]
