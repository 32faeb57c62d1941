"""Attention: projections, scores, pattern, z, out.

`Attn^h(X) = A^h X W_V^h` with ``A^h = softmax(mask(X W_Q^h (X W_K^h)ᵀ / sqrt(d_head)))``; the layer adds
``Σ_h Attn^h(X) W_O^h + b_O`` (lecture 1.1, 1.2). The three input projections are stored as one matrix and shown per
head as views.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from circuits.config import GPTConfig
from circuits.layers import Norm, rotate
from circuits.names import BlockNames
from circuits.products import linear
from circuits.run import Run, Visibility


def per_query_head(
    x: Float[Tensor, "batch key kv_head d_head"], group_size: int
) -> Float[Tensor, "batch key head d_head"]:
    """Give every query head the key or value of its group (a copy where heads share)."""
    return x if group_size == 1 else x.repeat_interleave(group_size, dim=2)


def attention_scores(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "batch head query key"]:
    """``scale · q kᵀ`` for every head, soft-capped as ``c tanh(s / c)`` where the model does that; not masked."""
    scores = (q * scale).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def attention_pattern(scores: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch head query key"]:
    """Softmax over the keys; a query whose scores are all −inf attends to nothing and has a row of zeros."""
    blind = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def weighted_values(
    pattern: Float[Tensor, "batch head query key"], v: Float[Tensor, "batch key head d_head"]
) -> Float[Tensor, "batch query head d_head"]:
    """``z = A v`` for every head."""
    return (pattern @ v.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """One attention layer; `qkv` and `out` hold the fused parameters, the properties show them per head."""

    q_norm: Norm | None
    k_norm: Norm | None

    def __init__(self, config: GPTConfig, layer: int, **factory: object) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.n_kv_heads, config.d_head
        self.group_size = config.group_size
        self.scale, self.softcap, self.window = config.attn_scale, config.attn_softcap, config.window[layer]
        self.rotary_layout = config.rotary_layout
        width = config.n_heads * config.d_head
        self.sizes = [width, config.n_kv_heads * config.d_head, config.n_kv_heads * config.d_head]
        self.head_ends = (config.n_heads, config.n_heads + config.n_kv_heads)
        self.qkv = nn.Linear(config.d_model, sum(self.sizes), bias=config.bias_qkv, **factory)
        self.out = nn.Linear(width, config.d_model, bias=config.bias_out, **factory)
        for name in ("q_norm", "k_norm"):
            norm = Norm("rmsnorm", config.d_head, config.norm_eps, **factory) if config.qk_norm else None
            self.register_module(name, norm)

    # --- the parameters per head, as views: writing into them changes the model ---

    def _rows(self, part: int) -> slice:
        start = sum(self.sizes[:part])
        return slice(start, start + self.sizes[part])

    def _weight(self, part: int) -> Tensor:
        return self.qkv.weight[self._rows(part)].view(-1, self.d_head, self.qkv.in_features).mT

    def _bias(self, part: int) -> Tensor | None:
        return None if self.qkv.bias is None else self.qkv.bias[self._rows(part)].view(-1, self.d_head)

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:
        """A view of the fused parameter."""
        return self._weight(0)

    @property
    def W_K(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """A view of the fused parameter, with the stored heads."""
        return self._weight(1)

    @property
    def W_V(self) -> Float[Tensor, "kv_head d_model d_head"]:
        """A view of the fused parameter, with the stored heads."""
        return self._weight(2)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """A view of the output projection."""
        return self.out.weight.view(-1, self.n_heads, self.d_head).permute(1, 2, 0)

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"] | None:
        """A view of the fused bias; None without biases."""
        return self._bias(0)

    @property
    def b_K(self) -> Float[Tensor, "kv_head d_head"] | None:
        """A view of the fused bias; None without biases."""
        return self._bias(1)

    @property
    def b_V(self) -> Float[Tensor, "kv_head d_head"] | None:
        """A view of the fused bias; None without biases."""
        return self._bias(2)

    @property
    def b_O(self) -> Float[Tensor, " d_model"] | None:
        """The parameter itself; None without a bias."""
        return self.out.bias

    # --- the forward pass ---

    def forward(self, reads: tuple[Tensor, Tensor, Tensor], names: BlockNames, run: Run) -> Tensor:
        """What the layer writes, ``[batch pos d_model]``.

        Args:
            reads: What queries, keys and values are made from: ``[batch pos d_model]``, or
                ``[batch pos head d_model]`` where each head reads its own.
            names: The hook names of this block.
            run: The pass.
        """
        return self.combine(self.heads(reads, names, run), names, run)

    def heads(self, reads: tuple[Tensor, Tensor, Tensor], names: BlockNames, run: Run) -> Tensor:
        """``z [batch query head d_head]``, from what queries, keys and values are made from."""
        q, k, v = run.tap.slices((names.q, names.k, names.v), self.project(reads))
        q, k = self.positioned(q, k, names, run)
        return self.mixed((q, k, v), names, run)

    def mixed(self, qkv: tuple[Tensor, Tensor, Tensor], names: BlockNames, run: Run) -> Tensor:
        """The same from queries, keys and values, with those of earlier positions where the run brings some."""
        if run.spread is not None:
            q, k, v = run.spread.out(names.layer, *qkv)
            return run.spread.back(self.attend(q, k, v, names, run.spread.run))
        if run.parts:
            pieces = zip(run.unpacked(*qkv), run.parts, strict=True)
            z = [self.mixed(piece, names, part).flatten(0, 1) for piece, part in pieces]
            return (z[0] if len(z) == 1 else torch.cat(z))[None]
        q, k, v = qkv
        if run.past is not None:
            k, v = run.past.extend(names.layer, k, v)
        return self.attend(q, k, v, names, run)

    def project(self, reads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch pos head d_head]`` (stored heads for keys and values)."""
        if reads[0] is reads[1] is reads[2]:
            projected = linear(reads[0], self.qkv.weight, self.qkv.bias)
            projected = projected.view(*projected.shape[:-1], -1, self.d_head)
            q, k, v = projected.tensor_split(self.head_ends, dim=-2)
            return q, k, v
        q, k, v = (self._project_part(part, x) for part, x in enumerate(reads))
        return q, k, v

    def project_queries(self, read: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch query head d_head"]:
        """Queries alone."""
        return self._project_part(0, read)

    def _project_part(self, part: int, x: Tensor) -> Tensor:
        rows = self._rows(part)
        bias = None if self.qkv.bias is None else self.qkv.bias[rows]
        if x.ndim == 3:
            return linear(x, self.qkv.weight[rows], bias).view(*x.shape[:2], -1, self.d_head)
        projected = torch.einsum("bphd,hde->bphe", x, self._weight(part))
        return projected if bias is None else projected + bias.view(-1, self.d_head)

    def positioned(self, q: Tensor, k: Tensor, names: BlockNames, run: Run) -> tuple[Tensor, Tensor]:
        """Queries and keys as the scores see them: normalised and turned where the architecture does so."""
        tap = run.tap
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm.tapped(q, tap, names.q_norm_scale, names.q_norm_normalized)
            k = self.k_norm.tapped(k, tap, names.k_norm_scale, names.k_norm_normalized)
        if run.rotary is not None:
            q = tap(names.rot_q, rotate(q, run.query_rotary, self.rotary_layout))
            k = tap(names.rot_k, rotate(k, run.rotary, self.rotary_layout))
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, names: BlockNames, run: Run) -> Tensor:
        """``z [batch query head d_head]``: fused, unless somebody asks for the scores or the pattern."""
        if self.softcap is not None or run.tap.touches(names.scores, names.pattern):
            return self._attend_explicitly(q, k, v, names, run)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.group_size > 1
        if run.plain_causal(self.window):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped
            ).transpose(1, 2)
        seen = run.visibility(self.window)
        z = F.scaled_dot_product_attention(q, k, v, seen.sdpa_mask, scale=self.scale, enable_gqa=grouped)
        return _silenced(z, seen).transpose(1, 2)

    def _attend_explicitly(self, q: Tensor, k: Tensor, v: Tensor, names: BlockNames, run: Run) -> Tensor:
        allowed = run.visibility(self.window).allowed

        def hide(scores: Tensor) -> Tensor:
            return _masked(scores, allowed, float("-inf"))

        scores = attention_scores(q, per_query_head(k, self.group_size), self.scale, self.softcap)
        # Masked again after an edit, so that none can show a query its future.
        scores = run.tap(names.scores, hide(scores), settle=hide)
        pattern = run.tap(names.pattern, attention_pattern(scores), settle=lambda p: _masked(p, allowed, 0.0))
        return weighted_values(pattern, per_query_head(v, self.group_size))

    def combine(self, z: Float[Tensor, "batch pos head d_head"], names: BlockNames, run: Run) -> Tensor:
        """``Σ_h z_h W_O^h + b_O``; the summands are formed only where somebody asks for them."""
        z = run.tap(names.z, z)
        if not run.tap.touches(names.result):
            return linear(z.flatten(-2), self.out.weight, self.out.bias)
        result = run.tap(names.result, torch.einsum("bphe,hed->bphd", z, self.W_O))
        total = result.sum(2)
        return total if self.out.bias is None else total + self.out.bias


def _masked(x: Tensor, allowed: Bool[Tensor, "#batch 1 query key"], value: float) -> Tensor:
    return x.masked_fill(~allowed, value)


def _silenced(z: Float[Tensor, "batch head query d_head"], seen: Visibility) -> Tensor:
    return z if seen.blind is None else z.masked_fill(seen.blind, 0.0)
