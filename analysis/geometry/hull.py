"""Attention stays in the convex hull of the values it sees; the MLP need not."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.attention import per_query_head
from circuits.model import HookedGPT
from circuits.names import block_names

_ROUNDS = 24


@result
class HullMembership(Result):
    """How far the writes of attention and MLP are from convex combinations of the visible values (remark 2.2).

    Attributes:
        negative: Of each head, the most negative attention weight, 0 if none is.
        row_sum_error: Largest ``|Σ_s A[t, s] − 1|``.
        residual: Largest ``‖z_t − Σ_{s ≤ t} A[t, s] v_s‖ / max ‖v‖``: the combination gives what the head puts out.
        mlp_outside: Share of positions at which the MLP's write is proven to lie outside what attention can write
            there, the sum of the hulls ``{v_s^h W_O^h : s visible} + b_O``; None without MLPs.
        mlp_distance: Mean of the proven distance over the write's own length; None without MLPs.
    """

    table = ("negative", "row_sum_error", "residual")
    negative: Float[Tensor, "layer head"]
    row_sum_error: Float[Tensor, "layer head"]
    residual: Float[Tensor, "layer head"]
    mlp_outside: Float[Tensor, " layer"] | None
    mlp_distance: Float[Tensor, " layer"] | None


@torch.no_grad()
def hull_membership(model: HookedGPT, tokens: Int[Tensor, "batch pos"]) -> HullMembership:
    """Certify, position by position, what lies in a convex hull and what does not.

    A head's output is in the hull of its visible values if its pattern is a set of convex weights: that is checked.
    A point p is outside a convex set when some direction u has ``u · p`` above every ``u · y`` of the set; such a u is
    sought by the method of Frank and Wolfe (1956), and the distance ``u · p − max_y u · y`` (u of length 1) is a proof.

    Args:
        model: A model.
        tokens: Prompts.
    """
    require_model(model)
    config = model.config
    names = [block_names(layer) for layer in range(config.n_layers)]
    wanted = [name for n in names for name in (n.pattern, n.v, n.z)]
    wanted += [n.mlp_out for n in names if config.has_mlp]
    _, cache = model.run_with_cache(tokens, names_filter=wanted)
    rows, outside, distance = [], [], []
    for n, block in zip(names, model.blocks, strict=True):
        pattern, z = cache[n.pattern], cache[n.z]
        v = per_query_head(cache[n.v], config.group_size)
        seen = visible(tokens.shape[1], config.window[n.layer], tokens.device)
        combined = torch.einsum("bhqk,bkhe->bqhe", pattern.masked_fill(~seen, 0.0), v)
        size = v.norm(dim=-1).amax((0, 1)).clamp(min=torch.finfo(v.dtype).tiny)
        rows.append(
            (
                pattern.clamp(max=0).amin((0, 2, 3)),
                (pattern.sum(-1) - 1).abs().amax((0, 2)),
                (z - combined).norm(dim=-1).amax((0, 1)) / size,
            )
        )
        if config.has_mlp:
            writes = torch.einsum("bkhe,hed->bhkd", v, block.attn.W_O)
            point = cache[n.mlp_out] - (0 if block.attn.b_O is None else block.attn.b_O)
            proven = distance_from_hulls(point, writes, pattern, seen)
            outside.append((proven > 0).to(v.dtype).mean())
            distance.append((proven / cache[n.mlp_out].norm(dim=-1)).mean())
    negative, row_sum_error, residual = (torch.stack(column) for column in zip(*rows, strict=True))
    return HullMembership(
        negative=negative,
        row_sum_error=row_sum_error,
        residual=residual,
        mlp_outside=torch.stack(outside) if outside else None,
        mlp_distance=torch.stack(distance) if distance else None,
    )


def visible(length: int, window: int | None, device: torch.device | None = None) -> Bool[Tensor, "query key"]:
    """Which keys a query sees: those up to itself, within the window where there is one."""
    position = torch.arange(length, device=device)
    back = position[:, None] - position[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def distance_from_hulls(
    point: Float[Tensor, "batch query d_model"],
    writes: Float[Tensor, "batch head key d_model"],
    start: Float[Tensor, "batch head query key"],
    seen: Bool[Tensor, "query key"],
    rounds: int = _ROUNDS,
) -> Float[Tensor, "batch query"]:
    """A proven lower bound of the distance of each point from ``Σ_h hull{writes[h, s] : s seen}``; 0 where none is.

    The largest inner product of a direction with a sum of hulls is the sum over heads of that with their best corner.

    Args:
        point: The points.
        writes: The corners of each head's hull.
        start: Convex weights of a first guess.
        seen: Which corners each query has.
        rounds: Steps of the search for a separating direction.
    """
    inside = torch.einsum("bhqk,bhkd->bqd", start, writes)
    best = point.new_zeros(point.shape[:2])
    tiny = torch.finfo(point.dtype).tiny
    rounding = 64 * torch.finfo(point.dtype).eps * (writes.norm(dim=-1).amax(-1).sum(-1)[:, None] + point.norm(dim=-1))
    for _ in range(rounds):
        towards = point - inside
        along = torch.einsum("bqd,bhkd->bhqk", towards, writes).masked_fill(~seen, float("-inf"))
        top = along.max(-1)
        margin = (towards * point).sum(-1) - top.values.sum(1)
        proven = margin / towards.norm(dim=-1).clamp(min=tiny)
        best = torch.maximum(best, proven.where(proven > rounding, 0.0))
        index = top.indices[..., None].expand(-1, -1, -1, writes.shape[-1])
        corner = writes.gather(2, index).sum(1)
        edge = corner - inside
        step = (towards * edge).sum(-1) / edge.square().sum(-1).clamp(min=tiny)
        inside = inside + step.clamp(0, 1)[..., None] * edge
    return best
