"""Everything the report shows, measured once: the page and the terminal read the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.ablation import Ablation, ablate
from analysis.accounting import ParameterTable, parameter_table
from analysis.attribution import Attribution, logit_attribution, logit_paths
from analysis.claims import Verification, verify
from analysis.composition import CompositionScores, composition_scores
from analysis.patterns import AttentionPatterns, attention_patterns
from analysis.prompts import built_in, token_labels
from analysis.report.heads import CLEAR, HeadMeasurements, Progress, measure_heads
from analysis.report.predictions import Predictions, predictions
from circuits.components import Component, Head
from circuits.paths import PathExpansion

if TYPE_CHECKING:
    from circuits.model import HookedGPT

PAIRS = 20  # of each kind of composition, in the plain data
PATH_BUDGET = 512  # suffixes to expand: all of a small model's, a few seconds of a large one's


@dataclass(frozen=True)
class Measurements:
    """The results of one report.

    Attributes:
        model: What was measured.
        name: What to call it.
        tokens: The prompt.
        parameters: Parameters by component.
        predictions: Losses and likeliest tokens along the prompt.
        by_head: Ranks, copying and attention scores of every head.
        composition: Q-, K- and V-composition of every pair of heads; none for a single layer.
        patterns: Attention patterns on the prompt.
        ablations: Zero-ablations of heads, MLPs and blocks on the prompt; none for a prompt of one token.
        attribution: What each component adds to the lead of one next token over another, by default of the likeliest
            at the end of the prompt; None for a model whose stream is no sum of writes (post-norm).
        paths: The same lead as a sum over paths; None likewise.
        verification: The lecture's claims, checked on the model (on tokens that suit it, not on the prompt).
    """

    model: HookedGPT
    name: str
    tokens: Int[Tensor, "1 pos"]
    parameters: ParameterTable
    predictions: Predictions
    by_head: HeadMeasurements
    composition: Sequence[CompositionScores]
    patterns: AttentionPatterns
    ablations: Sequence[Ablation]
    attribution: Attribution | None
    paths: PathExpansion | None
    verification: Verification

    @property
    def heads(self) -> tuple[Head, ...]:
        """Every head, in the order of all tables and pictures."""
        return self.by_head.heads

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The tokens of the prompt, white space visible."""
        return token_labels(self.model, self.tokens[0].tolist())

    @cached_property
    def built_in(self) -> str | None:
        """What the prompt is where it is the built-in one of this model."""
        return built_in(self.model, self.tokens)

    @property
    def answers(self) -> tuple[str, ...]:
        """The two tokens that attribution and paths compare; none where there is neither."""
        found = self.attribution
        return () if found is None else token_labels(self.model, [int(found.correct), int(found.wrong)])

    def guesses(self, position: int) -> list[tuple[str, float]]:
        """The likeliest tokens after a position, with their probabilities."""
        ids = self.predictions.guess[position].tolist()
        probabilities = self.predictions.guess_probability[position].tolist()
        return list(zip(token_labels(self.model, ids), probabilities, strict=True))

    @property
    def pattern(self) -> Float[Tensor, "layer head query key"]:
        """The attention patterns on the prompt."""
        return self.patterns.pattern[0]

    @cached_property
    def effects(self) -> dict[Component, float]:
        """Change of the mean loss in nats when a component is zero-ablated."""
        return {
            component: effect
            for result in self.ablations
            for component, effect in zip(result.components, result.mean.tolist(), strict=True)
            if isinstance(component, Component)
        }

    @property
    def most_telling(self) -> Head:
        """The head to show first: a clear induction head, else the one that the loss depends on most."""
        induction = [value if value >= CLEAR else 0.0 for value in self.by_head.score("induction")]
        if max(induction) > 0:
            return self.heads[induction.index(max(induction))]
        return max(self.heads, key=lambda head: self.effects.get(head, 0.0))

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the report as plain data."""
        predicted = zip(self.predictions.rows("token", "next_token", "loss"), self.labels, strict=True)
        prompt = [row | {"text": label, "guesses": self.guesses(row["pos"])} for row, label in predicted]
        return {
            "model": self.name,
            "config": self.model.config.to_dict(),
            "parameters": list(self.parameters.rows()),
            "loss": self.predictions.mean_loss,
            "prompt": prompt,
            "heads": self.by_head.rows(),
            "composition": self._composed(),
            "attribution": self._attributed(),
            "zero_ablation": {str(component): effect for component, effect in self.effects.items()},
            "claims": list(self.verification.rows()),
        }

    def _composed(self) -> dict[str, list[dict[str, Any]]]:
        """The strongest pairs of each kind."""
        return {
            found.kind: [{"writer": str(a), "reader": str(b), "score": v} for a, b, v in found.strongest(PAIRS)]
            for found in self.composition
        }

    def _attributed(self) -> dict[str, Any] | None:
        if self.attribution is None or self.paths is None:
            return None
        values = self.attribution.value[:, 0].tolist()
        return {
            "correct": self.answers[0],
            "wrong": self.answers[1],
            "position": int(self.attribution.position),
            "total": float(self.attribution.total),
            "components": {str(c): v for c, v in zip(self.attribution.components, values, strict=True)},
            "paths": {str(path): float(path.value) for path in self.paths.paths},
            "paths_remainder": float(self.paths.remainder),
            "paths_proven": self.paths.proven,
        }


def measure(
    model: HookedGPT,
    tokens: Int[Tensor, "1 pos"],
    name: str = "model",
    progress: Progress = lambda step: None,
    *,
    correct: int | None = None,
    wrong: int | None = None,
    position: int = -1,
) -> Measurements:
    """Measure everything the report shows; arguments and errors are those of `analysis.report.report`."""
    progress("predictions")
    predicted = predictions(model, tokens)
    progress("attribution")
    attribution, paths = _lead(model, tokens, correct, wrong, position)
    by_head = measure_heads(model, progress)
    progress("composition")
    kinds = ("Q", "K", "V") if model.config.n_layers > 1 else ()
    composition = [composition_scores(model, kind) for kind in kinds]
    progress("attention patterns")
    patterns = attention_patterns(model, tokens)
    ablations = []
    for kind in ablated_kinds(model, tokens):
        progress(f"ablation of {kind}")
        ablations.append(ablate(model, tokens, components=kind, method="zero", progress=False))
    return Measurements(
        model=model,
        name=name,
        tokens=tokens,
        parameters=parameter_table(model.config),
        predictions=predicted,
        by_head=by_head,
        composition=composition,
        patterns=patterns,
        ablations=ablations,
        attribution=attribution,
        paths=paths,
        verification=verify(model, progress=lambda claim: progress(f"claim {claim}")),
    )


def _lead(
    model: HookedGPT, tokens: Int[Tensor, "1 pos"], correct: int | None, wrong: int | None, position: int
) -> tuple[Attribution | None, PathExpansion | None]:
    """The lead of one token over another by component and by path; nothing where there is no such sum."""
    if model.config.norm_placement != "pre" or model.config.d_vocab < 2:
        return None, None
    given = [None if token is None else torch.tensor(token) for token in (correct, wrong)]
    found = logit_attribution(model, tokens, *given, position=position)
    pair = found.correct, found.wrong
    return found, logit_paths(model, tokens, *pair, position=position, routes=1, budget=PATH_BUDGET)


def ablated_kinds(model: HookedGPT, tokens: Int[Tensor, "1 pos"]) -> tuple[str, ...]:
    """What is ablated: what the model has, where there is a loss to change."""
    if tokens.shape[1] < 2:
        return ()
    return ("heads", "mlps", "blocks") if model.config.has_mlp else ("heads", "blocks")
