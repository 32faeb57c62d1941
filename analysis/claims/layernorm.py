"""Section 4 of the lecture: LayerNorm geometry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from analysis.claims import formulas
from analysis.claims.claim import Finding, above, applies, claim, measurement, within
from analysis.claims.subject import Subject, difference, largest
from analysis.geometry import batch_dependence, norm_geometry, normalised, sequence_jacobian
from analysis.geometry.layernorm import off_hyperplane, off_sphere
from circuits.layers import Norm

_FACTORS = (1e-3, 0.5, 7.0, 1e3)


def _needs_layernorm(on: Subject) -> None:
    norm = on.model.config.norm
    applies(norm is not None, "there are no norms")
    applies(norm == "layernorm", "the norms are RMSNorms (aside 4.4)")
    applies(on.model.config.d_model >= 2, "d_model is 1")


def _ideal(on: Subject) -> Norm:
    """The model's kind of norm with ε = 0, γ = 1, β = 0, in its own code."""
    config = on.model.config
    assert config.norm is not None
    return Norm(config.norm, config.d_model, 0.0, device=on.model.device, dtype=on.model.dtype).requires_grad_(False)


def _vectors(on: Subject) -> Tensor:
    """Vectors of the stream that are not constant, so that their direction in 1⊥ means something."""
    u = on.vectors
    spread = (u - u.mean(-1, keepdim=True)).norm(dim=-1)
    kept = u[spread > 1e-6 * u.norm(dim=-1)]
    applies(len(kept), "every vector of the stream is constant")
    return kept


@claim(
    "4.1",
    "Definition 4.1",
    "LN(u) = γ ⊙ (u − ū1) / sqrt(σ² + ε) + β, at each position separately.",
    "largest relative difference of a norm's output from the formula",
)
def layer_norm(on: Subject) -> Finding:
    """``LN(u) = γ ⊙ (u − ū 1) / sqrt(σ(u)² + ε) + β`` with ``ū = (1/d) Σ u_i`` and ``σ(u)² = (1/d) Σ (u_i − ū)²``.

    Every norm of width d that the model has, on vectors of the stream, together and one by one.
    """
    _needs_layernorm(on)
    u, eps = on.vectors, on.model.config.norm_eps
    worst = 0.0
    for module in on.model.modules():
        if isinstance(module, Norm) and len(module.w) == on.model.config.d_model:
            together = module(u)
            worst = largest(worst, difference(together, formulas.layer_norm(u, module, eps)))
            worst = largest(worst, difference(module(u[-1:]), together[-1:]))
    return within(worst, on.tolerance)


