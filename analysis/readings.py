"""How a metric is read off recomputed streams: only the positions and the columns of the unembedding that it needs.

`ReadMetric` binds any metric of `analysis.metrics` to a sweep of interventions. The loss, the KL divergence and a logit
difference are read cell by cell from the final stream; a function of the logits gets whole logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from analysis.metrics import KL, LogitDiff, Loss, Metric, Prompts, in_messages, measured, raised, spelled
from circuits.finite import check_finite
from circuits.model import HookedGPT
from circuits.products import linear
from circuits.rerun.clean import Clean
from circuits.rerun.engine import Changed
from circuits.rerun.sweep import Reading
from circuits.tokens import predicted, real_positions

# Numbers of a block of logits: few enough to stay in the caches between the product and the sum over the vocabulary.
_BLOCK = 2**22
# Cells and columns of the vocabulary of such a block for the loss, which needs only sums over it.
_CELLS, _COLUMNS = 512, 1024
# Clean log-probabilities are kept up to this many numbers, and made again for each block beyond it.
_KEPT = 2**26


@dataclass(frozen=True, eq=False)
class NextTokens:
    """What a loss is to predict, where that is not the tokens of the run itself.

    Attributes:
        tokens: The token that is right after each position.
        counted: The positions whose loss counts.
    """

    tokens: Int[Tensor, "batch pos"]
    counted: Bool[Tensor, "batch pos"]


@dataclass(frozen=True, eq=False)
class ReadMetric:
    """A metric as something that a sweep can read.

    Attributes:
        metric: The metric.
        targets: What a loss is to predict; None: the next token of the run itself.
    """

    metric: Metric
    targets: NextTokens | None = None

    def positions(self, tokens: Tensor, mask: Tensor | None) -> Int[Tensor, "batch slot"] | None:
        """The positions that are read in each row; None: all."""
        batch, pos = tokens.shape
        if isinstance(self.metric, Loss):
            if pos < 2:
                raise ValueError("a loss needs at least 2 positions; got 1")
            return torch.arange(pos - 1, device=tokens.device).expand(batch, -1)
        if isinstance(self.metric, LogitDiff):
            return real_positions(self.metric.position, tokens, mask)[:, None]
        return None

    def columns(self, d_vocab: int) -> int:
        """How many columns of the unembedding are read at each of them."""
        return 2 if isinstance(self.metric, LogitDiff) else d_vocab

    def bind(self, clean: Clean, what: str = "the clean run") -> Reading:
        """The metric on this clean run, which messages call `what`.

        Raises:
            TypeError, ValueError: It is no finite number for each prompt on the clean run; the first weight that is
                not finite, where that is why.
        """
        try:
            return self._bound(clean, what)
        except ValueError:
            check_finite(dict(clean.model.named_parameters()))  # a weight, if it is one
            raise

    def _bound(self, clean: Clean, what: str) -> Reading:
        if isinstance(self.metric, Loss):
            return LossReading(self.metric, clean, what, self.targets)
        if isinstance(self.metric, KL):
            return KLReading(self.metric, clean, what)
        if isinstance(self.metric, LogitDiff):
            return LogitDiffReading(self.metric, clean, what)
        return LogitsReading(self.metric, clean, what)


class _CellReading(ABC):
    """A metric that is a weighted mean, for each prompt, of one number at each position that is read."""

    def __init__(self, metric: Metric, clean: Clean, what: str, counted: Bool[Tensor, "batch slot"]) -> None:
        self.metric, self.run, self.counted = metric, clean, counted
        self.per_cell = self._clean_cells()
        self.clean = _checked(metric, self._mean(self.per_cell[None]), [what])[0]

    def _clean_cells(self) -> Float[Tensor, "batch slot"]:
        row, slot = self.counted.nonzero(as_tuple=True)
        cells = self.cells(self.run.final[row, self.column(row, slot)], row, slot)
        return cells.new_zeros(self.counted.shape).index_put((row, slot), cells)

    def column(self, row: Tensor, slot: Tensor) -> Tensor:
        """The position of each slot."""
        return slot

    @abstractmethod
    def cells(self, final: Float[Tensor, "cell d_model"], row: Tensor, slot: Tensor) -> Float[Tensor, " cell"]:
        """The number at each cell."""

    def values(self, changed: Changed, labels: Sequence[str]) -> Float[Tensor, "lane batch"]:
        """The mean of each prompt under each lane: cells that did not change keep their clean number."""
        lane, row, slot, final = changed.lane, changed.row, changed.slot, changed.final
        counts = self.counted[row, slot]
        if not bool(counts.all()):
            lane, row, slot, final = lane[counts], row[counts], slot[counts], final[counts]
        cells = self.per_cell.expand(len(labels), -1, -1).clone()
        if len(lane):
            cells[lane, row, slot] = self.cells(final, row, slot)
        return _checked(self.metric, self._mean(cells), labels)

    def _mean(self, cells: Float[Tensor, "lane batch slot"]) -> Float[Tensor, "lane batch"]:
        return (cells * self.counted).sum(-1) / self.counted.sum(-1)


class LossReading(_CellReading):
    """Next-token loss, a block of logits at a time."""

    def __init__(self, metric: Metric, clean: Clean, what: str, targets: NextTokens | None = None) -> None:
        if targets is None:
            real = torch.ones_like(clean.tokens, dtype=torch.bool) if clean.mask is None else clean.mask
            targets = NextTokens(clean.tokens[:, 1:], predicted(real))
        self._next = targets.tokens
        super().__init__(metric, clean, what, targets.counted)

    def cells(self, final: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """``−log p(next token)``."""
        model, targets = self.run.model, self._next[row, slot]
        at_once = max(_CELLS * _COLUMNS // model.config.d_vocab, _CELLS)
        pieces = zip(final.split(at_once), targets.split(at_once), strict=True)
        return torch.cat([cross_entropies(model, *piece) for piece in pieces])


class KLReading(_CellReading):
    """``KL(clean ‖ changed)`` at every real position."""

    def __init__(self, metric: Metric, clean: Clean, what: str) -> None:
        real = torch.ones_like(clean.tokens, dtype=torch.bool) if clean.mask is None else clean.mask
        self._kept: Tensor | None = None
        if clean.tokens.numel() * clean.model.config.d_vocab <= _KEPT:
            self._kept = raised(clean.model.unembed_normalised(clean.final)).log_softmax(-1)
        super().__init__(metric, clean, what, real)

    def _clean_cells(self) -> Tensor:
        return raised(self.run.final.new_zeros(self.counted.shape))

    def cells(self, final: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """``Σ p_clean log(p_clean / p)``."""

        def divergence(block: slice) -> Tensor:
            changed = raised(self.run.model.unembed_normalised(final[block])).log_softmax(-1)
            if self._kept is not None:
                clean = self._kept[row[block], slot[block]]
            else:
                here = self.run.final[row[block], slot[block]]
                clean = raised(self.run.model.unembed_normalised(here)).log_softmax(-1)
            return F.kl_div(changed, clean, reduction="none", log_target=True).sum(-1)

        return _in_blocks(divergence, len(final), self.run.model)


class LogitDiffReading(_CellReading):
    """A logit difference: two columns of the unembedding at one position."""

    def __init__(self, metric: LogitDiff, clean: Clean, what: str) -> None:
        batch, config = len(clean.tokens), clean.model.config
        self._at = real_positions(metric.position, clean.tokens, clean.mask)
        self._answers = metric.answers(batch, config.d_vocab, clean.tokens.device)
        weight, bias = clean.model.W_U.T, clean.model.unembed.bias
        self._directions = weight[self._answers]
        self._shifts = None if bias is None else bias[self._answers]
        super().__init__(metric, clean, what, torch.ones(batch, 1, dtype=torch.bool, device=clean.tokens.device))

    def column(self, row: Tensor, slot: Tensor) -> Tensor:
        """The one position of each row."""
        return self._at[row]

    def cells(self, final: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """``logit(correct) − logit(wrong)``."""
        logits = (self._directions[row] @ final[..., None])[..., 0]
        logits = logits if self._shifts is None else logits + self._shifts[row]
        logits = raised(self.run.model.capped(logits))
        return logits[:, 0] - logits[:, 1]


class LogitsReading:
    """A metric of whole logits, one lane after the other."""

    def __init__(self, metric: Metric, clean: Clean, what: str) -> None:
        self.metric, self.run = metric, clean
        self._logits = clean.model.unembed_normalised(clean.final)
        self._prompts = Prompts(clean.tokens, clean.mask, self._logits)
        self.clean = measured(metric, self._logits.clone(), self._prompts, what)  # a metric may write into its logits

    def values(self, changed: Changed, labels: Sequence[str]) -> Float[Tensor, "lane batch"]:
        """The metric under each lane."""
        found = []
        for lane, label in enumerate(labels):
            own = changed.lane == lane
            logits = self._logits.clone()
            logits[changed.row[own], changed.slot[own]] = self.run.model.unembed_normalised(changed.final[own])
            found.append(measured(self.metric, logits, self._prompts, label))
        return torch.stack(found)


def cross_entropies(
    model: HookedGPT, final: Float[Tensor, "cell d_model"], targets: Int[Tensor, " cell"]
) -> Float[Tensor, " cell"]:
    """``log Σ_v exp(logit_v) − logit_target``, the vocabulary a block at a time.

    A block of logits is used while it is in the caches and written over by the next; the whole of them, of which there
    can be gigabytes, is never there.
    """
    weight, bias = model.W_U.T, model.unembed.bias
    if len(weight) <= _COLUMNS:
        return F.cross_entropy(raised(model.unembed_normalised(final)), targets, reduction="none")
    sums = []
    for start in range(0, len(weight), _COLUMNS):
        columns = slice(start, start + _COLUMNS)
        part = None if bias is None else bias[columns]
        logits = raised(model.capped(linear(final, weight[columns], part)))
        # log_softmax is one pass over memory, logsumexp several; any column tells the two apart.
        sums.append(logits[:, 0] - logits.log_softmax(-1)[:, 0])
    right = (final * weight[targets]).sum(-1)
    right = raised(model.capped(right if bias is None else right + bias[targets]))
    return torch.stack(sums).logsumexp(0) - right


def _in_blocks(function: Callable[[slice], Tensor], length: int, model: HookedGPT) -> Tensor:
    """A function of cells, a block of them at a time."""
    step = max(_BLOCK // model.config.d_vocab, 16)
    return torch.cat([function(slice(start, start + step)) for start in range(0, length, step)])


def _checked(metric: Metric, values: Float[Tensor, "lane batch"], whats: Sequence[str]) -> Tensor:
    """The values, refused where one is NaN or infinite."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        lane, row = bad[0].tolist()
        found = float(values[lane, row])
        raise ValueError(f"{in_messages(metric)} is {spelled(found)} for {whats[lane]}, in row {row}")
    return values
