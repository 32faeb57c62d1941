"""TransformerLens models that are in memory: a 4.x `TransformerBridge` or a 3.x `HookedTransformer`.

Nothing is imported from TransformerLens. Both kinds show their weights under the same names per layer (``attn.W_Q
[head d_model d_head]``, ``mlp.W_in [d_model d_mlp]``, …), whatever is stored beneath and whether it was processed
(folded, centred) or not; those are what is read.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.config import GPTConfig
from circuits.initialise import load_exactly
from circuits.model import HookedGPT
from circuits.pretrained.folder import family_and_config
from circuits.pretrained.transformer_lens_config import config_of
from circuits.text import PretrainedTokenizer


def from_transformer_lens(
    model: Any, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> HookedGPT:
    """A model of our own with the weights, and so the logits, of a TransformerLens model, which is left alone.

    Args:
        model: A `TransformerBridge` (native or wrapping a Hugging Face model) or a `HookedTransformer`; processed
            (`fold_ln` and the like) or not: what comes out has the same processing.
        device: Where the weights go; by default where they are.
        dtype: Their type; by default the one they have.

    Raises:
        TypeError: Something else.
        UnsupportedModel: An architecture, or a value in its config, that has no equal here; by name.
    """
    if not all(hasattr(model, name) for name in ("cfg", "blocks", "embed", "unembed")):
        raise TypeError(f"expected a TransformerBridge or a HookedTransformer, not {type(model).__name__}")
    config = _config(model)
    ours = HookedGPT(config, device="meta")
    options = {"device": device or model.embed.W_E.device, "dtype": dtype or model.embed.W_E.dtype}
    weights = _weights(model, config)
    with torch.no_grad():
        load_exactly(ours, {name: _new(weights[name], **options) for name in ours.state_dict()})
    ours.tokenizer = _tokenizer(model)
    ours.card = {"source": str(getattr(model.cfg, "model_name", "unnamed")), "from": "TransformerLens"}
    return ours


def _new(tensor: Tensor, **options: Any) -> Tensor:
    """A tensor of our own, whatever views it was put together from."""
    return torch.empty(tensor.shape, **options).copy_(tensor)


def _config(model: Any) -> GPTConfig:
    """The configuration, corrected by what the weights have: processing adds biases and unties embeddings."""
    wrapped: Any = getattr(getattr(model, "original_model", None), "config", None)
    config = family_and_config(wrapped.to_dict())[1] if hasattr(wrapped, "model_type") else config_of(model.cfg)
    attn, mlp = model.blocks[0].attn, getattr(model.blocks[0], "mlp", None)
    present = {
        "bias_qkv": any(getattr(attn, name, None) is not None for name in ("b_Q", "b_K", "b_V")),
        "bias_out": getattr(attn, "b_O", None) is not None,
        "bias_mlp": config.has_mlp and _bias(mlp, "in") is not None,
        "bias_unembed": config.bias_unembed or bool(model.unembed.b_U.any()),
        "tie_embeddings": config.tie_embeddings and torch.equal(model.embed.W_E, model.unembed.W_U.T),
    }
    return config.replace(**present)


def _weights(model: Any, config: GPTConfig) -> dict[str, Tensor]:
    """All of its weights under our names; more than a config needs, where it needs fewer."""
    # Gemma's norms multiply by 1 + w; 3.x has added the 1 already.
    base = 1.0 if getattr(model.cfg, "rmsnorm_uses_offset", False) else 0.0
    weights = {
        "embed.weight": model.embed.W_E,
        "unembed.weight": model.unembed.W_U.T,
        "unembed.bias": model.unembed.b_U,
    }
    if config.positions == "learned":
        weights["pos_embed.weight"] = model.pos_embed.W_pos
    if config.final_norm:
        weights |= _norm("ln_final", model.ln_final, config.d_model, base)
    for layer, block in enumerate(model.blocks):
        within = _attention_weights(block.attn, config)
        if config.has_mlp:
            within |= _mlp_weights(block.mlp, config)
        for name in ("ln1", "ln2", "ln1_post", "ln2_post"):
            if getattr(block, name, None) is not None and config.norm is not None:
                within |= _norm(name, getattr(block, name), config.d_model, base)
        weights |= {f"blocks.{layer}.{name}": tensor for name, tensor in within.items()}
    return weights


def _attention_weights(attn: Any, config: GPTConfig) -> dict[str, Tensor]:
    def stored(heads: Tensor) -> Tensor:
        """Key and value heads as stored: 3.x shows them repeated for every query head."""
        return heads if heads.shape[0] == config.n_kv_heads else heads[:: config.group_size]

    q, k, v = attn.W_Q, stored(attn.W_K), stored(attn.W_V)
    biases = [
        q.new_zeros(w.shape[0], config.d_head) if b is None else b
        for w, b in ((q, attn.b_Q), (k, attn.b_K), (v, attn.b_V))
    ]
    weights = {
        "attn.qkv.weight": torch.cat([w.transpose(1, 2).flatten(0, 1) for w in (q, k, v)]),
        "attn.qkv.bias": torch.cat([biases[0].flatten(), *(stored(b).flatten() for b in biases[1:])]),
        "attn.out.weight": attn.W_O.flatten(0, 1).T,
        "attn.out.bias": _or_zeros(attn.b_O, q, config.d_model),
    }
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        weights |= _norm(f"attn.{name}", getattr(attn, name), config.d_head)
    return weights


def _mlp_weights(mlp: Any, config: GPTConfig) -> dict[str, Tensor]:
    weights = {"mlp.up.weight": mlp.W_in.T, "mlp.down.weight": mlp.W_out.T}
    if config.gated_mlp:
        weights["mlp.gate.weight"] = mlp.W_gate.T
    for ours, theirs, size in (("up", "in", config.d_mlp), ("down", "out", config.d_model)):
        weights[f"mlp.{ours}.bias"] = _or_zeros(_bias(mlp, theirs), mlp.W_in, size)
    return weights


def _bias(mlp: Any, name: str) -> Tensor | None:
    """``b_in`` or ``b_out``: a parameter in 3.x, the bias of a part in 4.x."""
    own = _parameter(mlp, f"b_{name}")
    return own if own is not None else _parameter(getattr(mlp, name, None), "bias")


def _or_zeros(bias: Tensor | None, like: Tensor, size: int) -> Float[Tensor, " size"]:
    return like.new_zeros(size) if bias is None else bias.flatten()


def _norm(name: str, norm: Any, size: int, base: float = 0.0) -> dict[str, Tensor]:
    """Gain and shift; those that were folded away, or that the norm never had, are 1 and 0."""
    gain, shift = (_parameter(norm, *names) for names in (("w", "weight"), ("b", "bias")))
    gain = torch.ones(size) if gain is None else base + gain
    return {f"{name}.w": gain, f"{name}.b": torch.zeros(size) if shift is None else shift}


def _parameter(module: Any, *names: str) -> Tensor | None:
    """A parameter by its name in 3.x or in 4.x."""
    found = (getattr(module, name, None) for name in names)
    return next((tensor for tensor in found if isinstance(tensor, Tensor)), None)


def _tokenizer(model: Any) -> PretrainedTokenizer | None:
    """Its tokenizer, with its own rule for the beginning of a text; None where it has none that can be kept."""
    fast = getattr(getattr(model, "tokenizer", None), "backend_tokenizer", None)
    if fast is None:
        return None
    bos = model.tokenizer.bos_token_id
    begins = bool(getattr(model.cfg, "default_prepend_bos", True)) and bos is not None
    return PretrainedTokenizer(fast.to_str(), bos, begins)
