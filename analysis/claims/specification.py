"""Section 5 of the lecture: the GPT specification and its causality."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from analysis.claims import formulas
from analysis.claims.claim import Finding, applies, claim, within
from analysis.claims.conventions import off_model
from analysis.claims.subject import Subject, difference, largest
from circuits.names import block_names


@claim(
    "5.embedding",
    "Section 5",
    "The stream begins as X⁽⁰⁾_t = E[x_t] + P[t].",
    "largest relative difference of the first stream from E[x] + P",
)
def embedding(on: Subject) -> Finding:
    """``X⁽⁰⁾_t = E_{x_t,:} + P_{t,:}`` with ``E ∈ R^{V × d}`` and ``P ∈ R^{T_max × d}``.

    Without learned positions P is absent; a scale on the embedding multiplies E.
    """
    config = on.model.config
    notes = []
    expected = on.model.W_E[on.tokens]
    if config.embed_scale != 1:
        expected = expected * config.embed_scale
        notes.append(f"E times {config.embed_scale:.4g}")
    if config.positions == "learned":
        expected = expected + on.model.W_pos[: on.length]
    else:
        notes.append("no P: positions are not learned")
    return within(difference(on.stream(0), expected), on.tolerance, ", ".join(notes))


@claim(
    "5.model",
    "Section 5",
    "The model is E[x] + P, L blocks, a final LayerNorm and W_U: the whole specification.",
    "largest relative difference of the logits from the lecture's formulas",
)
def whole_model(on: Subject) -> Finding:
    """``X⁽⁰⁾ = E[x] + P``; ``Y⁽ˡ⁾ = X⁽ˡ⁾ + MHA⁽ˡ⁾(LN₁⁽ˡ⁾(X⁽ˡ⁾))``, ``X⁽ˡ⁺¹⁾ = Y⁽ˡ⁾ + MLP⁽ˡ⁾(LN₂⁽ˡ⁾(Y⁽ˡ⁾))`` for l = 0 …
    L − 1; ``Z = LN_f(X⁽ᴸ⁾) W_U``.

    The formulas are written out from the weights, apart from the model's own code, in `analysis.claims.formulas`; a
    plain pass is compared with them. Biases, activation and sizes are the model's.
    """
    off = off_model(on.model.config)
    applies(not off, off)
    # Written out at full length: one row and some tokens do for large models.
    tokens = on.tokens[:1] if on.large else on.tokens
    return within(difference(on.logits[: len(tokens)], formulas.gpt(tokens, on.model)), on.tolerance)


@claim(
    "5.probabilities",
    "Section 5",
    "Next-token probabilities are the softmax of the logits.",
    "largest of |Σ p − 1| and the difference of the model's loss from −mean log p",
)
def probabilities(on: Subject) -> Finding:
    """``p(· | x_{≤ t}) = softmax(Z_t)``, and the loss is ``−log p(x_{t+1} | x_{≤ t})`` in nats, mean over t."""
    shifted = on.logits - on.logits.amax(-1, keepdim=True)
    p = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
    off = float((p.sum(-1) - 1).abs().max())
    if on.length > 1:
        chosen = p[:, :-1].gather(-1, on.tokens[:, 1:, None])[..., 0]
        tiny = torch.finfo(p.dtype).tiny
        off = largest(off, difference(on.model.loss(on.tokens), -chosen.clamp(min=tiny).log().mean()))
    return within(off, 10 * on.tolerance)


@claim(
    "5.1.mask",
    "Remark 5.1, Lecture 4",
    "The causal mask: no query attends to a later position, and every row of attention sums to 1.",
    "largest attention to a later position, or distance of a row sum from 1",
)
def mask(on: Subject) -> Finding:
    """``A[t, s] = 0`` for s > t, exactly, since ``exp(−∞) = 0``; and ``Σ_{s ≤ t} A[t, s] = 1`` (Lecture 4, proposition
    4.3).
    """
    worst = 0.0
    for layer in on.layers:
        pattern = on.cache[block_names(layer).pattern]
        worst = largest(worst, float(pattern.triu(1).abs().max()), float((pattern.sum(-1) - 1).abs().max()))
    return within(worst, on.tolerance)


@claim(
    "5.1",
    "Remark 5.1",
    "Each logit row Z_t is a function of x_1, …, x_t only.",
    "largest derivative of Z_t by the first stream at a later position, over the largest at an earlier one",
)
def causality(on: Subject) -> Finding:
    """The only operation across positions is attention, and it is masked; a composition of maps that are each causal is
    causal. So ``∂Z_t / ∂X⁽⁰⁾_s = 0`` for every s > t, exactly: no path leads there.
    """
    applies(on.length > 1, "a single token: there is no later one")
    first = block_names(0).resid_pre
    direction = on.noise(on.model.config.d_vocab)
    later, earlier = 0.0, 0.0
    for t in sorted({0, (on.length - 1) // 2, on.length - 2}):
        scalar = partial(_read_at, t=t, direction=direction)
        _, _, gradients = on.model.run_with_grads(on.tokens, scalar, names_filter=first)
        later = largest(later, float(gradients[first][:, t + 1 :].abs().max()))
        earlier = largest(earlier, float(gradients[first][:, : t + 1].abs().max()))
    return within(largest(later / earlier if earlier else later), on.tolerance, "exercise 2 perturbs tokens instead")


def _read_at(logits: Tensor, t: int, direction: Tensor) -> Tensor:
    return (logits[:, t] @ direction).sum()
