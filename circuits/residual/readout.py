"""What is read off the stream: a logit, a difference of two logits, or any direction.

The final norm is frozen at the run's own scale, and its gain and centring are put into the direction:
``LN(x) · w + b = x · centred(γ ⊙ w) / scale + β · w + b``. The constants are rows of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.components import Component, NormBias, UnembedBias
from circuits.layers import centred
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Positions
from circuits.residual.requirements import stream_names

# Ids, or the texts of tokens where the model has a tokenizer.
Tokens = int | str | Sequence[int] | Sequence[str] | Tensor


@dataclass(frozen=True)
class Readout:
    """A linear readout of the stream at the chosen positions.

    Attributes:
        quantity: What it is, in words.
        direction: The direction in the stream, the final norm's gain and centring in it.
        scale: What the inner product is divided by: the final norm's own scale; None where no norm is read through.
        constants: Its terms that do not depend on the stream.
        total: The whole quantity, read off the run itself.
        used: The activations behind it.
    """

    quantity: str
    direction: Float[Tensor, "#batch #chosen d_model"]
    scale: Float[Tensor, "batch chosen"] | None
    constants: tuple[tuple[Component, Float[Tensor, "#batch #chosen"]], ...]
    total: Float[Tensor, "batch chosen"]
    used: tuple[str, ...]

    def divided(self, values: Float[Tensor, "component batch chosen"]) -> Float[Tensor, "component batch chosen"]:
        """Inner products with `direction`, as they count in the quantity."""
        return values if self.scale is None else values / self.scale


def logit_readout(
    model: HookedGPT, cache: ActivationCache, correct: Tokens, wrong: Tokens | None, at: Positions
) -> Readout:
    """The logit of `correct`, or its lead over that of `wrong`, before any soft cap.

    Raises:
        IndexError: A token outside the vocabulary.
        ValueError: Another number of tokens than prompts; a correct token and a wrong one that are equal.
    """
    batch = cache[names.EMBED].shape[0]
    right = token_ids("correct", correct, model, batch, at)
    w, bias = _unembedding(model, right, at)
    if wrong is not None:
        other = token_ids("wrong", wrong, model, batch, at)
        _check_different(right, other, at)
        w_wrong, bias_wrong = _unembedding(model, other, at)
        w, bias = w - w_wrong, bias - bias_wrong
    cap = "" if model.config.logit_softcap is None else f" before the soft cap of {model.config.logit_softcap:g}"
    quantity = ("logit" if wrong is None else "logit difference") + cap
    constants = ((UnembedBias(), bias),) if model.config.bias_unembed else ()
    return _through_final_norm(model, cache, w, constants, quantity, at)


def direction_readout(
    model: HookedGPT, cache: ActivationCache, direction: Tensor, stop: int, at: Positions, *, after_norm: bool
) -> Readout:
    """The inner product with any direction, of the stream itself or of what the final norm makes of it.

    Raises:
        ValueError: A direction of another shape than ``[d_model]``, ``[batch d_model]`` or ``[batch pos d_model]``, or
            one that is not finite.
    """
    batch, d_model = cache[names.EMBED].shape[0], model.config.d_model
    allowed = [(d_model,), (batch, d_model)] + ([] if at.one else [(batch, at.n_pos, d_model)])
    if tuple(direction.shape) not in allowed:
        expected = ", ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"a direction in the stream has shape {expected}, not {list(direction.shape)}")
    if not bool(direction.isfinite().all()):
        first = (~direction.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"the direction is {float(direction[tuple(first)])} at {first}")
    u = at.whole(direction)
    u = u[None, None] if u.ndim == 1 else u[:, None] if u.ndim == 2 else u
    if after_norm:
        if stop < model.config.n_layers:
            raise ValueError(
                f"the stream before layer {stop} goes through no final norm: leave layer or after_norm out"
            )
        return _through_final_norm(model, cache, u, (), "direction after the final norm", at)
    name = stream_names(model.config, stop)[0]
    cache.require(name)
    return Readout("direction in the stream", u, None, (), _dot(at.select(cache[name]), u), (name,))


def _through_final_norm(
    model: HookedGPT,
    cache: ActivationCache,
    w: Float[Tensor, "#batch #chosen d_model"],
    constants: tuple[tuple[Component, Tensor], ...],
    quantity: str,
    at: Positions,
) -> Readout:
    norm = model.ln_final
    if norm is None:
        name = block_names(model.config.n_layers - 1).resid_post
        cache.require(name)
        return _with_constants(Readout(quantity, w, None, constants, _dot(at.select(cache[name]), w), (name,)))
    cache.require(names.FINAL_SCALE, names.FINAL_NORMALIZED)
    gained = w * at.whole(norm.w)
    if norm.b is not None:
        constants = ((NormBias("ln_final"), w @ at.whole(norm.b)), *constants)
    total = _dot(at.select(cache[names.FINAL_NORMALIZED]), gained)
    scale = at.select(cache[names.FINAL_SCALE])[..., 0]
    used = (names.FINAL_SCALE, names.FINAL_NORMALIZED)
    return _with_constants(Readout(quantity, centred(gained, norm.kind), scale, constants, total, used))


def _with_constants(readout: Readout) -> Readout:
    total = readout.total + sum((value for _, value in readout.constants), torch.zeros_like(readout.total))
    return Readout(readout.quantity, readout.direction, readout.scale, readout.constants, total, readout.used)


def _dot(x: Float[Tensor, "batch chosen d_model"], u: Float[Tensor, "#batch #chosen d_model"]) -> Tensor:
    return (x * u).sum(-1)


def _unembedding(model: HookedGPT, ids: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """Columns of `W_U` and entries of `b_U`."""
    return at.whole(model.W_U.T[ids]), at.whole(model.b_U[ids])


def _check_different(correct: Tensor, wrong: Tensor, at: Positions) -> None:
    """Refuse to compare a token with itself; of all positions (answers read off the text), some may coincide."""
    same = torch.as_tensor(correct == wrong)
    if bool(same.any() if at.one else same.all()):
        token = int(correct.expand_as(same)[same][0])
        raise ValueError(f"correct and wrong are equal (token {token}): a logit has no difference to itself")


def token_ids(name: str, tokens: Tokens, model: HookedGPT, batch: int, at: Positions) -> Tensor:
    """Token ids ``[#batch #chosen]``: one for all prompts, one for each, or one for each position.

    Raises:
        TypeError: Not whole numbers, nor texts.
        ValueError: Another shape than the batch's; a text that is not one token, or a model without a tokenizer.
        IndexError: An id outside the vocabulary.
    """
    ids = whole_ids(name, tokens, model)
    shapes = [(), (batch,)] + ([] if at.one else [(batch, at.n_pos)])
    if tuple(ids.shape) not in shapes:
        expected = "one token, or one for each of " + (f"{batch} prompts" if at.one else f"{[batch, at.n_pos]} tokens")
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected {expected}")
    outside = ids[(ids < 0) | (ids >= model.config.d_vocab)]
    if len(outside):
        raise IndexError(f"{name}: token {int(outside[0])} is not in a vocabulary of {model.config.d_vocab}")
    return ids.long().reshape(*ids.shape, *[1] * (2 - ids.ndim))


def whole_ids(name: str, tokens: Tokens, model: HookedGPT) -> Tensor:
    """Tokens as their ids, on the model's device.

    Raises:
        TypeError: Not whole numbers, nor texts.
        ValueError: A text that is not one token, or a model without a tokenizer.
    """
    try:
        ids = torch.as_tensor(model.to_token_ids(tokens), device=model.device)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} must be token ids (whole numbers) or their texts, not {tokens!r:.80}") from None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must be token ids (whole numbers), not {ids.dtype}")
    return ids
