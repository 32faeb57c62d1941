"""Which components, and which paths, make a model prefer one next token to another: measured on prompts.

The exact algebra is `circuits.residual` and `circuits.paths`; here the runs are made that it needs, in batches, and the
mean over prompts is given with its interval.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.results import Result, result
from analysis.uncertainty import bootstrap_interval
from circuits import paths
from circuits.arguments import require_model
from circuits.components import Component
from circuits.residual import Unit, direct_logit_attribution, needed_names
from circuits.residual.positions import Position, asked_positions
from circuits.residual.readout import Tokens, whole_ids
from circuits.tokens import check_mask, check_tokens, last_positions
from circuits.validity import require_whole

if TYPE_CHECKING:
    from circuits.model import HookedGPT
    from circuits.paths import PathExpansion

Answers = Tokens | None


@result
class Attribution(Result):
    """What every component adds directly to the lead of one logit over another; the rows of a prompt sum to `total`.

    Attributes:
        components: Who each row belongs to, the constants (final norm's shift, `b_U`) last.
        value: In logits.
        mean: Over prompts.
        interval: 95% bootstrap interval of the mean; NaN for one prompt.
        total: The whole lead of each prompt.
        correct: The token whose logit it is.
        wrong: The token that it is compared with.
        position: Where, in the padded prompt.
        quantity: What was attributed, in words.
        error: The largest ``|Σ rows − total|``.
    """

    table = ("mean", "interval")

    components: tuple[Component, ...]
    value: Float[Tensor, "component batch"]
    mean: Float[Tensor, " component"]
    interval: Float[Tensor, "component bound"]
    total: Float[Tensor, " batch"]
    correct: Int[Tensor, " batch"]
    wrong: Int[Tensor, " batch"]
    position: Int[Tensor, " batch"]
    quantity: str
    error: float


def logit_attribution(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    correct: Answers = None,
    wrong: Answers = None,
    *,
    attention_mask: Tensor | None = None,
    position: Position = -1,
    unit: Unit = "head",
    batch_size: int = 32,
) -> Attribution:
    """Direct logit attribution of ``logit(correct) − logit(wrong)``, mean over prompts (every prompt weighs the same).

    See `circuits.residual.direct_logit_attribution` for the formula. An effect through later components does not count
    here: that is what ablation and patching measure.

    Args:
        model: A pre-norm model, or one without norms.
        tokens: The prompts.
        correct: The answer, an id or a text: one for all prompts or one for each; by default the model's likeliest.
        wrong: The token to compare with; by default the likeliest of the others.
        attention_mask: 1 for tokens, 0 for padding.
        position: One, or one for each prompt: −1 is the last real token of each.
        unit: ``"layer"``, ``"head"`` or ``"neuron"``.
        batch_size: How many prompts run at once.

    Raises:
        ValueError: A post-norm model; NaN or infinities, with the first place.
        IndexError: A token or position that does not exist.
    """
    require_model(model)
    tokens = check_tokens(tokens, model.config)
    mask = check_mask(attention_mask, tokens)
    right, other = _answers("correct", correct, model, tokens), _answers("wrong", wrong, model, tokens)
    at = _one_for_each(position, len(tokens))
    parts, pairs = [], []
    for start in range(0, len(tokens), require_whole("batch_size", batch_size)):
        rows = slice(start, start + batch_size)
        part_mask = None if mask is None else mask[rows]
        with torch.no_grad():
            logits, cache = model.run_with_cache(tokens[rows], needed_names(model.config, unit), part_mask)
        pair = answers_of(logits, part_mask, _part(right, rows), _part(other, rows), at[rows])
        pairs.append(pair)
        parts.append(direct_logit_attribution(model, cache, *pair, at[rows], unit=unit))
    value = torch.cat([part.values for part in parts], dim=1).cpu()
    return Attribution(
        components=parts[0].components,
        value=value,
        mean=value.mean(1),
        interval=bootstrap_interval(value, value.new_ones(value.shape[1])),
        total=torch.cat([part.total for part in parts]).cpu(),
        correct=torch.cat([pair[0] for pair in pairs]).cpu(),
        wrong=torch.cat([pair[1] for pair in pairs]).cpu(),
        position=torch.cat([part.position for part in parts if part.position is not None]).cpu(),
        quantity=parts[0].quantity,
        error=max(part.error for part in parts),
    )


def logit_paths(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    correct: Answers = None,
    wrong: Answers = None,
    *,
    attention_mask: Tensor | None = None,
    position: Position = -1,
    top: int | None = 20,
    routes: int = 0,
    budget: int = paths.BUDGET,
) -> PathExpansion:
    """Path expansion of ``logit(correct) − logit(wrong)`` on prompts, in one run.

    See `circuits.paths.expand_paths`; answers that are not given are found as for `logit_attribution`.
    """
    require_model(model)
    tokens = check_tokens(tokens, model.config)
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens, paths.needed_names(model.config), attention_mask=attention_mask)
    right, other = _answers("correct", correct, model, tokens), _answers("wrong", wrong, model, tokens)
    at = _one_for_each(position, len(tokens))
    pair = answers_of(logits, cache.attention_mask, right, other, at)
    return paths.expand_paths(model, cache, *pair, at, top, routes=routes, budget=budget)


def answers_of(
    logits: Float[Tensor, "batch pos d_vocab"],
    mask: Bool[Tensor, "batch pos"] | None,
    correct: Int[Tensor, " batch"] | None,
    wrong: Int[Tensor, " batch"] | None,
    position: Position = -1,
) -> tuple[Int[Tensor, " batch"], Int[Tensor, " batch"]]:
    """The two tokens to compare: those given, else the likeliest at the position, and the likeliest of the others.

    Raises:
        ValueError: A vocabulary of one token.
    """
    if logits.shape[-1] < 2:
        raise ValueError("a logit difference needs a vocabulary of at least 2 tokens")
    last = last_positions(logits, mask)
    asked = asked_positions(-1 if position is None else position, len(last)).to(last.device)
    at = torch.where(asked < 0, last + 1 + asked, asked)
    # A position that does not exist is refused, with its reason, by the attribution itself.
    here = logits[torch.arange(len(at), device=at.device), at.clamp(0, logits.shape[1] - 1)]
    if correct is None:
        correct = _likeliest_but(wrong, here)
    if wrong is None:
        wrong = _likeliest_but(correct, here)
    return correct.to(here.device), wrong.to(here.device)


def _likeliest_but(token: Int[Tensor, " batch"] | None, logits: Float[Tensor, "batch d_vocab"]) -> Tensor:
    if token is not None:
        # A token outside the vocabulary is refused, with its reason, by the attribution itself.
        known = token.to(logits.device).clamp(0, logits.shape[-1] - 1)
        logits = logits.scatter(-1, known[:, None], float("-inf"))
    return logits.argmax(-1)


def _one_for_each(position: Position, batch: int) -> Int[Tensor, " batch"]:
    if position is None:
        raise ValueError("one position of each prompt is attributed: give position a number, or one for each prompt")
    return asked_positions(position, batch)


def _answers(
    name: str, tokens: Answers, model: HookedGPT, prompts: Int[Tensor, "batch pos"]
) -> Int[Tensor, " batch"] | None:
    if tokens is None:
        return None
    ids = whole_ids(name, tokens, model)
    if ids.ndim > 1 or (ids.ndim == 1 and len(ids) != len(prompts)):
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected one token, or one for each of {len(prompts)}")
    return ids.expand(len(prompts))


def _part(tokens: Int[Tensor, " batch"] | None, rows: slice) -> Int[Tensor, " part"] | None:
    return None if tokens is None else tokens[rows]
