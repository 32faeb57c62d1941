"""Where heads look: attention patterns, and scores that say how far a head follows a known rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model, seeded
from circuits.finite import check_result
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.tokens import check_mask, check_tokens

Pattern = Float[Tensor, "batch layer head query key"]
PREVIEWED = 6  # weights that the repr shows


@result
class AttentionPatterns(Result):
    """The attention of every head on a batch of prompts.

    Attributes:
        pattern: ``A[b, l, h, t, s]``: how much of what query t of prompt b reads comes from key s. Rows sum to 1;
            those of padding to 0.
        tokens: The prompts.
    """

    table = ("pattern",)
    pattern: Float[Tensor, "batch layer head query key"]
    tokens: Int[Tensor, "batch key"]

    def title(self) -> str:
        """On how many prompts, and what the repr previews."""
        prompts = "1 prompt" if len(self.tokens) == 1 else f"{len(self.tokens)} prompts"
        return f"AttentionPatterns of {prompts}; the rows shown are the largest weights of queries after the first"

    def _previewed(self) -> Sequence[int]:
        later = self.pattern.detach().float().clone()
        later[..., 0, :] = -1.0  # the first query can only look at itself
        most = min(PREVIEWED, later.numel())
        return [int(place) for place in later.flatten().topk(most).indices.tolist()]


@torch.no_grad()
def attention_patterns(
    model: HookedGPT, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
) -> AttentionPatterns:
    """The attention patterns of one pass, ``softmax(mask(q kᵀ · scale))`` (lecture 1.1).

    Args:
        model: A model.
        tokens: Prompts.
        attention_mask: 1 for tokens, 0 for padding.

    Raises:
        ValueError: Weights, hence attention, that are not finite (where first).
    """
    require_model(model)
    names = [block_names(layer).pattern for layer in range(model.config.n_layers)]
    _, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=attention_mask)
    pattern = torch.stack([cache[name] for name in names], dim=1)
    check_result("the attention", model, pattern)
    return AttentionPatterns(pattern=pattern, tokens=tokens)


# --- rules ----------------------------------------------------------------------------------------------------------


@result
class HeadScores(Result):
    """How much attention each head gives to what a rule names; every mean weights tokens.

    Attributes:
        previous: To the token before, ``mean A[t, t−1]``.
        current: To the token itself, ``mean A[t, t]``.
        first: To the first token, ``mean A[t, 0]``.
        duplicate: To the same token seen before, ``mean A[t, t−n]``; NaN where no token occurs twice.
        induction: To the token after the same token seen before, ``mean A[t, t−n+1]``; NaN likewise.
        entropy: ``mean −Σ_s A[t, s] log A[t, s]``, nats.
        tokens: What it was measured on.
        source: Where these tokens come from.
    """

    table = ("previous", "current", "first", "duplicate", "induction", "entropy")
    previous: Float[Tensor, "layer head"]
    current: Float[Tensor, "layer head"]
    first: Float[Tensor, "layer head"]
    duplicate: Float[Tensor, "layer head"]
    induction: Float[Tensor, "layer head"]
    entropy: Float[Tensor, "layer head"]
    tokens: Int[Tensor, "batch pos"]
    source: str

    def title(self) -> str:
        """What the scores were measured on."""
        return f"Attention scores on {self.source}"


def head_scores(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"] | None = None,
    n: int | None = None,
    batch: int = 8,
    seed: int = 0,
    attention_mask: Tensor | None = None,
) -> HeadScores:
    """Score every head by the rules that heads are known to follow (Elhage et al. 2021; Olsson et al. 2022).

    Means run over the positions t ≥ 1 of the real tokens. On random sequences of length n, repeated twice, `duplicate`
    and `induction` are ``A[t, t−n]`` and ``A[t, t−n+1]`` on the second half. On tokens of your own they are the
    attention to all earlier positions that hold the same token, and to the positions after those, over the queries that
    have such a key; on sequences without repeats inside the two halves that is the same thing.

    Args:
        model: A model.
        tokens: Prompts to measure on; by default random repeated ones (`repeated_tokens`), for which alone `n`, `batch`
            and `seed` count.
        n: Length of the sequence that is repeated; by default as long as n_ctx allows, up to 64.
        batch: How many random sequences.
        seed: Their seed.
        attention_mask: 1 for tokens, 0 for padding; with `tokens` only.

    Raises:
        ValueError: Nothing to score: an `n` that n_ctx does not hold, or prompts of a single token.
    """
    require_model(model)
    if tokens is None:
        start = start_token(model)
        length = _longest_repeat(model, start) if n is None else n
        tokens = repeated_tokens(model, length, batch, seed)
        duplicate, induction = _targets_of_repeat(tokens.shape[1], length)
        source = _repeated_source(batch, length, model.config.d_vocab, start)
        real = torch.ones_like(tokens, dtype=torch.bool)
    else:
        tokens = check_tokens(tokens, model.config)
        mask = check_mask(attention_mask, tokens)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        duplicate, induction = _targets_by_equality(tokens, real)
        source = f"{len(tokens)} given prompt{'s' if len(tokens) > 1 else ''}"
    if not bool((real.sum(-1) > 1).any()):
        raise ValueError("head scores need a prompt of at least 2 tokens; got 1")
    pattern = attention_patterns(model, tokens, attention_mask).pattern
    targets = {
        **_targets_by_place(real),
        "duplicate": duplicate.to(real.device),
        "induction": induction.to(real.device),
    }
    scores = {name: attention_on(pattern, target) for name, target in targets.items()}
    return HeadScores(**scores, entropy=mean_entropy(pattern, _scored_queries(real)), tokens=tokens, source=source)


def attention_on(pattern: Pattern, target: Bool[Tensor, "#batch query key"]) -> Float[Tensor, "layer head"]:
    """Mean attention to the target keys, over the queries that have one; NaN where no query has."""
    queries = target.any(-1).expand(pattern.shape[0], -1)
    on_target = (pattern * target[:, None, None]).sum(-1)
    return on_target.sum((0, 3)) / queries.sum()


def mean_entropy(pattern: Pattern, queries: Bool[Tensor, "batch query"]) -> Float[Tensor, "layer head"]:
    """Mean entropy of the attention of some queries, nats."""
    entropy: Tensor = torch.special.entr(pattern).sum(-1)
    return (entropy * queries[:, None, None]).sum((0, 3)) / queries.sum()


def _scored_queries(real: Bool[Tensor, "batch pos"]) -> Bool[Tensor, "batch pos"]:
    """Every real token but the first, which can look nowhere else than at itself."""
    return real & (real.cumsum(-1) > 1)


def _targets_by_place(real: Bool[Tensor, "batch pos"]) -> dict[str, Bool[Tensor, "batch query key"]]:
    """Previous, current and first token, counted over the real tokens."""
    place = real.cumsum(-1)
    back = place[:, :, None] - place[:, None, :]
    both = _scored_queries(real)[:, :, None] & real[:, None, :]
    return {"previous": both & (back == 1), "current": both & (back == 0), "first": both & (place[:, None, :] == 1)}


def _targets_of_repeat(length: int, n: int) -> tuple[Bool[Tensor, "1 query key"], Bool[Tensor, "1 query key"]]:
    """Duplicate and induction keys on the second half of a sequence whose last 2 n tokens are one sequence twice."""
    position = torch.arange(length)
    back = position[:, None] - position[None, :]
    second = (position >= length - n)[:, None]
    return (second & (back == n))[None], (second & (back == n - 1))[None]


def _targets_by_equality(
    tokens: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
) -> tuple[Bool[Tensor, "batch query key"], Bool[Tensor, "batch query key"]]:
    """Duplicate and induction keys wherever a token occurred before."""
    same = (tokens[:, :, None] == tokens[:, None, :]) & real[:, :, None] & real[:, None, :]
    duplicate = same.tril(-1)
    induction = torch.zeros_like(duplicate)
    induction[:, :, 1:] = duplicate[:, :, :-1]
    return duplicate, induction.tril(-1) & real[:, None, :]


# --- random repeated sequences --------------------------------------------------------------------------------------


def start_token(model: HookedGPT) -> int | None:
    """The token that the model's tokenizer begins a text with, or None."""
    return None if model.tokenizer is None else model.tokenizer.bos_token_id


