"""How large what each branch adds is, beside the stream it is added to."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analysis.results import Result, result
from circuits.arguments import require_model
from circuits.model import HookedGPT
from circuits.names import block_names


@result
class UpdateSizes(Result):
    """Sizes of the updates relative to the stream, by layer: means over tokens (aside 3.5).

    Attributes:
        attn: ``‖attn_out‖ / ‖stream‖`` where it is added.
        mlp: ``‖mlp_out‖ / ‖stream‖`` where it is added; None without MLPs.
        block: ``‖resid_post − resid_pre‖ / ‖resid_pre‖``.
        turn: Cosine of the streams before and after the block.
        stream: ``‖resid_pre‖``.
    """

    table = ("attn", "mlp", "block", "turn", "stream")
    attn: Float[Tensor, " layer"]
    mlp: Float[Tensor, " layer"] | None
    block: Float[Tensor, " layer"]
    turn: Float[Tensor, " layer"]
    stream: Float[Tensor, " layer"]


@torch.no_grad()
def update_sizes(
    model: HookedGPT, tokens: Int[Tensor, "batch pos"], attention_mask: Tensor | None = None
) -> UpdateSizes:
    """Compare every branch's write with the stream it joins.

    Args:
        model: A model.
        tokens: Prompts.
        attention_mask: 1 for tokens, 0 for padding, which is left out of the means.
    """
    require_model(model)
    config = model.config
    names = [block_names(layer) for layer in range(config.n_layers)]
    wanted = [name for n in names for name in (n.resid_pre, n.attn_out, n.resid_post)]
    wanted += [n.mlp_out for n in names if config.has_mlp] + [n.resid_mid for n in names if config.has_resid_mid]
    _, cache = model.run_with_cache(tokens, names_filter=wanted, attention_mask=attention_mask)
    weight = torch.ones_like(tokens) if attention_mask is None else attention_mask
    weight = weight.to(cache[names[0].resid_pre].dtype)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / weight.sum()

    attn, mlp, whole, turn, stream = [], [], [], [], []
    for n in names:
        before, after = cache[n.resid_pre], cache[n.resid_post]
        size = before.norm(dim=-1)
        stream.append(mean(size))
        attn.append(mean(cache[n.attn_out].norm(dim=-1) / size))
        whole.append(mean((after - before).norm(dim=-1) / size))
        turn.append(mean(torch.cosine_similarity(before, after, dim=-1)))
        if config.has_mlp:
            joined = cache[n.resid_mid] if config.has_resid_mid else before
            mlp.append(mean(cache[n.mlp_out].norm(dim=-1) / joined.norm(dim=-1)))
    return UpdateSizes(
        attn=torch.stack(attn),
        mlp=torch.stack(mlp) if mlp else None,
        block=torch.stack(whole),
        turn=torch.stack(turn),
        stream=torch.stack(stream),
    )
