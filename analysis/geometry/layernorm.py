"""What normalisation does to the vectors that pass through a model: a projection, then a radial rescaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.cache import ActivationCache
from circuits.config import NormKind
from circuits.layers import Norm, centred, norm_scale
from circuits.model import HookedGPT
from circuits.names import block_names

FACTORS = (1e-3, 1e-2, 0.1, 10.0)


def normalised(u: Float[Tensor, "*batch d"], kind: NormKind, eps: float = 0.0) -> Float[Tensor, "*batch d"]:
    """``(u − ū 1) / sqrt(σ² + ε)`` (LayerNorm) or ``u / sqrt(mean(u²) + ε)`` (RMSNorm), with γ = 1 and β = 0."""
    return centred(u, kind) / norm_scale(u, kind, eps)


def norm_inputs(model: HookedGPT, cache: ActivationCache) -> list[tuple[str, Norm, Tensor]]:
    """Every norm on the stream itself: its name, the module, and what it read in a run, ``[batch pos d_model]``.

    Norms on a branch's output and on queries and keys are not among them.

    Args:
        model: A model.
        cache: Of a run; with the streams and, for post-norm models, what the branches wrote.
    """
    require_model(model)
    found: list[tuple[str, Norm, Tensor]] = []
    post = model.config.norm_placement == "post"
    for layer, block in enumerate(model.blocks):
        n = block_names(layer)
        if block.ln1 is not None:
            read = cache[n.resid_pre] + cache[n.attn_out] if post else cache[n.resid_pre]
            found.append((f"L{layer}.ln1", block.ln1, read))
        if block.ln2 is not None:
            read = cache[n.resid_mid if model.config.has_resid_mid else n.resid_pre]
            found.append((f"L{layer}.ln2", block.ln2, read + cache[n.mlp_out] if post else read))
    if model.ln_final is not None:
        found.append(("ln_final", model.ln_final, cache[block_names(model.config.n_layers - 1).resid_post]))
    return found


@result
class NormGeometry(Result):
    """How far what each norm puts out is from the ideal of proposition 4.2; the largest over the tokens of a run.

    The ideal has ε = 0, γ = 1, β = 0; its image is the sphere of radius √d in the hyperplane 1⊥.

    Attributes:
        norms: Names of the norms that stand on the stream.
        off_hyperplane: ``|1ᵀv| / (√d ‖v‖)``: the cosine with 1, for the ideal norm (0 for LayerNorm; RMSNorm keeps it).
        off_sphere: ``|‖v‖ / √d − 1|`` for the ideal norm.
        off_sphere_eps: The same with the model's ε: ``1 − σ / sqrt(σ² + ε)``.
        off_hyperplane_affine: The cosine with 1 of what the branch reads, with ε, γ and β.
        off_sphere_affine: The distance from the sphere of what the branch reads.
        scale_change: ``‖LN(c u) − LN(u)‖ / ‖LN(u)‖`` with the model's ε, for each factor c.
        factors: The factors.
    """

    norms: tuple[str, ...]
    off_hyperplane: Float[Tensor, " norm"]
    off_sphere: Float[Tensor, " norm"]
    off_sphere_eps: Float[Tensor, " norm"]
    off_hyperplane_affine: Float[Tensor, " norm"]
    off_sphere_affine: Float[Tensor, " norm"]
    scale_change: Float[Tensor, "norm factor"]
    factors: tuple[float, ...]

    def title(self) -> str:
        """What was measured."""
        return "Distance of normalised vectors from 1⊥ and from the sphere of radius √d"


@torch.no_grad()
def norm_geometry(
    model: HookedGPT, tokens: Int[Tensor, "batch pos"], factors: Sequence[float] = FACTORS
) -> NormGeometry:
    """Measure proposition 4.2 and remark 4.3 on every norm of a model, on the vectors that it meets.

    Args:
        model: A model with norms.
        tokens: Prompts.
        factors: By what to multiply a vector to see whether the norm notices.

    Raises:
        ValueError: A model without norms on its stream.
    """
    require_model(model)
    if model.config.norm is None:
        raise ValueError("this model has no norms (norm is None): there is no geometry of them to measure")
    _, cache = model.run_with_cache(tokens)
    inputs = norm_inputs(model, cache)
    rows = [_measured(norm, u, factors) for _, norm, u in inputs]
    columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    return NormGeometry(
        norms=tuple(name for name, _, _ in inputs),
        off_hyperplane=columns[0],
        off_sphere=columns[1],
        off_sphere_eps=columns[2],
        off_hyperplane_affine=columns[3],
        off_sphere_affine=columns[4],
        scale_change=columns[5],
        factors=tuple(factors),
    )


def _measured(norm: Norm, u: Tensor, factors: Sequence[float]) -> tuple[Tensor, ...]:
    ideal, own, read = normalised(u, norm.kind), normalised(u, norm.kind, norm.eps), norm(u)
    changes = [relative_change(normalised(c * u, norm.kind, norm.eps), own).max() for c in factors]
    return (
        off_hyperplane(ideal).max(),
        off_sphere(ideal).max(),
        off_sphere(own).max(),
        off_hyperplane(read).max(),
        off_sphere(read).max(),
        torch.stack(changes),
    )


def off_hyperplane(v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """``|1ᵀ v| / (√d ‖v‖)``: 0 in the hyperplane 1⊥."""
    cosine: Tensor = v.sum(-1).abs() / (math.sqrt(v.shape[-1]) * v.norm(dim=-1))
    return cosine


def off_sphere(v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """``|‖v‖ / √d − 1|``: 0 on the sphere of radius √d."""
    distance: Tensor = (v.norm(dim=-1) / math.sqrt(v.shape[-1]) - 1).abs()
    return distance


def relative_change(new: Float[Tensor, "*batch d"], old: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """``‖new − old‖ / ‖old‖`` of each vector."""
    change: Tensor = (new - old).norm(dim=-1) / old.norm(dim=-1)
    return change


@result
class BatchDependence(Result):
    """How far an example's normalised value depends on the other examples of its batch (aside 4.4).

    Attributes:
        kinds: ``("layernorm", "rmsnorm", "batchnorm")``.
        change: Largest relative change of an example when its companions are replaced.
        alone: Whether the value of an example alone in its batch is finite and not 0.
    """

    kinds: tuple[str, ...]
    change: Float[Tensor, " kind"]
    alone: Int[Tensor, " kind"]


@torch.no_grad()
def batch_dependence(
    examples: Float[Tensor, "batch d"], companions: Float[Tensor, "others d"], eps: float = 1e-5
) -> BatchDependence:
    """Normalise examples beside two different sets of companions, by three norms, with γ = 1 and β = 0.

    LayerNorm and RMSNorm take their statistics over the coordinates of one vector, BatchNorm over the batch, coordinate
    by coordinate: ``(u_i − mean_b u_i) / sqrt(var_b u_i + ε)``.

    Args:
        examples: Vectors.
        companions: Others, beside which they are normalised a second time.
        eps: ε under the root.
    """

    def batchnorm(u: Tensor) -> Tensor:
        return (u - u.mean(0)) / (u.var(0, correction=0) + eps).sqrt()

    norms = {
        "layernorm": lambda u: normalised(u, "layernorm", eps),
        "rmsnorm": lambda u: normalised(u, "rmsnorm", eps),
        "batchnorm": batchnorm,
    }
    changes, alone = [], []
    for norm in norms.values():
        by_themselves = norm(examples)
        beside = norm(torch.cat([examples, companions]))[: len(examples)]
        scale = by_themselves.norm(dim=-1).max()
        changes.append((beside - by_themselves).norm(dim=-1).max() / scale)
        single = norm(examples[:1])
        alone.append(int(bool(single.isfinite().all()) and bool(single.any())))
    return BatchDependence(kinds=tuple(norms), change=torch.stack(changes), alone=torch.tensor(alone))
