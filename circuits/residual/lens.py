"""The logit lens: what the model would predict if the stream were read out before its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.arguments import require_cache, require_model
from circuits.cache import ActivationCache
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.residual.positions import Position, resolve_positions
from circuits.residual.requirements import require_finite

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class LogitLens:
    """Logits read off the stream at every depth.

    Attributes:
        points: Where: ``"0_pre"``, ``"0_mid"``, …, ``"final_post"``.
        logits: ``[point batch d_vocab]``, ``[point batch pos d_vocab]`` for all positions; the last are the model's.
    """

    points: tuple[str, ...]
    logits: Float[Tensor, "point batch *pos d_vocab"]

    def log_probs(self) -> Float[Tensor, "point batch *pos d_vocab"]:
        """``log softmax`` of the logits, in nats."""
        return self.logits.log_softmax(-1)

    def top(self, k: int = 5) -> tuple[Float[Tensor, "point batch *pos k"], Int[Tensor, "point batch *pos k"]]:
        """The likeliest tokens at each depth: their probabilities and ids."""
        best = self.logits.softmax(-1).topk(k, dim=-1)
        return best.values, best.indices

    def to_frame(self) -> pd.DataFrame:
        """The likeliest token at each depth, with its probability."""
        import numpy as np
        import pandas as pd

        probability, token = self.top(1)
        shape = probability.shape[:-1]
        index = np.indices(tuple(shape)).reshape(len(shape), -1)
        columns = {"point": np.array(self.points, dtype=object)[index[0]]}
        columns |= dict(zip(("batch", "pos"), index[1:], strict=False))
        flat = {"token": token.flatten().cpu().numpy(), "probability": probability.flatten().detach().cpu().numpy()}
        return pd.DataFrame(columns | flat)

    def __repr__(self) -> str:
        return f"LogitLens: logits {list(self.logits.shape)} at {', '.join(self.points)}"


@torch.no_grad()
def logit_lens(
    model: HookedGPT, cache: ActivationCache, position: Position = -1, *, incl_mid: bool = False
) -> LogitLens:
    """``logits_l = LN_f(resid_l) W_U + b_U``, the final norm taken with each layer's own statistics.

    That is what tells it from attribution, which freezes the final norm at the scale of the last stream. Soft caps
    belong to the logits and are applied. Source: nostalgebraist, "interpreting GPT: the logit lens" (2020).

    Args:
        model: Any model.
        cache: Holds the streams: ``hook_resid_pre`` of each block (and ``hook_resid_mid``), and the last
            ``hook_resid_post``.
        position: One position: −1 is the last real token of each prompt. None reads all positions, which is large.
        incl_mid: Also between attention and MLP, where blocks are sequential.

    Raises:
        KeyError: The cache lacks a stream.
        IndexError: A position that does not exist.
        ValueError: A cache of another architecture; NaN or infinities, with the first place.
    """
    require_model(model)
    require_cache(cache, model)
    config = model.config
    points: dict[str, str] = {}
    for layer in range(config.n_layers):
        n = block_names(layer)
        points[f"{layer}_pre"] = n.resid_pre
        if incl_mid and config.has_resid_mid:
            points[f"{layer}_mid"] = n.resid_mid
    points["final_post"] = block_names(config.n_layers - 1).resid_post
    cache.require(*points.values())
    at = resolve_positions(position, cache, cache[points["final_post"]].shape, model.W_E)
    logits = torch.stack([model.unembedding(at.select(cache[name]).to(model.dtype)) for name in points.values()])
    require_finite("the logit lens", logits, model, cache, points.values())
    return LogitLens(tuple(points), at.squeeze(logits, 2))
