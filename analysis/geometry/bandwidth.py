"""The stream as a channel of d_model dimensions: how crowded it is, and who can read whom."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model, seeded
from circuits.finite import check_finite
from circuits.folded import embedding, head_weights
from circuits.model import HookedGPT

SAMPLE = 2048


@result
class StreamBandwidth(Result):
    """How directions share the stream (remark 3.4).

    Attributes:
        overlap: Share of what a head reads (the span of its `W_Q`, `W_K` and `W_V`) that lies in what an earlier head
            writes (the span of `W_O`): ``‖U_writeᵀ U_read‖_F² / dim(write)`` for orthonormal bases, 1 where all that
            is written can be read; NaN where the second head is not later, or the first writes nothing.
        expected: The same for random subspaces, ``dim(read) / d_model``.
        coherence: Largest ``|cos|`` of two different token embeddings.
        mean_coherence: Their root mean square.
        welch_bound: What no set of so many vectors in d_model dimensions can go below (Welch 1974),
            ``sqrt((n − d) / (d (n − 1)))``; 0 where n ≤ d.
        embeddings: How many embeddings were compared, n; a seeded sample of large vocabularies.
    """

    table = ("overlap",)
    overlap: Float[Tensor, "layer head layer2 head2"]
    expected: float
    coherence: float
    mean_coherence: float
    welch_bound: float
    embeddings: int


@torch.no_grad()
def stream_bandwidth(model: HookedGPT, sample: int = SAMPLE, seed: int = 0) -> StreamBandwidth:
    """Measure the crowding of the embeddings and the overlap of what heads write and read, norms read in.

    Args:
        model: A model.
        sample: How many embeddings to compare at most.
        seed: Of the sample.
    """
    require_model(model)
    check_finite(dict(model.named_parameters()))
    d_model = model.config.d_model
    W_E = sampled_embeddings(model, sample, seed)
    largest, mean = coherence(W_E)
    overlap, read = _overlaps(model)
    return StreamBandwidth(
        overlap=overlap,
        expected=read / d_model,
        coherence=largest,
        mean_coherence=mean,
        welch_bound=welch_bound(len(W_E), d_model),
        embeddings=len(W_E),
    )


def sampled_embeddings(model: HookedGPT, sample: int = SAMPLE, seed: int = 0) -> Float[Tensor, "n d_model"]:
    """The token embeddings as readers see them, those that are 0 left out; of a large vocabulary, a seeded sample."""
    require_model(model)
    W_E = embedding(model)
    W_E = W_E[W_E.norm(dim=-1) > 0]
    if len(W_E) <= sample:
        return W_E
    return W_E[torch.randperm(len(W_E), generator=seeded(seed))[:sample].to(W_E.device)]


def coherence(vectors: Float[Tensor, "n d"]) -> tuple[float, float]:
    """Largest and root mean square ``|cos|`` over pairs of different vectors; NaN without a pair."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    n = len(unit)
    if n < 2:
        return math.nan, math.nan
    cosines = (unit @ unit.T).fill_diagonal_(0.0)
    return float(cosines.abs().max()), float(cosines.norm()) / math.sqrt(n * (n - 1))


def welch_bound(n: int, d: int) -> float:
    """The least possible largest ``|cos|`` of n unit vectors in d dimensions, ``sqrt((n − d) / (d (n − 1)))``."""
    return math.sqrt((n - d) / (d * (n - 1))) if n > d else 0.0


def _overlaps(model: HookedGPT) -> tuple[Float[Tensor, "layer head layer2 head2"], int]:
    weights = head_weights(model)
    layers, heads = weights.W_Q.shape[:2]
    read = _span(torch.cat([weights.W_Q, weights.W_K, weights.W_V], dim=-1).flatten(0, 1))
    write = _span(weights.W_O.mT.flatten(0, 1))
    rank = write.square().sum((1, 2))
    rows = [torch.einsum("dw,ndr->nwr", one, read).square().sum((1, 2)) for one in write]
    rows = [row / size for row, size in zip(rows, rank, strict=True)]
    overlap = torch.stack(rows).unflatten(0, (layers, heads)).unflatten(-1, (layers, heads))
    layer = torch.arange(layers, device=overlap.device)
    later = layer[:, None] < layer[None, :]
    return overlap.masked_fill(~later[:, None, :, None], torch.nan), read.shape[-1]


def _span(vectors: Float[Tensor, "*batch d_model n"]) -> Float[Tensor, "*batch d_model k"]:
    """An orthonormal basis of what the columns span; columns of zeros where they span less."""
    U, S, _ = torch.linalg.svd(vectors, full_matrices=False)
    kept = max(vectors.shape[-2:]) * torch.finfo(S.dtype).eps * S[..., :1]
    inside = kept < S
    basis: Tensor = U * inside[..., None, :]
    return basis
