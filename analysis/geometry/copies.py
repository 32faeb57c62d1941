"""A copy of a model to experiment on."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from circuits.model import HookedGPT


def private_copy(model: HookedGPT, dtype: torch.dtype | None = None) -> HookedGPT:
    """The same modules and weights, to be changed without the original noticing; nothing in it requires a gradient.

    What hangs on the instances (a subclass, a replaced method) is kept: the copy does what the model does. Weights
    share their memory with the original unless `dtype` converts them, so they may be replaced but not written into.

    Args:
        model: A model.
        dtype: Convert the weights.
    """
    shared: dict[int, Any] = {id(model.tokenizer): model.tokenizer}
    for parameter in model.parameters():
        weight = parameter.detach()
        weight = weight if dtype is None else weight.to(dtype)
        shared[id(parameter)] = nn.Parameter(weight, requires_grad=False)
    copied: HookedGPT = copy.deepcopy(model, shared)
    return copied
