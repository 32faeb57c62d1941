"""Section 1 of the lecture, continued: QK and OV circuits, and what several heads are for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.accounting import compare_head_splits
from analysis.claims.claim import Finding, applies, claim, equal, measurement, within
from analysis.claims.subject import Subject, difference, largest
from analysis.geometry import head_diversity, private_copy
from circuits.config import GPTConfig
from circuits.gauge import transform_ov, transform_qk
from circuits.gauge.freedom import rotary_planes, still_coordinates
from circuits.names import block_names


@claim(
    "1.3.roles",
    "Remark 1.3",
    "The QK circuit alone says where to read, the OV circuit alone what to write.",
    "largest change of the pattern under other W_V, W_O, and of the values under other W_Q, W_K",
)
def roles(on: Subject) -> Finding:
    """Within a layer ``A^h`` is a function of X and ``W_QK^h`` only, and ``X W_OV^h`` of X and ``W_OV^h`` only.

    So replacing `W_V` and `W_O` by random matrices changes no attention pattern of that layer, and replacing `W_Q` and
    `W_K` changes no value.
    """
    layer = on.model.config.n_layers - 1
    names, read = block_names(layer), on.model.blocks[layer].attn
    queries = (read.n_heads + read.n_kv_heads) * read.d_head  # rows of W_Q and W_K
    worst = 0.0
    for part, unchanged in (("OV", names.pattern), ("QK", names.v)):
        other = private_copy(on.model)
        attn = other.blocks[layer].attn
        fused = attn.qkv.weight.clone()
        rows = slice(queries, None) if part == "OV" else slice(None, queries)
        fused[rows] = on.noise(*fused[rows].shape)
        attn.qkv.weight.data = fused
        if part == "OV":
            attn.out.weight.data = on.noise(*attn.out.weight.shape)
        _, cache = other.run_with_cache(on.tokens, names_filter=unchanged)
        worst = largest(worst, difference(cache[unchanged], on.cache[unchanged]))
    return within(worst, on.tolerance, f"in layer {layer}")


@claim(
    "1.3.gauge",
    "Remark 1.3",
    "W_Q R and W_K R⁻ᵀ give the same W_QK, for every invertible R: the factors are not identifiable.",
    "largest relative change of W_QK, W_OV and the logits under a random R",
)
def gauge(on: Subject) -> Finding:
    """``(W_Q R)(W_K R⁻ᵀ)ᵀ = W_Q R R⁻¹ W_Kᵀ = W_QK`` for every invertible R; likewise ``(W_V R)(R⁻¹ W_O) = W_OV``.

    Under rotary positions R must also commute with the rotations: scaled rotations of each plane, and any matrix on the
    coordinates that do not turn. Under grouped-query attention the heads of a group share R.
    """
    config = on.model.config
    R_out = _random_gauge(on, rotary=False)
    chosen = on.heads[-1:] if on.large else on.heads[:: max(1, len(on.heads) // 3)]
    worst = 0.0
    for layer, head in chosen:
        circuits = {"OV": transform_ov(on.model, layer, head, R_out)}
        if not config.qk_norm:
            R = _random_gauge(on, rotary=True)
            circuits["QK"] = transform_qk(on.model, layer, head, R)
        for circuit, other in circuits.items():
            before, after = (getattr(model, circuit)[layer, head] for model in (on.model, other))
            worst = largest(worst, difference(after.A @ after.B, before.A @ before.B))
            worst = largest(worst, difference(other(on.tokens), on.logits))
    notes = []
    if config.qk_norm:
        notes.append("W_OV only: the norms of queries and keys see R")
    elif config.positions == "rotary":
        notes.append("R commutes with the rotations")
    notes.append(f"on {len(chosen)} head{'s' if len(chosen) > 1 else ''}")
    return within(worst, 10 * on.tolerance, ", ".join(notes))


def _random_gauge(on: Subject, rotary: bool) -> Tensor:
    """A well-conditioned random matrix; with `rotary`, one that commutes with the model's rotations."""
    config: GPTConfig = on.model.config
    R = torch.zeros(config.d_head, config.d_head, dtype=torch.float64)
    noise = on.noise(config.d_head, config.d_head, seed=1).double().cpu()
    still = still_coordinates(config) if rotary else torch.arange(config.d_head)
    for planes in rotary_planes(config) if rotary else ():
        for i, j in zip(planes.first.tolist(), planes.second.tolist(), strict=True):
            length, angle = 1 + 0.5 * math.tanh(noise[i, i]), float(noise[i, j])
            a, b = length * math.cos(angle), length * math.sin(angle)
            R[i, i], R[i, j], R[j, i], R[j, j] = a, b, -b, a
    if len(still):
        U, _, Vh = torch.linalg.svd(noise[still][:, still])
        lengths = torch.linspace(0.5, 2, len(still), dtype=torch.float64)
        R[still[:, None], still[None, :]] = (U * lengths) @ Vh
    return R


@claim(
    "1.4.count",
    "Remark 1.4",
    "Splitting one full-width head into H heads leaves the number of attention weights at O(d²), unchanged.",
    "weights of a layer's attention against those of one full-width head",
)
def same_count(on: Subject) -> Finding:
    """H heads of width w have ``3 d H w + H w d = 4 d H w`` weights, whatever H for a given total width ``H w`` (= d in
    the lecture: 4 d²). What changes is the greatest rank of a head's circuits, min(H w, d) for one head against w for
    each of several, and the number of distributions for each query, 1 against H.
    """
    config = on.model.config
    applies(config.n_kv_heads == config.n_heads, "several query heads share keys and values: fewer weights")
    attn, split = on.model.blocks[0].attn, compare_head_splits(config, (1, config.n_heads))
    ranks, several = split.rank_bound.tolist(), split.distributions.tolist()
    note = f"rank bound {ranks[0]} with one head, {ranks[-1]} with {several[-1]}" if len(ranks) > 1 else "a single head"
    return equal(attn.qkv.weight.numel() + attn.out.weight.numel(), int(split.attention_parameters[0]), note)


@claim(
    "1.4.distributions",
    "Remark 1.4",
    "H heads supply H independently learned attention distributions.",
    "mean Jensen–Shannon divergence of two heads of a layer, nats",
)
def distributions(on: Subject) -> Finding:
    """How distinct the heads' distributions are: ``JS(A, B) = H((A + B)/2) − (H(A) + H(B))/2`` for the attention of two
    heads of a layer at one query, 0 for equal ones and ln 2 for disjoint ones; mean over pairs, queries and layers.
    """
    applies(on.model.config.n_heads > 1, "a layer has a single head")
    applies(on.length > 1, "a single token: every head looks at it")
    mean = head_diversity(on.model, on.tokens).mean
    low, high = mean.aminmax()
    return measurement(float(mean.mean()), f"by layer {float(low):.3f} to {float(high):.3f}; at most ln 2 = 0.693")
