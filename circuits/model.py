"""HookedGPT: the lecture's section 5.

``X⁽⁰⁾ = E[x] + P``, then L blocks, then ``Z = LN_f(X⁽ᴸ⁾) W_U + b_U``. Hooks are arguments of a pass: the model holds
none, so two threads may run it with different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from circuits import generation, names
from circuits.block import Blocks, TransformerBlock
from circuits.cache import ActivationCache
from circuits.config import GPTConfig
from circuits.hooks import NO_HOOKS, NO_TAP, FwdHooks, Hooks, Tap, edits_of
from circuits.initialise import initialise, load_exactly
from circuits.layers import Norm
from circuits.names import NamesFilter
from circuits.pages import keep_freed_pages
from circuits.placement import check_device, check_dtype
from circuits.run import Run, make_run, token_positions
from circuits.text_interface import TextInterface
from circuits.tokens import check_mask, check_tokens, mean_over_predicted, next_token_losses
from circuits.weights import StackedWeights, Unembedding, unfilled_embedding

if TYPE_CHECKING:
    from circuits.text import Tokenizer

# Hooks of the enclosing `with model.hooks(...)` blocks of this thread or task, for each model by identity.
_SCOPED: ContextVar[tuple[tuple[HookedGPT, Hooks], ...]] = ContextVar("circuits_scoped_hooks", default=())


class HookedGPT(StackedWeights, TextInterface):
    """A GPT whose every named activation can be read, kept and changed.

    Args:
        config: The architecture.
        seed: Seed of the initial weights; the same seed gives the same weights on every device and in every dtype.
        device: Where the weights live; by default torch's default device.
        dtype: Type of the weights; by default torch's default type.

    Attributes:
        config: The architecture (also as `cfg`).
        tokenizer: Text to tokens and back, or None.
        card: Where the model came from, as plain data.
    """

    ln_final: Norm | None

    def __init__(
        self,
        config: GPTConfig,
        seed: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, GPTConfig):
            raise TypeError(f"config must be a GPTConfig, not {type(config).__name__}")
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.card: dict[str, Any] = {}
        keep_freed_pages()
        # Sizes and shapes first, without memory; then memory, filled once.
        target = check_device(device) or torch.get_default_device()
        meta: dict[str, Any] = {"device": "meta", "dtype": check_dtype(dtype) or torch.get_default_dtype()}
        self.embed = unfilled_embedding(config.d_vocab, config.d_model, **meta)
        learned = config.positions == "learned"
        self.pos_embed = unfilled_embedding(config.n_ctx, config.d_model, **meta) if learned else None
        self.blocks = Blocks(TransformerBlock(config, layer, **meta) for layer in range(config.n_layers))
        norm = config.norm if config.final_norm else None
        self.ln_final = None if norm is None else Norm(norm, config.d_model, config.norm_eps, **meta)
        self.unembed = Unembedding(config, self.embed, **meta)
        self.hook_names: tuple[str, ...] = names.hook_names(config)
        if target.type != "meta":
            self.to_empty(device=target)
            initialise(self, config, seed)

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state: Mapping[str, Tensor]) -> HookedGPT:
        """A model that takes over the given tensors without copying them.

        Raises:
            ValueError: Missing, extra or misshapen tensors, or mixed types: all of them listed.
        """
        model = cls(config, device="meta")
        load_exactly(model, state)
        return model

    # --- the forward pass ---

    def forward(
        self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of the next token at every position.

        Args:
            tokens: Token ids.
            attention_mask: 1 for tokens, 0 for padding on either side; the real tokens get the logits of the unpadded
                prompt, and positions are counted over them alone.

        Raises:
            TypeError, ValueError, IndexError: Tokens or a mask that cannot mean anything; the message says which.
        """
        return self._pass(tokens, attention_mask, NO_HOOKS)[0]

    def _pass(self, tokens: Tensor, attention_mask: Tensor | None, hooks: Hooks) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(tokens, Tensor) and tokens.device != self.device:
            raise ValueError(
                f"tokens are on {tokens.device}, the model on {self.device}; write tokens.to(model.device)"
            )
        tokens = check_tokens(tokens, self.config)
        mask = check_mask(attention_mask, tokens)
        for model, scoped in reversed(_SCOPED.get()):
            hooks = scoped | hooks if model is self else hooks
        tap = NO_TAP if hooks is NO_HOOKS else Tap(hooks)
        run = self.start(tokens, mask, tap)
        x = self.embedding(tokens, run)
        for block in self.blocks:
            x = block(x, run)
        return self.unembedding(x, tap), tap.captured

    def start(self, tokens: Tensor, mask: Bool[Tensor, "batch pos"] | None = None, tap: Tap = NO_TAP) -> Run:
        """The `Run` of a pass over checked tokens from the first position on."""
        positions = token_positions(tokens.shape[0], tokens.shape[1], mask, tokens.device)
        return make_run(self.config, positions, self.dtype, key_mask=mask, tap=tap)

    def embedding(self, tokens: Int[Tensor, "batch pos"], run: Run) -> Float[Tensor, "batch pos d_model"]:
        """``X⁽⁰⁾``: the (scaled) token embedding, plus the positions where they are learned."""
        x = F.embedding(tokens, self.embed.weight)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        x = run.tap(names.EMBED, x)
        if self.pos_embed is None:
            return x
        positions = F.embedding(run.positions, self.pos_embed.weight)
        return x + run.tap(names.POS_EMBED, positions.expand_as(x) if run.tap.touches(names.POS_EMBED) else positions)

    def unembedding(self, x: Float[Tensor, "*batch d_model"], tap: Tap = NO_TAP) -> Float[Tensor, "*batch d_vocab"]:
        """``Z = cap(LN_f(X) W_U + b_U)``."""
        if self.ln_final is not None:
            x = self.ln_final.tapped(x, tap, names.FINAL_SCALE, names.FINAL_NORMALIZED)
        return self.unembed_normalised(x)

    def unembed_normalised(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_vocab"]:
        """``cap(X W_U + b_U)`` of a final stream that is normalised already."""
        return self.capped(self.unembed(x))

    def capped(self, logits: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Logits as the model gives them: ``c tanh(logits / c)`` where it has a soft cap."""
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def loss(
        self, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None, *, per_token: bool = False
    ) -> Float[Tensor, ""] | Float[Tensor, "batch pos-1"]:
        """Next-token cross-entropy in nats: the mean over predicted tokens, or one value for each.

        Per token, a position whose token or successor is padding has 0; the mean leaves it out. A model in half
        precision has its loss in float32.

        Raises:
            ValueError: No position that has a next token.
        """
        logits = self(tokens, attention_mask)
        mask = check_mask(attention_mask, tokens)
        losses = next_token_losses(logits, tokens.long(), mask)
        return losses if per_token else mean_over_predicted(losses, mask)

    # --- hooks ---

    def run_with_cache(
        self,
        tokens: Int[Tensor, "batch pos"],
        names_filter: NamesFilter = None,
        attention_mask: Tensor | None = None,
        *,
        fwd_hooks: FwdHooks = (),
    ) -> tuple[Float[Tensor, "batch pos d_vocab"], ActivationCache]:
        """Logits, and the activations that `names_filter` selects, as they are after any change by `fwd_hooks`.

        Args:
            tokens: Token ids.
            names_filter: None for everything but ``hook_result`` and the split inputs; a name, names, or a predicate.
            attention_mask: 1 for tokens, 0 for padding.
            fwd_hooks: Changes to make in the same pass, as for `run_with_hooks`.

        Raises:
            KeyError: A name that the model does not have, with the closest that it has.
        """
        hooks = Hooks(names.resolve(names_filter, self.hook_names), edits_of(fwd_hooks, self.hook_names))
        logits, captured = self._pass(tokens, attention_mask, hooks)
        return logits, self._cache(captured, tokens, attention_mask)

    def run_with_hooks(
        self,
        tokens: Int[Tensor, "batch pos"],
        fwd_hooks: FwdHooks = (),
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Logits of a pass in which functions see and change activations.

        Args:
            tokens: Token ids.
            fwd_hooks: ``(name | names | predicate, function)`` pairs; ``function(activation, hook)`` gets a copy, and
                returns a new value or None.
            attention_mask: 1 for tokens, 0 for padding.

        Raises:
            KeyError: A name that the model does not have.
            ValueError: A function returned another shape or type; the message names the hook.
        """
        return self._pass(tokens, attention_mask, Hooks(edits=edits_of(fwd_hooks, self.hook_names)))[0]

    def run_with_grads(
        self,
        tokens: Int[Tensor, "batch pos"],
        scalar: Callable[[Tensor], Tensor],
        names_filter: NamesFilter = None,
        attention_mask: Tensor | None = None,
        *,
        fwd_hooks: FwdHooks = (),
    ) -> tuple[Float[Tensor, ""], ActivationCache, ActivationCache]:
        """A scalar of the logits, the activations that `names_filter` selects, and its gradient by each of them.

        Nothing is left behind: no parameter's ``.grad`` is touched, no graph is kept. An activation that the scalar
        does not depend on has gradient 0.

        Args:
            tokens: Token ids.
            scalar: Logits ``[batch pos d_vocab]`` to one number.
            names_filter: As for `run_with_cache`.
            attention_mask: 1 for tokens, 0 for padding.
            fwd_hooks: Changes to make in the same pass; gradients flow through them.

        Raises:
            ValueError: `scalar` returned more than one number, or one that does not depend on the logits.
        """
        wanted = names.resolve(names_filter, self.hook_names)
        hooks = Hooks(wanted, edits_of(fwd_hooks, self.hook_names), grad=True)
        with torch.inference_mode(False), torch.enable_grad():
            if isinstance(tokens, Tensor) and tokens.is_inference():
                tokens = tokens.clone()  # autograd keeps the ids, and refuses those made in inference mode
            logits, captured = self._pass(tokens, attention_mask, hooks)
            value = scalar(logits)
            _check_scalar(value)
            gradients: tuple[Tensor, ...] = ()
            if captured:
                gradients = torch.autograd.grad(
                    value.reshape(()), list(captured.values()), allow_unused=True, materialize_grads=True
                )
        cache = self._cache(captured, tokens, attention_mask).detach()
        by_name = dict(zip(captured, gradients, strict=True))
        return value.detach().reshape(()), cache, self._cache(by_name, tokens, attention_mask)

    @contextmanager
    def hooks(self, fwd_hooks: FwdHooks = ()) -> Iterator[HookedGPT]:
        """Change activations in every pass of this model within the block, in this thread only."""
        scoped = Hooks(edits=edits_of(fwd_hooks, self.hook_names))
        token = _SCOPED.set((*_SCOPED.get(), (self, scoped)))
        try:
            yield self
        finally:
            _SCOPED.reset(token)

    @property
    def in_scope_of_hooks(self) -> bool:
        """Whether an enclosing `with model.hooks(...)` block of this thread changes passes of this model."""
        return any(model is self for model, _ in _SCOPED.get())

    def _cache(self, captured: Mapping[str, Tensor], tokens: Tensor, mask: Tensor | None) -> ActivationCache:
        return ActivationCache(captured, self.config, check_mask(mask, tokens))

    def generate(self, tokens: Int[Tensor, "batch pos"], max_new_tokens: int, **options: Any) -> Tensor:
        """Continue sequences token by token (see `circuits.generation.generate`)."""
        return generation.generate(self, tokens, max_new_tokens, **options)

    # --- what it is ---

    @property
    def cfg(self) -> GPTConfig:
        """Another name of `config`."""
        return self.config

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.embed.weight.dtype


def _check_scalar(value: object) -> None:
    """Refuse what has no gradient by anything in the model."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        came = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the scalar to differentiate must be one number, not {came}")
    if not value.requires_grad:
        raise ValueError("the scalar to differentiate does not depend on the logits (or was detached from them)")
    if value.is_complex():
        raise ValueError(f"the scalar to differentiate must be real, not {value.dtype}")