@claim(
    "4.2.projection",
    "Proposition 4.2",
    "Centring is the orthogonal projection onto 1⊥.",
    "largest of ‖PPu − Pu‖, |⟨Pu, w⟩ − ⟨u, Pw⟩| and |⟨1, LN(u)⟩|, relative",
)
def projection(on: Subject) -> Finding:
    """``P u = u − ū 1 = (I − 1 1ᵀ/d) u`` is idempotent and self-adjoint with kernel R1, hence the orthogonal projection
    onto ``1⊥ = {v : 1ᵀ v = 0}``; what LN puts out (ε = 0, γ = 1, β = 0) lies there.
    """
    _needs_layernorm(on)
    u, w = _vectors(on), on.noise(on.model.config.d_model)

    def P(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    adjoint = (P(u) @ w - u @ P(w)).abs() / (u.norm(dim=-1) * w.norm())
    kernel = float(P(torch.ones_like(u)).abs().max())
    worst = largest(difference(P(P(u)), P(u)), float(adjoint.max()), float(off_hyperplane(_ideal(on)(u)).max()), kernel)
    return within(worst, on.tolerance)


@claim(
    "4.2.sphere",
    "Proposition 4.2",
    "What follows is the radial projection onto the sphere of radius √d.",
    "largest relative distance of LN(u) from √d Pu / ‖Pu‖ and from the sphere",
)
def sphere(on: Subject) -> Finding:
    """With ``v = P u``, ``σ(u)² = ‖v‖²/d``, so ``LN(u) = v / σ = √d v / ‖v‖``, whose length is √d."""
    _needs_layernorm(on)
    u = _vectors(on)
    v = u - u.mean(-1, keepdim=True)
    radial = math.sqrt(u.shape[-1]) * v / v.norm(dim=-1, keepdim=True)
    out = _ideal(on)(u)
    return within(largest(difference(out, radial), float(off_sphere(out).max())), on.tolerance)


@claim(
    "4.2.image",
    "Proposition 4.2",
    "The image is the whole sphere of radius √d in 1⊥.",
    "largest relative distance of LN(v) from v, for random v of that sphere",
)
def image(on: Subject) -> Finding:
    """Every v with ``1ᵀ v = 0`` and ``‖v‖ = √d`` is ``LN(v)``: it has mean 0 and variance 1. So the image, which lies
    in the sphere by 4.2.sphere, is all of it.
    """
    _needs_layernorm(on)
    d = on.model.config.d_model
    v = on.noise(64, d)
    v = v - v.mean(-1, keepdim=True)
    v = math.sqrt(d) * v / v.norm(dim=-1, keepdim=True)
    return within(difference(_ideal(on)(v), v), on.tolerance)


@claim(
    "4.2.dimension",
    "Proposition 4.2",
    "That sphere has dimension d − 2.",
    "largest distance of the singular values of LN's differential, over √d/‖Pu‖, from 1, …, 1, 0, 0",
)
def dimension(on: Subject) -> Finding:
    """``D LN(u) = (√d / ‖v‖) (P − v vᵀ / ‖v‖²)``: √d/‖v‖ times the orthogonal projection onto the vectors of 1⊥ that
    are orthogonal to v. It has rank d − 2, the dimension of the image; the directions 1 and v are lost.
    """
    _needs_layernorm(on)
    d, u = on.model.config.d_model, _vectors(on)[0]
    norm = _ideal(on)
    s = torch.linalg.svdvals(sequence_jacobian(norm, u[None]))
    expected = torch.ones_like(s)
    expected[d - 2 :] = 0
    scale = math.sqrt(d) / (u - u.mean()).norm()
    return within(float((s / scale - expected).abs().max()), 10 * on.tolerance, f"d − 2 = {d - 2}")


@claim(
    "4.3.invariance",
    "Remark 4.3",
    "With ε = 0, LN(cu) = LN(u) for every c > 0.",
    "largest relative change of LN(u) for c from 0.001 to 1000",
)
def scale_invariance(on: Subject) -> Finding:
    """Under the hypotheses of proposition 4.2, ``LN(c u) = √d c v / ‖c v‖ = LN(u)`` for c > 0: a branch sees the
    direction of the stream, not its length. RMSNorm has the same property.
    """
    applies(on.model.config.norm is not None, "there are no norms")
    u, ideal = _vectors(on), _ideal(on)
    return within(largest(*(difference(ideal(c * u), ideal(u)) for c in _FACTORS)), 10 * on.tolerance)


@claim(
    "4.3.epsilon",
    "Remark 4.3",
    "A nonzero ε makes this only approximate, near zero variance.",
    "largest relative distance of LN(cu) from LN₀(u) · cσ / sqrt(c²σ² + ε)",
)
def epsilon(on: Subject) -> Finding:
    """With ε > 0, ``LN(c u) = LN₀(u) · c σ / sqrt(c² σ² + ε)`` where LN₀ is the ideal: on the sphere for ``c σ ≫ √ε``,
    and pulled to 0 for ``c σ ≪ √ε``. (σ is the root mean square of u itself for RMSNorm.)
    """
    config = on.model.config
    applies(config.norm is not None, "there are no norms")
    assert config.norm is not None
    u, ideal = _vectors(on), _ideal(on)
    real = Norm(config.norm, config.d_model, config.norm_eps, device=u.device, dtype=u.dtype).requires_grad_(False)
    sigma = (u - u.mean(-1, keepdim=True) if config.norm == "layernorm" else u).square().mean(-1, keepdim=True).sqrt()
    worst = 0.0
    for c in _FACTORS:
        factor = c * sigma / torch.sqrt(c**2 * sigma**2 + config.norm_eps)
        worst = largest(worst, difference(real(c * u), ideal(u) * factor))
    near, far = (difference(real(c * u), real(u)) for c in (_FACTORS[0], _FACTORS[-1]))
    note = f"ε = {config.norm_eps:g}; LN(cu) differs from LN(u) by {near:.2g} at c = 0.001, by {far:.2g} at c = 1000"
    return within(worst, 10 * on.tolerance, note)


@claim(
    "4.3.affine",
    "Remark 4.3",
    "Learned γ and β restore scale and shift after normalisation.",
    "largest distance |‖LN(u)‖/√d − 1| of what a branch reads from the sphere",
)
def gain_and_shift(on: Subject) -> Finding:
    """``γ ⊙ v + β`` leaves the sphere of radius √d, and 1⊥, wherever γ is not constant or β not 0; by how much, with
    the model's own ε, γ and β, on the vectors that its norms meet.
    """
    applies(on.model.config.norm is not None, "there are no norms")
    found = norm_geometry(on.model, on.tokens, factors=(1.0,))
    cosine = float(found.off_hyperplane_affine.max())
    return measurement(float(found.off_sphere_affine.max()), f"largest |cos| with 1: {cosine:.2g}")


@claim(
    "4.4.batch",
    "Aside 4.4",
    "The output for one example does not depend on the others of its batch, and is defined at batch size one.",
    "largest relative difference of the logits of one prompt alone and in a batch",
)
def batch_independence(on: Subject) -> Finding:
    """LayerNorm takes its statistics over the coordinates of one position, so that no part of the model mixes examples:
    the logits of a prompt are those of the prompt alone.
    """
    batch = torch.cat([on.tokens[:1], on.other_tokens()])
    together, alone = on.model(batch)[:1], on.model(batch[:1])
    return within(difference(together, alone), on.tolerance)


@claim(
    "4.4.batchnorm",
    "Aside 4.4",
    "BatchNorm uses statistics across the examples of a batch.",
    "relative change of an example's BatchNorm when its companions change",
)
def batchnorm(on: Subject) -> Finding:
    """``(u_i − mean_b u_i) / sqrt(var_b u_i + ε)`` over the examples b of a batch: other companions, another value;
    alone in its batch an example becomes 0. LayerNorm and RMSNorm of the same vectors do not change at all.
    """
    u = on.vectors
    half = len(u) // 2
    applies(half and difference(u[:half], u[half:]) > 0, "the stream has no two different vectors")
    found = batch_dependence(u[:half], u[half:])
    change = dict(zip(found.kinds, found.change.tolist(), strict=True))
    applies(change["batchnorm"] == change["batchnorm"], "BatchNorm of a batch of one is 0, whose change means nothing")
    others = largest(change["layernorm"], change["rmsnorm"])
    note = f"LayerNorm and RMSNorm change by {others:.1g}; alone in its batch an example becomes 0"
    return above(change["batchnorm"] if others <= on.tolerance else math.nan, 10 * on.tolerance, note)


@claim(
    "4.4.rmsnorm",
    "Aside 4.4",
    "RMSNorm omits the centring and keeps only the radial rescaling.",
    "largest relative distance of a norm's output from γ ⊙ u / sqrt(mean u² + ε)",
)
def rmsnorm(on: Subject) -> Finding:
    """``RMS(u) = γ ⊙ u / sqrt((1/d) Σ u_i² + ε)``: with ε = 0 and γ = 1 the radial projection onto the sphere of radius
    √d in all of R^d, of dimension d − 1.
    """
    config = on.model.config
    applies(config.norm == "rmsnorm", "there are no RMSNorms on the stream")
    u = on.vectors
    radial = u / torch.sqrt((u**2).sum(-1, keepdim=True) / u.shape[-1] + config.norm_eps)
    norms = [m for m in on.model.modules() if isinstance(m, Norm) and len(m.w) == config.d_model]
    worst = largest(*(difference(norm(u), norm.w * radial) for norm in norms))
    return within(largest(worst, float(off_sphere(normalised(_vectors(on), "rmsnorm")).max())), on.tolerance)
