"""Filling a model's weights: at random, or from given tensors, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from circuits.config import GPTConfig
from circuits.placement import WEIGHT_DTYPES, dtype_names
from circuits.validity import require_whole

# GPT-2's standard deviation. At this scale the first logits are small and the first loss is near ln(d_vocab).
STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module, config: GPTConfig, seed: int) -> None:
    """Draw every weight from a normal distribution; biases 0, norms neutral.

    What writes to the stream (`attn.out`, `mlp.down`) is scaled by ``1 / sqrt(number of writes)``, so that the sum of
    all writes keeps a variance of order one (lecture, aside 5.2). The draws are made in float32 on the CPU: the same
    seed gives the same weights everywhere.
    """
    generator = torch.Generator().manual_seed(require_whole("seed", seed, least=-(2**63)))
    for name, parameter in model.named_parameters():
        if name.endswith((".b", ".bias")):
            parameter.zero_()
        elif name.endswith(".w"):
            parameter.fill_(1.0)
        else:
            writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
            std = STD / math.sqrt(config.n_writes) if writes else STD
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def state_errors(expected: Mapping[str, torch.Size], state: Mapping[str, Tensor]) -> list[str]:
    """Everything that is wrong with a set of tensors, a line each."""
    others = [f"{name}: {type(t).__name__}, not a tensor" for name, t in state.items() if not isinstance(t, Tensor)]
    if others:
        return others
    errors = [f"missing tensor {name} {list(shape)}" for name, shape in expected.items() if name not in state]
    errors += [f"unexpected tensor {name} {list(t.shape)}" for name, t in state.items() if name not in expected]
    errors += [
        f"tensor {name} has shape {list(state[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in state and state[name].shape != shape
    ]
    types = sorted({t.dtype for name, t in state.items() if name in expected}, key=str)
    if len(types) > 1:
        errors.append(f"the tensors have mixed types: {', '.join(map(str, types))}")
    elif types and types[0] not in WEIGHT_DTYPES:
        errors.append(f"the tensors are {types[0]}, not one of {dtype_names()}")
    return errors


def load_exactly(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Make the given tensors the model's parameters, without a copy.

    Raises:
        TypeError: Not a mapping.
        ValueError: Missing, extra or misshapen tensors, or mixed types: all of them listed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"expected a mapping from names to tensors, not {type(state).__name__}")
    expected = {name: parameter.shape for name, parameter in model.state_dict().items()}
    errors = state_errors(expected, state)
    if errors:
        raise ValueError("the tensors do not fit the config:\n  " + "\n  ".join(errors))
    model.load_state_dict(state, strict=True, assign=True)
    model.requires_grad_()
