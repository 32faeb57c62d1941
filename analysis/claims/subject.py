"""What the claims are checked on: a model in a precision in which identities show, some tokens, and one run of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.geometry import private_copy, sequence_jacobian
from analysis.prompts import default_tokens
from circuits.arguments import seeded
from circuits.cache import ActivationCache
from circuits.layers import Norm
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.run import Run
from circuits.tokens import check_tokens

# Above this many parameters a model is checked in its own precision, on fewer tokens, and on some layers and heads.
LARGE = 20_000_000
_LAYERS, _HEADS = 6, 16
# Multiply-adds that the Jacobians of short sequences may cost.
_JACOBIAN_WORK = 4e10


@dataclass(frozen=True)
class Subject:
    """A model under examination; claims only read it.

    Attributes:
        given: The model as it was given.
        model: A private copy: float64 where the model is small and the device has it, at least float32 otherwise.
        tokens: Prompts, ``[batch pos]``.
        seed: Of everything that is drawn.
    """

    given: HookedGPT
    model: HookedGPT
    tokens: Int[Tensor, "batch pos"]
    seed: int = 0

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding may make."""
        return 1e-9 if self.model.dtype == torch.float64 else 2e-4

    @property
    def large(self) -> bool:
        """Whether only some layers and heads are looked at."""
        return size_of(self.given) > LARGE

    @property
    def length(self) -> int:
        """Tokens of a prompt."""
        return self.tokens.shape[1]

    @cached_property
    def layers(self) -> list[int]:
        """The layers that are looked at: all of them, or some from the first to the last."""
        return spread(self.model.config.n_layers, _LAYERS if self.large else 64)

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The heads that are looked at: all of them, or some from all depths."""
        config = self.model.config
        chosen = spread(config.n_layers * config.n_heads, _HEADS if self.large else 64)
        return [divmod(index, config.n_heads) for index in chosen]

    @cached_property
    def sampled(self) -> str:
        """What was left out, for a note; empty where nothing was."""
        config = self.model.config
        if len(self.heads) == config.n_layers * config.n_heads:
            return ""
        return f"on {len(self.heads)} of {config.n_layers * config.n_heads} heads"

    @cached_property
    def _run(self) -> tuple[Tensor, ActivationCache]:
        return self.model.run_with_cache(self.tokens)

    @property
    def cache(self) -> ActivationCache:
        """Every activation of a run on `tokens`."""
        return self._run[1]

    @cached_property
    def logits(self) -> Float[Tensor, "batch pos d_vocab"]:
        """Of a plain run, nothing captured."""
        logits: Tensor = self.model(self.tokens)
        return logits

    def start(self) -> Run:
        """A run beside the stream of `tokens`."""
        return self.model.start(self.tokens)

    def stream(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """What block `layer` reads; `n_layers` stands for what follows the last block."""
        if layer == self.model.config.n_layers:
            return self.cache[block_names(layer - 1).resid_post]
        return self.cache[block_names(layer).resid_pre]

    @property
    def vectors(self) -> Float[Tensor, "vector d_model"]:
        """Vectors that occur in the stream: at every position before the first block and after the last."""
        streams = [self.stream(0), self.stream(self.model.config.n_layers)]
        return torch.cat([stream.flatten(0, 1) for stream in streams])

    def noise(self, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal numbers, the same at every call."""
        generator = seeded(self.seed + seed)
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.model.device, self.model.dtype)

    def other_tokens(self) -> Int[Tensor, "batch pos"]:
        """Tokens that differ from `tokens` at every position, where the vocabulary has two."""
        generator = seeded(self.seed)
        vocabulary = self.model.config.d_vocab
        shift = torch.randint(1, max(vocabulary, 2), self.tokens.shape, generator=generator)
        return (self.tokens + shift.to(self.tokens.device)) % vocabulary

    @cached_property
    def short_jacobians(self) -> tuple[list[Float[Tensor, "size size"]], Float[Tensor, "pos d_model"]]:
        """The full Jacobians of consecutive blocks from the first on, for the first few tokens, and the stream before.

        As many tokens (at most 3) and blocks as are cheap.
        """
        config = self.model.config
        per_block = sum(p.numel() for p in self.model.blocks[0].parameters())
        width = next((n for n in (3, 2) if _work(n, config.d_model, per_block) * config.n_layers < _JACOBIAN_WORK), 1)
        width = min(width, self.length)
        blocks = max(1, min(config.n_layers, int(_JACOBIAN_WORK / _work(width, config.d_model, per_block))))
        run = self.model.start(self.tokens[:1, :width])
        first = list(self.model.blocks)[:blocks]
        streams = [self.stream(layer)[0, :width] for layer in range(blocks)]
        jacobians = [sequence_jacobian(partial(block, run=run), x) for block, x in zip(first, streams, strict=True)]
        return jacobians, streams[0]

    @cached_property
    def untrained(self) -> bool:
        """Whether the weights look as they were drawn: gains 1, shifts and biases 0, no weight exactly 0, no card."""
        neutral = [p for p in self.given.parameters() if p.ndim == 1]
        gains = {id(module.w) for module in self.given.modules() if isinstance(module, Norm)}
        drawn = [p for p in self.given.parameters() if p.ndim > 1]
        return (
            bool(neutral)
            and not self.given.card
            and all(bool((p == float(id(p) in gains)).all()) for p in neutral)
            and not any(bool((p == 0).any()) for p in drawn)
        )

    @cached_property
    def fresh(self) -> tuple[HookedGPT, str] | None:
        """A model as training finds it: this one if it looks untrained, else a new draw; None where that is large."""
        if self.untrained:
            return self.model, "on the model as given, which looks untrained"
        if self.large:
            return None
        new = HookedGPT(self.given.config, seed=self.seed, device=self.model.device, dtype=self.model.dtype)
        return private_copy(new), "on a fresh draw of this configuration, since the model given is trained"


