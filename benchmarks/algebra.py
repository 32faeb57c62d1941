"""The algebra of the weights: composition, singular values, full circuits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from analysis.composition import composition_scores
from benchmarks import shapes
from benchmarks.timing import Row, interleaved, peak_memory
from circuits.full_circuits import full_ov


def rows(full: bool) -> Iterator[Row]:
    """Rows of weight-space work on the shape of GPT-2 small; `full` takes every kind and more rounds."""
    rounds = 5 if full else 1
    model = shapes.gpt2_small()
    with torch.no_grad():
        if shapes.has_transformer_lens():
            theirs = shapes.transformer_lens("gpt2")
            for kind in ("Q", "K", "V") if full else ("Q",):
                yield from _composition(model, theirs, kind, rounds)
            yield _singular_values(model, theirs, 3 * rounds)
        yield from _largest_entries(model)


def _composition(model: shapes.HookedGPT, theirs: Any, kind: str, rounds: int) -> Iterator[Row]:
    times = interleaved(
        {
            "ours": lambda: composition_scores(model, kind, raw=True),
            "lens": lambda: theirs.all_composition_scores(kind),
        },
        rounds,
        warmup=1,
    )
    work = f"{kind}-composition of all pairs of heads, gpt2 shape"
    yield Row(work, times["ours"], times["lens"], "TransformerLens", 8, 15, better="higher")
    with peak_memory() as peak:
        composition_scores(model, kind)
    must, aim = 0.5 * 2**30, 0.2 * 2**30
    yield Row(f"memory of {work}", peak(), 0.0, "nothing", must, aim, better="excess", unit="bytes")


def _largest_entries(model: shapes.HookedGPT) -> Iterator[Row]:
    """Seconds and bytes by themselves: nobody else searches without the dense matrix, which has 10 GB."""

    def search() -> None:
        full_ov(model, 3, 4).top_entries(100)

    with peak_memory() as peak:
        search()
    took = interleaved({"ours": search}, repeats=1, warmup=0)["ours"]
    work = "100 largest entries of a full OV circuit, gpt2 shape"
    yield Row(work, took, 0.0, "nothing", 30, 10, better="excess")
    must, aim = 0.5 * 2**30, 0.2 * 2**30
    yield Row(f"memory of {work}", peak(), 0.0, "nothing", must, aim, better="excess", unit="bytes")


def _singular_values(model: shapes.HookedGPT, theirs: Any, rounds: int) -> Row:
    """Theirs come only with both sets of vectors; QK and OV as each library offers them."""

    def lens() -> None:
        for circuit in (theirs.QK, theirs.OV):
            circuit.svd()

    def ours() -> None:
        for circuit in (model.QK, model.OV):
            circuit.singular_values()

    times = interleaved({"ours": ours, "lens": lens}, rounds, warmup=1)
    work = "singular values of every QK and OV, gpt2 shape"
    return Row(work, times["ours"], times["lens"], "TransformerLens .svd()", 5, 7, better="higher")
