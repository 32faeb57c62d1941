"""Processing: the same function with simpler weights, as a new model.

Each step leaves every log-probability as it was, up to rounding in the model's own type, and refuses an architecture
where it could not. Each is idempotent, shares no storage with its input, and is listed in the new model's
``card["processing"]``. Logits agree too, except under `center_unembed`, which moves all logits of a position by one
amount that softmax does not see: compare log-probabilities, not logits, across that step.

A step that changes `W_U` or `W_E` of a model with tied embeddings unties them: the new model has two parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from circuits.arguments import require_model
from circuits.config import GPTConfig
from circuits.finite import check_finite
from circuits.folded import read_through
from circuits.layers import Norm
from circuits.model import HookedGPT

Weights = dict[str, Tensor]


@torch.no_grad()
def fold_ln(model: HookedGPT) -> HookedGPT:
    """Gain, shift and centring of every norm that is read through, put into the weights that read.

    ``LN(x) W + b = n W' + b'`` with n the normalised stream, ``W' = P diag(γ) W`` and ``b' = b + β W``; P takes the
    mean off (LayerNorm): columns of W' sum to 0. Then γ = 1 and β = 0. A shift turns on the bias fields that have to
    take it (`bias_qkv`, `bias_mlp`, `bias_unembed`); a tied unembedding is untied.

    The norms on a branch's output (`branch_norm`) and those of queries and keys (`qk_norm`) keep their gains: what
    follows them is the stream itself, or a dot product, and no weight.

    Raises:
        ValueError: Post-norm, where a norm's output is the stream that later layers add to; a gated MLP under a
            LayerNorm with a shift, which the gate has no bias to take; weights that are not finite.
    """
    require_model(model)
    config = model.config
    if config.norm_placement == "post":
        raise ValueError(
            "fold_ln cannot be exact on a post-norm model: what its norms put out is the stream itself, which later "
            "blocks add to, and not only the input of weights that could take their gain"
        )
    state = _copied_weights(model)
    read = [(norm, readers) for norm, readers in _readers(model) if norm is not None]
    shifted = {reader for norm, readers in read if norm.b is not None and norm.b.any() for reader in readers}
    gates = sorted(reader for reader in shifted if reader.endswith(".gate"))
    if gates:
        raise ValueError(
            f"fold_ln cannot be exact here: the shift β of the norm before {gates[0]} would have to become a bias of "
            "the gate, and gated MLPs have none (gated_mlp True, norm 'layernorm')"
        )
    fields = {_BIAS_OF[reader.rpartition(".")[2]] for reader in shifted}
    new = config.replace(**dict.fromkeys(fields, True))
    if config.final_norm and config.tie_embeddings:
        new = _untied(new, state)
    _add_missing(new, state)
    for norm, readers in read:
        for reader in readers:
            _fold_into(state, reader, norm)
    for name in state:
        if name.rpartition(".")[0].endswith(("ln1", "ln2", "ln_final")):
            state[name].fill_(1.0 if name.endswith(".w") else 0.0)
    return _built(model, new, state, "fold_ln")


@torch.no_grad()
def center_writing_weights(model: HookedGPT) -> HookedGPT:
    """Every write to the stream less its mean over d_model: `W_E`, `W_pos`, `W_O`, `b_O`, `W_out`, `b_out`.

    Every LayerNorm takes that mean off before anything reads the stream. A tied unembedding is untied and keeps its
    weights.

    Raises:
        ValueError: Something reads the stream with its mean (RMSNorm, no norm, no final norm, post-norm), or puts one
            back (a norm on a branch's output); weights that are not finite.
    """
    require_model(model)
    config = model.config
    refusals = {
        "it has no norm, so nothing takes the stream's mean off": config.norm is None,
        "RMSNorm does not take the stream's mean off": config.norm == "rmsnorm",
        "post-norm blocks read the embedding before any norm, and add to what a norm put out": (
            config.norm_placement == "post"
        ),
        "the unembedding reads the stream through no norm (final_norm False)": not config.final_norm,
        "the gain of a norm on a branch's output (branch_norm) puts a mean back that no weight can take out": (
            config.branch_norm
        ),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ValueError(f"center_writing_weights cannot be exact on this model: {reason}")
    state = _copied_weights(model)
    new = _untied(config, state) if config.tie_embeddings else config
    for name, tensor in state.items():
        layer = name.rpartition(".")[0]
        if layer in ("embed", "pos_embed"):
            state[name] = _less_mean(tensor, -1)
        elif layer.endswith((".attn.out", ".mlp.down")):
            state[name] = _less_mean(tensor, 0)
    return _built(model, new, state, "center_writing_weights")


@torch.no_grad()
def center_unembed(model: HookedGPT) -> HookedGPT:
    """`W_U` and `b_U` less their means over the vocabulary.

    The logits of a position move by one common amount, so that log-probabilities agree and logits do not. A tied
    unembedding is untied.

    Raises:
        ValueError: A soft cap on the logits, which bends what softmax would not see; weights that are not finite.
    """
    require_model(model)
    config = model.config
    if config.logit_softcap is not None:
        raise ValueError(
            f"center_unembed cannot be exact under a soft cap on the logits ({config.logit_softcap:g}): the cap is not "
            "linear, so that a common shift of all logits before it is none after it"
        )
    state = _copied_weights(model)
    new = _untied(config, state) if config.tie_embeddings else config
    for name in ("unembed.weight", "unembed.bias"):
        if name in state:
            state[name] = _less_mean(state[name], 0)
    return _built(model, new, state, "center_unembed")


@torch.no_grad()
def fold_value_biases(model: HookedGPT) -> HookedGPT:
    """Value biases moved to where they act: ``b_O' = b_O + Σ_h b_V^h W_O^h`` and ``b_V' = 0``.

    Attention rows sum to 1, so a head adds ``b_V W_O`` whatever it attends to. Exact on every architecture; `bias_out`
    is turned on where there was none. What zero-ablating a head does changes with this step, and so does a run whose
    attention rows are edited to another sum: the bias no longer belongs to the head.

    Raises:
        ValueError: Weights that are not finite.
    """
    require_model(model)
    config = model.config
    state = _copied_weights(model)
    if not (
        config.bias_qkv and any(bool(block.attn.b_V.any()) for block in model.blocks if block.attn.b_V is not None)
    ):
        return _built(model, config, state, "fold_value_biases")
    new = config.replace(bias_out=True)
    _add_missing(new, state)
    for layer, block in enumerate(model.blocks):
        b_V = block.attn.b_V
        assert b_V is not None
        out = f"blocks.{layer}.attn.out"
        per_query_head = b_V.repeat_interleave(config.group_size, dim=0).flatten()
        state[f"{out}.bias"] = _plus_image(state[f"{out}.bias"], state[f"{out}.weight"], per_query_head)
        state[f"blocks.{layer}.attn.qkv.bias"][-b_V.numel() :] = 0.0
    return _built(model, new, state, "fold_value_biases")


# Last part of a layer's name -> the field that gives it a bias.
_BIAS_OF = {"qkv": "bias_qkv", "up": "bias_mlp", "unembed": "bias_unembed"}


def _readers(model: HookedGPT) -> Iterable[tuple[Norm | None, list[str]]]:
    """Each norm that is read through, with the layers that read through it."""
    for layer, block in enumerate(model.blocks):
        attention = [f"blocks.{layer}.attn.qkv"]
        mlp = [] if block.mlp is None else [f"blocks.{layer}.mlp.up"]
        if block.mlp is not None and block.mlp.gate is not None:
            mlp.append(f"blocks.{layer}.mlp.gate")
        shared = model.config.parallel_blocks == "shared_norm"
        yield block.ln1, attention + (mlp if shared else [])
        yield block.ln2, mlp
    yield model.ln_final, ["unembed"]


def _fold_into(state: Weights, reader: str, norm: Norm) -> None:
    weight = state[f"{reader}.weight"]
    if norm.b is not None and norm.b.any():
        state[f"{reader}.bias"] = _plus_image(state[f"{reader}.bias"], weight, norm.b)
    state[f"{reader}.weight"] = read_through(weight.T, norm).T.to(weight.dtype).contiguous()


def _copied_weights(model: HookedGPT) -> Weights:
    check_finite(dict(model.named_parameters()))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _untied(config: GPTConfig, state: Weights) -> GPTConfig:
    state["unembed.weight"] = state["embed.weight"].clone()
    return config.replace(tie_embeddings=False)


def _add_missing(config: GPTConfig, state: Weights) -> None:
    """Biases of 0 for those that `config` has and `state` lacks."""
    like = state["embed.weight"]
    for name, tensor in HookedGPT(config, device="meta").state_dict().items():
        if name not in state:
            state[name] = like.new_zeros(tensor.shape)


def _less_mean(x: Tensor, axis: int) -> Tensor:
    wide = _at_least_float32(x)
    return (wide - wide.mean(axis, keepdim=True)).to(x.dtype)


def _plus_image(bias: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """``bias + weight x``, rounded once."""
    return (_at_least_float32(bias) + _at_least_float32(weight) @ _at_least_float32(x)).to(bias.dtype)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _built(model: HookedGPT, config: GPTConfig, state: Weights, step: str) -> HookedGPT:
    new = HookedGPT.from_state_dict(config, state)
    new.tokenizer = model.tokenizer
    new.card = copy.deepcopy(model.card)
    done = new.card.get("processing", [])
    new.card["processing"] = [*done, *([] if step in done else [step])]
    return new
