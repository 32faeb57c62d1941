"""What a run is judged by: loss, logit difference, KL divergence; and how sure a mean over prompts is.

Pure functions first. A `Metric` is a value that says which of them, so that a measurement can be given one by name
(``"loss"``), with its answers (``logit_diff(correct, wrong)``), or as a function of the logits.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from circuits.tokens import next_token_losses, predicted, real_positions
from circuits.validity import require_whole

Mask = Bool[Tensor, "batch pos"] | None


# --- of logits ------------------------------------------------------------------------------------------------------


def loss_per_prompt(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], mask: Mask = None
) -> Float[Tensor, " batch"]:
    """Mean next-token cross-entropy of each prompt, nats, over the tokens it predicts (padding left out).

    Raises:
        ValueError: A single position, which has no next token.
    """
    losses = next_token_losses(raised(logits), tokens, mask)
    return losses.mean(-1) if mask is None else losses.sum(-1) / predicted(mask).sum(-1)


def logit_difference(
    logits: Float[Tensor, "batch pos d_vocab"],
    correct: Int[Tensor, " batch"],
    wrong: Int[Tensor, " batch"],
    position: int = -1,
    mask: Mask = None,
) -> Float[Tensor, " batch"]:
    """``logit(correct) − logit(wrong)`` at one position of each prompt.

    Negative positions count from the last real token: −1 is that token, whatever the padding.

    Raises:
        IndexError: A position that some prompt does not have.
    """
    at = real_positions(position, logits, mask)
    rows = torch.arange(len(at), device=at.device)
    here = raised(logits[rows, at])
    return here[rows, correct] - here[rows, wrong]


def kl_divergence(
    clean: Float[Tensor, "batch pos d_vocab"], changed: Float[Tensor, "batch pos d_vocab"], mask: Mask = None
) -> Float[Tensor, " batch"]:
    """``KL(clean ‖ changed) = Σ p_clean log(p_clean / p_changed)``, nats, mean over the real positions of a prompt."""
    log_clean, log_changed = raised(clean).log_softmax(-1), raised(changed).log_softmax(-1)
    per_position = F.kl_div(log_changed, log_clean, reduction="none", log_target=True).sum(-1)
    if mask is None:
        return per_position.mean(-1)
    return per_position.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1)


def raised(x: Tensor) -> Tensor:
    """At least float32: sums over a vocabulary lose too much in 16 bits."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


# --- as values ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompts:
    """What a metric may look at beside the logits.

    Attributes:
        tokens: ``[batch pos]``.
        mask: True for tokens, False for padding; None where all are tokens.
        clean: Logits of the unchanged run, ``[batch pos d_vocab]``.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Mask
    clean: Float[Tensor, "batch pos d_vocab"]


@runtime_checkable
class Metric(Protocol):
    """One number for each prompt, and how much each prompt weighs in a mean."""

    @property
    def name(self) -> str:
        """What a table calls it."""

    def measure(self, logits: Tensor, prompts: Prompts) -> Tensor:
        """``[batch]`` from the logits ``[batch pos d_vocab]`` of a run."""

    def weights(self, prompts: Prompts) -> Tensor:
        """``[batch]``: the number of tokens that each prompt's value is a mean over, or 1."""


class _PerPrompt:
    """A metric with one reading for each prompt: every prompt weighs the same."""

    def weights(self, prompts: Prompts) -> Tensor:
        """Ones."""
        return torch.ones(len(prompts.tokens), dtype=torch.float64, device=prompts.tokens.device)


@dataclass(frozen=True)
class Loss:
    """Next-token loss; a mean over prompts weights tokens."""

    name: str = "loss"

    def measure(self, logits: Tensor, prompts: Prompts) -> Tensor:
        """See `loss_per_prompt`."""
        return loss_per_prompt(logits, prompts.tokens, prompts.mask)

    def weights(self, prompts: Prompts) -> Tensor:
        """Predicted tokens of each prompt."""
        real = torch.ones_like(prompts.tokens, dtype=torch.bool) if prompts.mask is None else prompts.mask
        return predicted(real).sum(-1).double()


@dataclass(frozen=True)
class KL:
    """KL divergence from the clean run; a mean over prompts weights tokens."""

    name: str = "kl"

    def measure(self, logits: Tensor, prompts: Prompts) -> Tensor:
        """See `kl_divergence`."""
        return kl_divergence(prompts.clean, logits, prompts.mask)

    def weights(self, prompts: Prompts) -> Tensor:
        """Tokens of each prompt."""
        real = torch.ones_like(prompts.tokens, dtype=torch.bool) if prompts.mask is None else prompts.mask
        return real.sum(-1).double()


@dataclass(frozen=True, eq=False)
class LogitDiff(_PerPrompt):
    """``logit(correct) − logit(wrong)`` at one position; made by `logit_diff`."""

    correct: Int[Tensor, " batch"] | int
    wrong: Int[Tensor, " batch"] | int
    position: int = -1
    name: str = "logit_diff"

    def measure(self, logits: Tensor, prompts: Prompts) -> Tensor:
        """See `logit_difference`."""
        answers = self.answers(logits.shape[0], logits.shape[-1], logits.device)
        return logit_difference(logits, answers[:, 0], answers[:, 1], self.position, prompts.mask)

    def answers(self, batch: int, d_vocab: int, device: torch.device) -> Int[Tensor, "batch 2"]:
        """The correct and the wrong token of each prompt.

        Raises:
            ValueError: Another number of answers than prompts.
            IndexError: An answer outside the vocabulary.
        """
        given = (("correct", self.correct), ("wrong", self.wrong))
        return torch.stack([_answers(what, ids, batch, d_vocab, device) for what, ids in given], dim=1)


