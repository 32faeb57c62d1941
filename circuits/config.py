"""What a GPT is made of: one frozen, validated value that every other module reads.

An architecture is never asked for its name. Whatever a family of models needs is a field here, with a neutral default
that leaves the lecture's GPT unchanged.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from circuits.validity import (
    ACTIVATIONS as ACTIVATIONS,
    check_combinations,
    check_given,
    check_sizes,
    require_positive_number,
    require_size,
)

Activation = Literal["gelu", "gelu_new", "relu", "silu"]
NormKind = Literal["layernorm", "rmsnorm"]
ParallelBlocks = Literal[False, "shared_norm", "two_norms"]

# A default that depends on other fields: it reads as None only until `__post_init__` has put the number in. So a reader
# may count on the number, while whoever builds a config may give None (and one window for all layers).
_DERIVED: Any = None
if TYPE_CHECKING:
    _Size = int
    _Number = float
    _Flag = bool
    _Windows = tuple[int | None, ...]
else:
    _Size = int | None
    _Number = float | None
    _Flag = bool | None
    _Windows = int | tuple[int | None, ...] | list[int | None] | None


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How a rotary model's frequencies were stretched after training on short contexts.

    Attributes:
        kind: ``"linear"`` divides every frequency by `factor`; ``"llama3"`` divides only the slow ones, by wavelength.
        factor: By how much the context was stretched.
        low_freq_factor: llama3 only: wavelengths above ``original_n_ctx / low_freq_factor`` are divided in full.
        high_freq_factor: llama3 only: wavelengths below ``original_n_ctx / high_freq_factor`` are left alone.
        original_n_ctx: llama3 only: the context length before stretching, in tokens.

    Raises:
        ValueError: A factor that is not positive, or an unknown kind.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_n_ctx: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rotary scaling kind {self.kind!r} is not one of 'linear', 'llama3'")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_n_ctx"):
            require_positive_number(f"rotary scaling {name}", getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rotary scaling high_freq_factor {self.high_freq_factor} is not above "
                f"low_freq_factor {self.low_freq_factor}"
            )

    @staticmethod
    def from_dict(data: dict[str, Any]) -> RotaryScaling:
        """The fields from plain JSON data.

        Raises:
            ValueError: An unknown or a missing field, by name.
        """
        _check_fields(RotaryScaling, data, "the rotary scaling")
        return RotaryScaling(**data)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape and the conventions of a decoder-only transformer.

    The defaults are the lecture's: learned positions, pre-norm LayerNorm, exact GELU, biases on the MLP maps and the
    attention output only, an unembedding of its own.

    Attributes:
        n_layers: Number of blocks L.
        d_model: Width of the residual stream d.
        n_heads: Query heads per layer H.
        n_ctx: Longest sequence T_max, in tokens.
        d_vocab: Vocabulary size V.
        d_head: Width of a head; by default ``d_model / n_heads``, which must then be whole.
        d_mlp: Hidden width of the MLP; by default ``4 * d_model``. 0 in an attention-only model.
        n_kv_heads: Key and value heads (grouped-query attention); by default `n_heads`.
        act: Activation of the MLP: ``"gelu"`` is exact, ``"gelu_new"`` the tanh approximation.
        gated_mlp: ``act(x W_gate) * (x W_in)`` in place of ``act(x W_in)``.
        attn_only: No MLPs.
        norm: Kind of normalisation, or None for none at all.
        norm_eps: ε under the root.
        norm_placement: ``"pre"`` normalises what a branch reads, ``"post"`` the stream after each addition.
        final_norm: Normalise before the unembedding; by default yes for pre-norm, no for post-norm or no norm.
        positions: ``"learned"`` adds `W_pos`, ``"rotary"`` turns queries and keys, None knows no positions.
        rotary_base: Base of the rotary frequencies ``base^(-2i / rotary_dim)``.
        rotary_dim: How many of a head's coordinates turn; by default all of them.
        rotary_layout: Which coordinates form a plane: ``"half"`` (i, i + rotary_dim/2) or ``"interleaved"`` (2i, 2i+1).
        rotary_scaling: Stretched frequencies, or None.
        parallel_blocks: Attention and MLP both read the block's input: through one shared norm, or one norm each.
        bias_qkv: Biases on queries, keys and values.
        bias_out: Bias on the attention output.
        bias_mlp: Biases on the MLP's two maps (never on the gate).
        bias_unembed: Bias on the logits.
        tie_embeddings: ``W_U = W_E.T``, one parameter.
        qk_norm: RMSNorm over each head's query and key, with gains shared by the heads of a layer.
        branch_norm: Normalise what a branch adds to the stream as well as what it reads.
        attn_scale: Factor on the scores; by default ``1 / sqrt(d_head)``.
        attn_softcap: ``c * tanh(scores / c)`` before the mask.
        logit_softcap: ``c * tanh(logits / c)``.
        window: Per layer, how many positions a query sees (itself included), or None for all; one value serves all
            layers.
        embed_scale: Factor on the token embedding as it enters the stream.

    Raises:
        TypeError: A field of the wrong type.
        ValueError: A value, or a combination of values, that cannot mean anything; the message names the fields.
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_ctx: int
    d_vocab: int
    d_head: _Size = _DERIVED
    d_mlp: _Size = _DERIVED
    n_kv_heads: _Size = _DERIVED
    act: Activation = "gelu"
    gated_mlp: bool = False
    attn_only: bool = False
    norm: NormKind | None = "layernorm"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post"] = "pre"
    final_norm: _Flag = _DERIVED
    positions: Literal["learned", "rotary"] | None = "learned"
    rotary_base: float = 10_000.0
    rotary_dim: _Size = _DERIVED
    rotary_layout: Literal["half", "interleaved"] = "half"
    rotary_scaling: RotaryScaling | None = None
    parallel_blocks: ParallelBlocks = False
    bias_qkv: bool = False
    bias_out: bool = True
    bias_mlp: bool = True
    bias_unembed: bool = False
    tie_embeddings: bool = False
    qk_norm: bool = False
    branch_norm: bool = False
    attn_scale: _Number = _DERIVED
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    window: _Windows = _DERIVED
    embed_scale: float = 1.0

    def __post_init__(self) -> None:
        check_given(self)
        if self.rotary_scaling is not None and not isinstance(self.rotary_scaling, RotaryScaling):
            raise TypeError(f"rotary_scaling must be a RotaryScaling or None, not {self.rotary_scaling!r}")
        for name, rule in _RULES.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, rule(self))
        object.__setattr__(self, "window", _window_per_layer(self.window, self.n_layers))
        check_sizes(self)
        check_combinations(self)

    @staticmethod
    def course() -> GPTConfig:
        """The lecture's course configuration ``(V, T_max, d, H, L) = (65, 64, 128, 4, 4)``: 816,640 parameters."""
        return GPTConfig(n_layers=4, d_model=128, n_heads=4, n_ctx=64, d_vocab=65)

    @staticmethod
    def gpt2_small() -> GPTConfig:
        """The shape and conventions of GPT-2 small (12 layers, 12 heads, width 768, 50,257 tokens)."""
        return GPTConfig(
            n_layers=12,
            d_model=768,
            n_heads=12,
            n_ctx=1024,
            d_vocab=50257,
            act="gelu_new",
            bias_qkv=True,
            tie_embeddings=True,
        )

    @property
    def group_size(self) -> int:
        """Query heads that share one key and value head."""
        return self.n_heads // self.n_kv_heads

    @property
    def has_mlp(self) -> bool:
        """Whether the blocks have MLPs."""
        return not self.attn_only

    @property
    def has_resid_mid(self) -> bool:
        """Whether the stream has a value between attention and MLP (sequential blocks with an MLP)."""
        return self.has_mlp and not self.parallel_blocks

    @property
    def n_writes(self) -> int:
        """Additions to the stream after the embedding: 2L, or L without MLPs."""
        return self.n_layers * (2 if self.has_mlp else 1)

    def replace(self, **changes: Any) -> GPTConfig:
        """A copy with some fields changed, validated anew.

        A field that stands at the value its rule gives (``d_head = d_model / n_heads``, say) follows the rule again.
        """
        for name in changes:
            if name not in _FIELDS:
                raise TypeError(unknown_field(name))
        kept = {name: getattr(self, name) for name in _FIELDS if not (name in _RULES and _follows_rule(self, name))}
        return GPTConfig(**{**kept, **changes})

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON data."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> GPTConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: An unknown or a missing field, by name.
        """
        _check_fields(GPTConfig, data, "the config")
        fields = dict(data)
        if isinstance(fields.get("window"), list):  # JSON has no tuples
            fields["window"] = tuple(fields["window"])
        if isinstance(fields.get("rotary_scaling"), dict):
            fields["rotary_scaling"] = RotaryScaling.from_dict(fields["rotary_scaling"])
        return GPTConfig(**fields)


_FIELDS = {field.name: field for field in dataclasses.fields(GPTConfig)}


def unknown_field(name: str, kind: type = GPTConfig) -> str:
    """The message for a field that a kind of config does not have, with the closest that it has."""
    known = [field.name for field in dataclasses.fields(kind)]
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else f"; the fields are {', '.join(known)}"
    return f"{kind.__name__} has no field {name!r}{hint}"


def _check_fields(kind: type, data: dict[str, Any], what: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in data:
        if name not in fields:
            raise ValueError(unknown_field(name, kind))
    missing = [name for name, f in fields.items() if f.default is dataclasses.MISSING and name not in data]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")


def _divided(config: GPTConfig) -> int:
    d_head, rest = divmod(config.d_model, config.n_heads)
    if rest:
        raise ValueError(
            f"d_model {config.d_model} is not n_heads {config.n_heads} × d_head for any whole d_head; "
            "give d_head to choose one of your own"
        )
    return d_head


# What a field that was left open becomes, in the order in which the rules need each other.
_RULES: dict[str, Callable[[GPTConfig], Any]] = {
    "d_head": _divided,
    "d_mlp": lambda c: 0 if c.attn_only else 4 * c.d_model,
    "n_kv_heads": lambda c: c.n_heads,
    "final_norm": lambda c: c.norm is not None and c.norm_placement == "pre",
    "rotary_dim": lambda c: c.d_head if c.positions == "rotary" else 0,
    "attn_scale": lambda c: c.d_head**-0.5,
    "window": lambda c: (None,) * c.n_layers,
}


def _follows_rule(config: GPTConfig, name: str) -> bool:
    try:
        return bool(getattr(config, name) == _RULES[name](config))
    except ValueError:
        return False


def _window_per_layer(window: Any, n_layers: int) -> tuple[int | None, ...]:
    per_layer = tuple(window) if isinstance(window, tuple | list) else (window,) * n_layers
    if len(per_layer) != n_layers:
        raise ValueError(f"window lists {len(per_layer)} layers, but n_layers is {n_layers}")
    for layer, size in enumerate(per_layer):
        if size is not None:
            require_size(f"window of layer {layer}", size)
    return per_layer