def _work(width: int, d_model: int, per_block: int) -> float:
    """Multiply-adds of the Jacobian of a block on `width` tokens: one backward pass for each output coordinate."""
    return 3.0 * width * d_model * width * per_block


def size_of(model: HookedGPT) -> int:
    """Parameters."""
    return sum(p.numel() for p in model.parameters())


def spread(size: int, most: int) -> list[int]:
    """At most `most` indices below `size`, evenly from the first to the last."""
    if size <= most:
        return list(range(size))
    return sorted({round(i * (size - 1) / (most - 1)) for i in range(most)})


def subject_of(model: HookedGPT, tokens: Int[Tensor, "batch pos"] | None = None, seed: int = 0) -> Subject:
    """A subject: the model's copy, and the tokens given or a prompt that suits it beside a random one.

    Raises:
        ValueError: A model within `with model.hooks(...)`: what would be checked is not the model.
    """
    if model.in_scope_of_hooks:
        raise ValueError("verify checks a model as it is; it cannot run inside `with model.hooks(...)`")
    large = size_of(model) > LARGE
    exact = torch.float32 if model.dtype in (torch.float16, torch.bfloat16) else model.dtype
    if not large and model.device.type != "mps":
        exact = torch.float64
    copied = private_copy(model, exact)
    if tokens is not None:
        return Subject(model, copied, check_tokens(tokens, model.config), seed)
    prompt = default_tokens(model)[:, : 16 if large else 64]
    generator = seeded(seed)
    random = torch.randint(model.config.d_vocab, prompt.shape, generator=generator).to(prompt.device)
    return Subject(model, copied, torch.cat([prompt, random]), seed)


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest ``|actual − expected|``, over the largest entry of either; 0 where both are 0, infinite at a NaN."""
    if not actual.numel():
        return 0.0
    apart, size = (actual - expected).abs().max(), torch.maximum(actual.abs().max(), expected.abs().max())
    return largest(float(apart / size)) if size != 0 else 0.0


def largest(*values: float) -> float:
    """The largest of some distances; infinite where one is not a number, so that none can hide behind the others."""
    return math.inf if any(map(math.isnan, values)) else max(values)