@dataclass(frozen=True, eq=False)
class OfLogits(_PerPrompt):
    """A caller's own function ``logits [batch pos d_vocab] -> [batch]``."""

    function: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        """The function's own name; a lambda has none."""
        own = str(getattr(self.function, "__name__", "metric"))
        return "a function" if own == "<lambda>" else own

    def measure(self, logits: Tensor, prompts: Prompts) -> Any:
        """The function's answer, whatever it is: `measured` checks it."""
        return self.function(logits)


def logit_diff(correct: Int[Tensor, " batch"] | int, wrong: Int[Tensor, " batch"] | int, position: int = -1) -> Metric:
    """The metric ``logit(correct) − logit(wrong)`` at a position of each prompt (−1: its last real token).

    Args:
        correct: Token ids, one for each prompt or one for all.
        wrong: Likewise.
        position: Where the answer is predicted.

    Raises:
        ValueError: `correct` and `wrong` are the same token, or as many as fit no batch together.
        TypeError: Texts (a metric knows no tokenizer), or anything else than whole numbers.
    """
    right, other = _token_ids("correct", correct), _token_ids("wrong", wrong)
    require_whole("position", position, least=-(2**63))
    if right.ndim and other.ndim and right.shape != other.shape:
        raise ValueError(f"correct has shape {list(right.shape)} and wrong {list(other.shape)}: one of each per prompt")
    same = right == other.to(right.device)
    if bool(same.any()):
        where = "" if same.ndim == 0 else f" in row {int(same.nonzero()[0])}"
        raise ValueError(f"correct and wrong are equal{where}: their logits never differ")
    return LogitDiff(correct, wrong, position)


_BY_NAME: dict[str, Metric] = {"loss": Loss(), "kl": KL()}


def as_metric(metric: object) -> Metric:
    """The metric that a name, a metric or a function of the logits stands for.

    Raises:
        ValueError: An unknown name, with the nearest.
        TypeError: Something else.
    """
    if isinstance(metric, str):
        if metric not in _BY_NAME:
            near = difflib.get_close_matches(metric, _BY_NAME, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no metric is called {metric!r}{hint} (use 'loss', 'kl', logit_diff(…) or a function)")
        return _BY_NAME[metric]
    if isinstance(metric, Metric):
        return metric
    if callable(metric):
        return OfLogits(metric)
    raise TypeError(f"expected a metric ('loss', 'kl', logit_diff(…) or a function of logits), not {metric!r}")


def measured(metric: Metric, logits: Tensor, prompts: Prompts, what: str) -> Float[Tensor, " batch"]:
    """A metric's value for each prompt, refused where it is not that.

    Args:
        metric: The metric.
        logits: ``[batch pos d_vocab]`` of a run.
        prompts: What the run was on.
        what: What the run was, for the message: ``"the clean run"``, ``"ablating L2H3"``.

    Raises:
        TypeError: A metric that returned something other than a floating-point tensor.
        ValueError: Another shape than ``[batch]``, NaN or infinity; the message names `what`.
    """
    value = metric.measure(logits, prompts)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{in_messages(metric)} returned {value!r} for {what}, expected a tensor of numbers [batch]")
    if list(value.shape) != [len(prompts.tokens)]:
        expected = f"[batch] = [{len(prompts.tokens)}]"
        raise ValueError(f"{in_messages(metric)} returned shape {list(value.shape)} for {what}, expected {expected}")
    bad = (~value.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"{in_messages(metric)} is {spelled(float(value[row]))} for {what}, in row {row}")
    return value


def in_messages(metric: Metric) -> str:
    """``metric loss``; a lambda, which has no name of its own, as ``metric (a function)``."""
    return f"metric ({metric.name})" if " " in metric.name else f"metric {metric.name}"


def spelled(number: float) -> str:
    """A number that is not finite, for messages."""
    return "NaN" if math.isnan(number) else str(number)


def _token_ids(what: str, given: object) -> Tensor:
    """Answers as a tensor of whole numbers, or an error that says what came instead."""
    if isinstance(given, str) or (isinstance(given, list | tuple) and any(isinstance(id, str) for id in given)):
        raise TypeError(f"{what} must be token ids, not {given!r}; a text's id is model.to_single_token(text)")
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} must be a token id, or one for each prompt, not {given!r}") from None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{what} must be token ids, which are whole numbers, not {given!r}")
    return ids.long()


def _answers(
    what: str, given: Int[Tensor, " batch"] | int, batch: int, d_vocab: int, device: torch.device
) -> Int[Tensor, " batch"]:
    ids = _token_ids(what, given).to(device)
    if ids.ndim > 1 or (ids.ndim == 1 and len(ids) != batch):
        raise ValueError(
            f"{what} has shape {list(ids.shape)}, expected one token id, or one for each of {batch} prompts"
        )
    if bool(((ids < 0) | (ids >= d_vocab)).any()):
        raise IndexError(f"{what} {ids.tolist()} is not in a vocabulary of {d_vocab} (0 to {d_vocab - 1})")
    return ids.expand(batch)
