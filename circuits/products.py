"""``X Wᵀ + b`` of activations with weights, by the faster of the two kernels that PyTorch brings.

On x86, `torch.nn.functional.linear` in float32 is MKL's product, which uses AVX-512 on Intel's processors only; on
others it stays with AVX2, at half the rate. A convolution of width one is the same sums by oneDNN, which uses what the
processor has, but first rearranges the weight. (`python -m benchmarks --only forward` times a forward pass of ours
against the same modules in plain PyTorch.)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


def _mkl_holds_back() -> bool:
    """Whether MKL leaves AVX-512 unused on this processor."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    processor: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older releases do not tell
    return bool(processor.get("avx512_f")) and "AMD" in str(processor.get("cpu_name"))


_PREFERS_ONEDNN = _mkl_holds_back()

# From here on the quicker sums pay for rearranging the weight (which a backward pass does twice): rows, multiply-adds.
_ROWS, _ROWS_WITH_GRADIENT = 48, 256
_MULTIPLY_ADDS = 2**23


def linear(
    x: Float[Tensor, "*batch d_in"], weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None = None
) -> Float[Tensor, "*batch d_out"]:
    """``X Wᵀ + b``, as `torch.nn.functional.linear`."""
    if not _PREFERS_ONEDNN or x.numel() * weight.shape[0] < _MULTIPLY_ADDS or not _pays(x, weight):
        return F.linear(x, weight, bias)
    d_out, d_in = weight.shape
    image = x.reshape(1, 1, -1, d_in).permute(0, 3, 1, 2)  # one row of pixels, its channels last
    y = F.conv2d(image, weight.view(d_out, d_in, 1, 1), bias)
    return y.permute(0, 2, 3, 1).reshape(*x.shape[:-1], d_out)


def _pays(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the quicker for a product of some size; a compiler chooses its kernels by itself."""
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.enabled:
        return False
    if not (x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and weight.is_contiguous()):
        return False
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.numel() // x.shape[-1] >= (_ROWS_WITH_GRADIENT if differentiated else _ROWS)