def _longest_repeat(model: HookedGPT, start: int | None) -> int:
    return min(64, (model.config.n_ctx - (start is not None)) // 2)


def _repeated_source(batch: int, n: int, d_vocab: int, start: int | None) -> str:
    """What `repeated_tokens` drew, in words: that no token repeats inside is what a reader cannot guess."""
    different = "different " if n <= d_vocab - (start is not None) else ""
    return f"{batch} sequences of {n} {different}random tokens, twice{'' if start is None else ' after a start token'}"


def repeated_tokens(model: HookedGPT, n: int, batch: int = 8, seed: int = 0) -> Int[Tensor, "batch pos"]:
    """Random sequences of `n` tokens, each twice in a row, after the start token where the model has one.

    No token stands twice in a sequence where the vocabulary is large enough; the start token is never drawn.

    Raises:
        ValueError: `n` below 2, twice `n` longer than n_ctx, or `batch` below 1.
    """
    require_model(model)
    config, start = model.config, start_token(model)
    length = 2 * n + (start is not None)
    if n < 2 or batch < 1:
        raise ValueError(f"repeated sequences need n ≥ 2 and batch ≥ 1, not n {n} and batch {batch}")
    if length > config.n_ctx:
        raise ValueError(f"n {n} twice is a sequence of {length} tokens, but n_ctx is {config.n_ctx}")
    generator = seeded(seed)
    drawable = torch.tensor([token for token in range(config.d_vocab) if token != start])
    rounds = -(-n // len(drawable))  # more than one only where the vocabulary is too small for n different tokens
    orders = [torch.rand(batch, len(drawable), generator=generator).argsort(-1) for _ in range(rounds)]
    once = drawable[torch.cat(orders, dim=1)[:, :n]]
    parts = [once, once] if start is None else [torch.full((batch, 1), start), once, once]
    return torch.cat(parts, dim=1).to(model.device)
