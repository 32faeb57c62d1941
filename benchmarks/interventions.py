"""Ablation and patching against TransformerLens' own functions, and the growth of a head sweep with depth.

Beside each sweep of ablated heads stands the share that ours reaches of the machine's matrix-multiply rate, measured in
the same run.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import Tensor

from analysis.ablation import ablate, plan
from analysis.metrics import logit_diff
from analysis.patching import activation_patch
from benchmarks import shapes
from benchmarks.timing import Row, interleaved
from circuits import GPTConfig, Head, HookedGPT
from circuits.products import linear

CORRECT, WRONG = 3, 5
POS = 12
QUIET: dict[str, Any] = {"progress": False}


def rows(full: bool) -> Iterator[Row]:
    """Rows of interventions; what takes TransformerLens minutes, on the large shape, only with `full`."""
    with torch.no_grad():
        yield from _growth(full)
        if shapes.has_transformer_lens():
            yield _heads("course", "loss", batch=1, must=5, aim=10)
            # Eight prompts keep the processor as busy as one can: beside the cone and its products nothing is won.
            yield _heads("course", "loss")
            yield _patch_streams(full)
        if full and shapes.has_transformer_lens():
            yield _heads("gpt2", "loss", must=1.4, aim=1.7)
            yield _heads("gpt2", "logit_diff", must=2.7, aim=3.5)
            yield _patch_heads(full)


def matmul_rate(rows: int = 512, inner: int = 768, columns: int = 3072) -> float:
    """Multiply-adds × 2 a second of one product of the size that a GPT-2-small MLP has, by the quicker kernel."""
    x, w = torch.randn(rows, inner), torch.randn(columns, inner)
    seconds = interleaved({"product": lambda: linear(x, w)}, repeats=15, warmup=3)["product"]
    return 2 * rows * inner * columns / seconds


def _of_rate(flops: float, seconds: float) -> str:
    return f"{flops / seconds / matmul_rate():.0%} of the matmul rate"


def _heads(
    shape: str,
    measure: str,
    batch: int = shapes.BATCH,
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    """Zero-ablate heads one by one."""
    model, theirs = (shapes.course() if shape == "course" else shapes.gpt2_small()), shapes.transformer_lens(shape)
    tokens = shapes.tokens(model, batch)
    config = model.config
    heads = [Head(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]
    if shape == "gpt2":  # one head of each layer: all 144 would take TransformerLens many minutes
        heads = [Head(layer, layer % config.n_heads) for layer in range(config.n_layers)]
    metric: Any = "loss" if measure == "loss" else logit_diff(CORRECT, WRONG)
    rounds = {"course": 9, "gpt2": 2}[shape]
    times = interleaved(
        {
            "ours": lambda: ablate(model, tokens, heads, metric=metric, **QUIET),
            "lens": lambda: [_lens_ablated(theirs, tokens, head, measure) for head in heads],
        },
        rounds,
        warmup=1,
    )
    flops = plan(model, tokens, heads, "zero", metric, {}).cost.flops
    share = _of_rate(flops, times["ours"])
    work = f"zero-ablate {len(heads)} heads, {measure}, {shape} shape, {batch} × {shapes.POS} ({share})"
    return Row(work, times["ours"], times["lens"], "TransformerLens", must, aim, better="higher")


def _lens_ablated(model: Any, tokens: Tensor, head: Head, measure: str) -> Tensor:
    def zero(z: Tensor, hook: Any) -> Tensor:
        z[:, :, head.head] = 0
        return z

    hooks = [(f"blocks.{head.layer}.attn.hook_z", zero)]
    if measure == "loss":
        return model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)
    logits = model.run_with_hooks(tokens, return_type="logits", fwd_hooks=hooks)
    return logits[:, -1, CORRECT] - logits[:, -1, WRONG]


def _prompts(model: HookedGPT) -> tuple[Tensor, Tensor]:
    """A prompt and one that differs from its first token on, so that no position is spared."""
    both = shapes.tokens(model, batch=2, pos=POS)
    return both[:1], both[1:]


def _lens_difference(logits: Tensor) -> Tensor:
    return (logits[:, -1, CORRECT] - logits[:, -1, WRONG]).mean()


def _patching(function: str, site: str, by_position: bool, work: str, must: float, aim: float, full: bool) -> Row:
    import transformer_lens.patching as theirs

    model, lens = shapes.gpt2_small(), shapes.transformer_lens("gpt2").eval()
    clean, corrupt = _prompts(model)
    patch: Callable[..., Tensor] = getattr(theirs, function)

    def lens_patch() -> Tensor:
        _, cache = lens.run_with_cache(clean)
        return patch(lens, corrupt, cache, _lens_difference)

    ours = partial(
        activation_patch, model, clean, corrupt, site, metric=logit_diff(CORRECT, WRONG), by_position=by_position
    )
    with redirect_stderr(io.StringIO()):  # their progress bars
        times = interleaved({"ours": lambda: ours(**QUIET), "lens": lens_patch}, 5 if full else 2, warmup=int(full))
    return Row(work, times["ours"], times["lens"], "TransformerLens", must, aim, better="higher")


def _patch_streams(full: bool) -> Row:
    work = f"patch resid_pre, 12 layers × {POS} positions, one prompt, gpt2 shape"
    return _patching("get_act_patch_resid_pre", "resid_pre", True, work, 15, 25, full)


def _patch_heads(full: bool) -> Row:
    work = f"patch every head, all positions, one prompt of {POS}, gpt2 shape"
    return _patching("get_act_patch_attn_head_out_all_pos", "head", False, work, 10, 20, full)


def _growth(full: bool) -> Iterator[Row]:
    """What another layer adds to a head's ablation, against half of what it adds to a forward pass."""
    depths = (2, 24)
    models = {n: HookedGPT(GPTConfig(n_layers=n, d_model=256, n_heads=4, n_ctx=64, d_vocab=65)) for n in depths}
    tokens = shapes.tokens(models[2], batch=1)
    contestants: dict[str, Callable[[], object]] = {}
    for n, model in models.items():
        contestants[f"sweep {n}"] = partial(ablate, model, tokens, metric="loss", **QUIET)
        contestants[f"forward {n}"] = partial(model, tokens)
    times = interleaved(contestants, 7 if full else 3, warmup=1)
    per_head = {n: times[f"sweep {n}"] / (4 * n) for n in depths}
    forward = {n: times[f"forward {n}"] for n in depths}
    ours = _slope(depths, per_head)
    half = _slope(depths, forward) / 2
    yield Row(
        f"a layer more, {depths[0]} to {depths[-1]}, d_model 256: per head of a sweep",
        ours,
        half,
        "half a forward",
        1.0,
        0.9,
    )


def _slope(depths: Sequence[int], seconds: dict[int, float]) -> float:
    return (seconds[depths[-1]] - seconds[depths[0]]) / (depths[-1] - depths[0])
