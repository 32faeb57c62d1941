"""Logit attribution and path expansion: the shape of GPT-2 small, and all paths of the course shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks import shapes
from benchmarks.timing import Row, interleaved, peak_memory
from circuits import paths
from circuits.paths import expand_paths
from circuits.residual import direct_logit_attribution, needed_names

PROMPT = 15  # tokens of the prompt whose paths are expanded


def rows(full: bool) -> Iterator[Row]:
    """Rows of attribution and path expansion; `full` takes more rounds."""
    rounds = 9 if full else 3
    with torch.no_grad():
        yield from _attribution(rounds)
        yield _largest_paths(rounds)
        yield _all_paths(rounds)


def _attribution(rounds: int) -> Iterator[Row]:
    """Every head at every position, against stacking what every head writes and projecting it."""
    model = shapes.gpt2_small()
    tokens = shapes.tokens(model)
    correct, wrong = tokens[:, 0], tokens[:, 1]
    cache = model.run_with_cache(tokens, needed_names(model.config))[1]
    work = f"logit attribution of every head, {shapes.BATCH} × {shapes.POS} tokens, gpt2 shape"
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: direct_logit_attribution(model, cache, correct, wrong, position=None)
    }
    contestants["ours"]()
    with peak_memory(every=0.0005) as peak:
        contestants["ours"]()
    yield Row(f"memory of {work}", peak(), 0.0, "nothing", 20 * 2**20, 20 * 2**20, better="excess", unit="bytes")
    if shapes.has_transformer_lens():
        lens_cache = shapes.transformer_lens("gpt2").run_with_cache(tokens)[1]

        def lens() -> object:
            stack = lens_cache.stack_head_results(layer=-1)
            return lens_cache.logit_attrs(stack, tokens=correct, incorrect_tokens=wrong)

        contestants["lens"] = lens
        times = interleaved(contestants, rounds, warmup=1)
        yield Row(work, times["ours"], times["lens"], "TransformerLens", 10, 20, better="higher")


def _largest_paths(rounds: int) -> Row:
    model = shapes.gpt2_small()
    tokens = shapes.tokens(model, batch=1, pos=PROMPT)
    cache = model.run_with_cache(tokens, paths.needed_names(model.config))[1]
    times = interleaved({"ours": lambda: expand_paths(model, cache, 3, 5, top=20)}, rounds, warmup=0)
    work = f"the 20 largest paths found, {PROMPT} tokens, gpt2 shape"
    return Row(work, times["ours"], 10.0, "10 s", 1.0, 0.5)


def _all_paths(rounds: int) -> Row:
    model = shapes.course()
    tokens = shapes.tokens(model, batch=1)
    cache = model.run_with_cache(tokens, paths.needed_names(model.config))[1]
    times = interleaved({"ours": lambda: expand_paths(model, cache, 3, 5, top=None)}, rounds, warmup=0)
    return Row(f"all paths, {shapes.POS} tokens, course shape", times["ours"], 3.0, "3 s", 1.0, 0.3)
