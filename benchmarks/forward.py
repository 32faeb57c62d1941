"""The forward pass, what capturing adds to it, the backward pass, and the import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from benchmarks import shapes
from benchmarks.plain import plain_twin
from benchmarks.timing import Row, interleaved


def rows(full: bool) -> Iterator[Row]:
    """Rows of the forward pass; `full` takes more rounds."""
    rounds = 25 if full else 5
    with torch.no_grad():
        yield _over_plain("gpt2", rounds, must=1.08, aim=1.02)
        yield _over_plain("course", rounds, must=1.25, aim=1.10)
        yield _capture_streams(rounds)
        if shapes.has_transformer_lens():
            yield _capture_everything("gpt2", rounds)
            yield _capture_everything("course", rounds)
    yield _backward(rounds)
    yield _import("import circuits", rounds if full else 3)
    yield _import("from circuits import HookedGPT, load", rounds if full else 3)


def _model(shape: str) -> shapes.HookedGPT:
    return shapes.course() if shape == "course" else shapes.gpt2_small()


def _over_plain(shape: str, rounds: int, must: float, aim: float) -> Row:
    model = _model(shape)
    plain, tokens = plain_twin(model), shapes.tokens(model)
    difference = (model(tokens) - plain(tokens)).abs().max()
    assert difference < 1e-4, f"the plain twin computes something else: {difference}"
    times = interleaved({"ours": lambda: model(tokens), "plain": lambda: plain(tokens)}, rounds, at_least=1.5)
    return Row(f"forward, {shape} shape", times["ours"], times["plain"], "plain PyTorch", must, aim)


def _capture_streams(rounds: int) -> Row:
    model = shapes.gpt2_small()
    tokens = shapes.tokens(model)
    streams = [name for name in model.hook_names if name.endswith("hook_resid_post")]
    times = interleaved(
        {"ours": lambda: model.run_with_cache(tokens, streams), "forward": lambda: model(tokens)}, rounds, at_least=1.5
    )
    return Row("capture every resid_post, gpt2 shape", times["ours"], times["forward"], "own forward", 1.06, 1.02)


def _capture_everything(shape: str, rounds: int) -> Row:
    """Every name that both have, against what TransformerLens captures by default."""
    model, theirs = _model(shape), shapes.transformer_lens(shape)
    tokens = shapes.tokens(model)
    default = theirs.run_with_cache(tokens)[1]
    shared = [name for name in model.hook_names if name in default]
    times = interleaved(
        {"ours": lambda: model.run_with_cache(tokens, shared), "lens": lambda: theirs.run_with_cache(tokens)},
        rounds,
        at_least=1.5,
    )
    work = f"capture {len(shared)} names TransformerLens captures, {shape} shape"
    return Row(work, times["ours"], times["lens"], "TransformerLens", 1.0, 0.7)


def _backward(rounds: int) -> Row:
    model = shapes.course()
    plain, tokens = plain_twin(model), shapes.tokens(model)

    def backward(logits: torch.Tensor) -> None:
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        model.zero_grad()

    times = interleaved(
        {"ours": lambda: backward(model(tokens)), "plain": lambda: backward(plain(tokens))}, rounds, at_least=1.5
    )
    return Row(
        "forward and backward of the loss, course shape", times["ours"], times["plain"], "plain PyTorch", 1.15, 1.05
    )


def _import(statement: str, rounds: int) -> Row:
    """Whole processes: what an import costs beyond `import torch`."""

    def process(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], check=True)

    contestants = {"ours": lambda: process(f"import torch; {statement}"), "torch": lambda: process("import torch")}
    times = interleaved(contestants, rounds, warmup=1)
    return Row(statement, times["ours"], times["torch"], "import torch", 0.5, 0.2, better="excess")
