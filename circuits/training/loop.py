"""The training loop."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from circuits import __version__, storage
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.training.data import Data, stream
from circuits.training.optim import update
from circuits.training.settings import TrainingConfig
from circuits.training.state import (
    COLUMNS,
    Interrupted,
    Run,
    fresh_run,
    resume_run,
    save_run,
    state_path,
    stop_requests,
)


def train(
    config: GPTConfig,
    data: Data,
    settings: TrainingConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    save_every: int | None = None,
    command: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    on_record: Callable[[dict[str, float]], None] | None = None,
) -> HookedGPT:
    """Train a GPT.

    With `out`, the finished model is saved there, with a card that records the data, the settings and the loss history;
    while the run lasts, its state is kept beside it (see `state.state_path`), written at every evaluation and when
    the run is stopped. A run resumed from it ends with the same weights, bit for bit, as one that was never stopped,
    on the same machine with the same number of threads.

    Args:
        config: The architecture.
        data: What to train on.
        settings: How; by default `TrainingConfig()`.
        out: Where the model is saved, or None to only return it.
        resume: Go on from the state beside `out`.
        save_every: Keep the model of every so many updates too, and the untrained one, as ``NAME-000500.safetensors``.
        command: The command line, for the card.
        device: Where to train; by default the CPU.
        progress: Say on standard error what begins, and show a bar there if that is a terminal.
        on_record: Called with each new row of the loss history, and under ``"since"`` the step from which its training
            loss is the mean.

    Returns:
        The trained model, its tokenizer and card attached.

    Raises:
        ValueError: Data that does not go with the architecture, a run that diverged, or a state of another run.
        FileExistsError: `out` has the state of an unfinished run beside it, and `resume` is False.
        FileNotFoundError: `resume` without a state.
        Interrupted: Stopped by Ctrl-C or SIGTERM, after the state was saved.
    """
    settings = settings or TrainingConfig()
    _check(config, data, save_every, out, resume)
    if out is None:
        run = fresh_run(config, settings, device)
        for _ in _steps(run, data, settings, progress, on_record):
            pass
        return _finished(run, data, settings, command)
    out = Path(out)
    unfinished = state_path(out)
    run = resume_run(unfinished, config, data, settings, device) if resume else fresh_run(config, settings, device)
    with stop_requests() as stopping:
        if save_every and not resume:
            _save_one(run, data, settings, command, out)
        for at_evaluation in _steps(run, data, settings, progress, on_record):
            if save_every and run.step % save_every == 0:
                _save_one(run, data, settings, command, out)
            stop = stopping()
            if (at_evaluation or stop) and run.step < settings.steps:
                save_run(unfinished, run, data, settings)
            if stop and run.step < settings.steps:
                raise Interrupted(f"stopped after {run.step} of {settings.steps} steps; the state is in {unfinished}")
    model = _finished(run, data, settings, command)
    storage.save(model, out)
    unfinished.unlink(missing_ok=True)
    return model


def _check(config: GPTConfig, data: Data, save_every: int | None, out: str | Path | None, resume: bool) -> None:
    """Refuse what would fail only after hours, or mean something else than was asked."""
    if data.d_vocab != config.d_vocab:
        raise ValueError(f"the data has {data.d_vocab} tokens, but d_vocab is {config.d_vocab}")
    if data.n_ctx != config.n_ctx:
        raise ValueError(f"the data has sequences of {data.n_ctx} tokens, but n_ctx is {config.n_ctx}")
    if save_every is not None and save_every < 1:
        raise ValueError(f"save_every must be at least 1, not {save_every}")
    if out is None:
        if resume or save_every:
            raise ValueError("resume and save_every need out, the place where the model is saved")
        return
    out = Path(out)
    storage.check_writable(out)
    if state_path(out).exists() and not resume:
        raise FileExistsError(
            f"{state_path(out)} is the state of an unfinished run: go on with it (--resume), or delete it to start anew"
        )


def _steps(
    run: Run,
    data: Data,
    settings: TrainingConfig,
    progress: bool,
    on_record: Callable[[dict[str, float]], None] | None,
) -> Any:
    """Make one update after another until all are made; yields whether the history got a row."""
    from tqdm import tqdm

    # disable=None: shown on a terminal only.
    bar = tqdm(total=settings.steps, initial=run.step, disable=None if progress else True, unit="step")
    if progress:  # so that a log that shows no bar shows at once what is going on
        begun = f"training from step {run.step} to {settings.steps}, a line every {settings.eval_every}"
        tqdm.write(begun, file=sys.stderr)
    with bar:
        while run.step < settings.steps:
            inputs, targets = data.batch(settings.batch_size, stream(settings.seed, "batch", run.step))
            device = run.model.device
            loss = update(run.model, run.optimizer, inputs.to(device), targets.to(device), settings, run.step)
            run.step += 1
            run.recent = (run.recent[0] + loss, run.recent[1] + 1)
            at_evaluation = run.step % settings.eval_every == 0 or run.step == settings.steps
            if at_evaluation:
                since = run.step - run.recent[1]
                row = _record(run, data, settings)
                if on_record is not None:
                    on_record(row | {"since": since})
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            yield at_evaluation


def _record(run: Run, data: Data, settings: TrainingConfig) -> dict[str, float]:
    """Add a row to the history: the mean training loss since the last one, and the validation loss now."""
    total, number = run.recent
    values = (run.step, settings.lr_at(run.step - 1), total / number, data.validation_loss(run.model))
    row = dict(zip(COLUMNS, values, strict=True))
    for column, value in row.items():
        run.history[column].append(value)
    run.recent = (0.0, 0)
    return row


def _card(run: Run, data: Data, settings: TrainingConfig, command: str | None) -> dict[str, Any]:
    """What a checkpoint says about how it came to be."""
    return {
        "command": command,
        "data": data.card(),
        "training": settings.to_dict(),
        "seed": settings.seed,
        "steps": run.step,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "loss": {name: run.history[f"{name}_loss"][-1] for name in ("train", "val") if run.history["step"]},
        "history": {column: list(values) for column, values in run.history.items()},
        "versions": {"qkov": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _finished(run: Run, data: Data, settings: TrainingConfig, command: str | None) -> HookedGPT:
    """The model, with its tokenizer and its card."""
    run.model.tokenizer = data.tokenizer
    run.model.card = _card(run, data, settings, command)
    return run.model


def _save_one(run: Run, data: Data, settings: TrainingConfig, command: str | None, out: Path) -> None:
    """Save one checkpoint of a series, its number of updates in its name."""
    model = _finished(run, data, settings, command)
    storage.save(model, out.with_name(f"{out.stem}-{run.step:06d}{storage.SUFFIX}"))
