"""A training run at some step, and the file from which it goes on.

The file holds the weights, both moments of AdamW, the number of updates made and the loss history. It needs no
generator state: batches depend on the seed and the number of the update alone.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from circuits import storage
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.training.data import Data
from circuits.training.optim import make_optimizer
from circuits.training.settings import TrainingConfig

KIND = "training state"
COLUMNS = ("step", "lr", "train_loss", "val_loss")


class Interrupted(Exception):
    """Training was stopped from outside, after its state was saved; the message says how to go on."""


@dataclass
class Run:
    """A training run, changed in place by every update.

    Attributes:
        model: The model so far.
        optimizer: AdamW with its moments.
        step: Updates made.
        history: Per column of `COLUMNS` its values, one at every evaluation.
        recent: Sum and number of the training losses since the last evaluation.
    """

    model: HookedGPT
    optimizer: torch.optim.AdamW
    step: int = 0
    history: dict[str, list[float]] = field(default_factory=lambda: {column: [] for column in COLUMNS})
    recent: tuple[float, int] = (0.0, 0)


def fresh_run(config: GPTConfig, settings: TrainingConfig, device: torch.device | str | None) -> Run:
    """A run before its first update."""
    model = HookedGPT(config, seed=settings.seed, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(settings.init_scale)
    return Run(model, make_optimizer(model, settings))


def state_path(out: Path) -> Path:
    """Where the state of the run that writes `out` is kept: ``NAME.training.safetensors`` beside it."""
    return out.with_name(f"{out.stem}.training{storage.SUFFIX}")


def _identity(config: GPTConfig, data: Data, settings: TrainingConfig) -> dict[str, Any]:
    """What a resumed run must share with the one that it goes on from."""
    # Through JSON's own types, so that what was read compares equal to what would be written.
    described = {"config": config.to_dict(), "data": data.card(), "settings": settings.to_dict()}
    described["config"]["window"] = list(config.window)
    return described


def save_run(path: Path, run: Run, data: Data, settings: TrainingConfig) -> None:
    """Write a run's state, whole or not at all."""
    tensors = {}
    for name, parameter in run.model.named_parameters():
        moments = run.optimizer.state.get(parameter, {})
        tensors[f"weight/{name}"] = parameter
        tensors |= {f"{key}/{name}": moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments}
    header = {
        "format": storage.FORMAT,
        "kind": KIND,
        "step": run.step,
        "history": run.history,
        "recent": list(run.recent),
        **_identity(run.model.config, data, settings),
    }
    storage.write_tensors(path, tensors, header)


def resume_run(
    path: Path, config: GPTConfig, data: Data, settings: TrainingConfig, device: torch.device | str | None
) -> Run:
    """The run whose state was saved, ready for its next update.

    Raises:
        FileNotFoundError: There is no state.
        storage.CheckpointError: Not a training state, or a damaged one.
        ValueError: The state of a run with another architecture, data or settings; every difference is listed.
    """
    if not path.exists():
        raise FileNotFoundError(f"nothing to resume: there is no training state {str(path)!r}")
    tensors, header = storage.read_tensors(path)
    if header.get("kind") != KIND:
        raise storage.CheckpointError(f"{path}: holds a {header.get('kind', 'model')}, not a {KIND}")
    _require_same(path, header, _identity(config, data, settings))
    run = fresh_run(config, settings, device)
    run.step = int(header["step"])
    run.history = {column: list(header["history"][column]) for column in COLUMNS}
    run.recent = (float(header["recent"][0]), int(header["recent"][1]))
    try:
        _restore(run, tensors)
    except (KeyError, RuntimeError) as error:
        raise storage.CheckpointError(f"{path}: a damaged training state: {error}") from None
    return run


def _restore(run: Run, tensors: dict[str, torch.Tensor]) -> None:
    """Put saved weights and moments where they were."""
    for name, parameter in run.model.named_parameters():
        with torch.no_grad():
            parameter.copy_(tensors[f"weight/{name}"])
        if run.step:
            run.optimizer.state[parameter] = {
                "step": torch.tensor(float(run.step), device=parameter.device),
                "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device, copy=True),
                "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device, copy=True),
            }


def _require_same(path: Path, header: dict[str, Any], wanted: dict[str, Any]) -> None:
    differences = [
        f"{name} was {header.get(part, {}).get(name)!r} and is now {value!r}"
        for part, fields in wanted.items()
        for name, value in fields.items()
        if header.get(part, {}).get(name) != value
    ]
    if differences:
        raise ValueError(f"{path}: the state of another run: {'; '.join(differences)}")


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """While the block lasts, a first Ctrl-C (or SIGTERM) is noted and not raised; a second one is raised at once.

    Yields a function that says whether one came. Outside the main thread, where signals never arrive, it says no.
    """
    noted = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
