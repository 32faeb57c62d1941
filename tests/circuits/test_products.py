"""Products by oneDNN are the products by MKL; where neither float32 nor size calls for it, nothing changes."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from circuits import products

# Leading axes, d_in, d_out: large enough for oneDNN, in one, two and three axes.
LARGE = [((1024,), 96, 130), ((3, 171), 256, 65), ((2, 7, 40), 160, 129), ((64,), 768, 512)]
SMALL = [((47,), 768, 512), ((0,), 768, 512), ((1, 512), 16, 65), ((), 512, 512)]


@pytest.fixture
def convolutions(monkeypatch):
    """Whatever the processor, as where MKL holds back; the widths of the convolutions that were made."""
    seen = []
    original = F.conv2d

    def counted(image, weight, bias=None):
        seen.append(tuple(image.shape))
        return original(image, weight, bias)

    monkeypatch.setattr(products, "_PREFERS_ONEDNN", True)
    monkeypatch.setattr(F, "conv2d", counted)
    return seen


def made(leading, d_in, d_out, dtype=torch.float32, bias=True):
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((*leading, d_in), (d_out, d_in), (d_out,))
    )
    return x, weight / d_in**0.5, b if bias else None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", LARGE)
def test_a_large_product_is_the_same_sum(convolutions, shape, bias):
    given = made(*shape, bias=bias)
    found = products.linear(*given)
    exact = F.linear(*(None if t is None else t.double() for t in given))
    assert len(convolutions) == 1
    assert found.shape == exact.shape
    assert found.is_contiguous()
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("shape", SMALL)
def test_a_small_product_is_left_to_linear(convolutions, shape):
    given = made(*shape)
    assert torch.equal(products.linear(*given), F.linear(*given))
    assert convolutions == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_linear(convolutions, dtype):
    given = made(*LARGE[0], dtype=dtype)
    assert torch.equal(products.linear(*given), F.linear(*given))
    assert convolutions == []


def test_rows_that_are_not_contiguous(convolutions):
    x, weight, bias = made((3200,), 256, 65)
    x, weight = x[::2, :128], weight[:, :128].contiguous()
    found = products.linear(x, weight, bias)
    assert len(convolutions) == 1
    assert (found - F.linear(x, weight, bias)).abs().max() < 1e-5


def test_a_weight_that_is_not_contiguous_is_left_to_linear(convolutions):
    x, weight, bias = made((1600,), 256, 65)
    turned = weight.T.contiguous().T
    assert torch.equal(products.linear(x, turned, bias), F.linear(x, turned, bias))
    assert convolutions == []


def test_gradients_are_those_of_linear(convolutions):
    given = [t.requires_grad_() for t in made((2, 300), 200, 129)]
    upstream = torch.randn(2, 300, 129, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(products.linear(*given), given, upstream)
    assert len(convolutions) == 1
    exact = [t.detach().double().requires_grad_() for t in given]
    for own, other in zip(found, torch.autograd.grad(F.linear(*exact), exact, upstream.double()), strict=True):
        assert own.shape == other.shape
        assert (own - other).abs().max() <= 1e-5 * other.abs().max()


def test_few_rows_that_are_differentiated_are_left_to_linear(convolutions):
    x, weight, bias = made((200,), 512, 512)
    products.linear(x.requires_grad_(), weight, bias)
    assert convolutions == []
    products.linear(x.detach(), weight, bias)
    assert len(convolutions) == 1


def test_what_is_not_finite_comes_through(convolutions):
    x, weight, bias = made((512,), 128, 256)
    x[3, 5], weight[7, 9] = float("nan"), float("inf")
    found = products.linear(x, weight, bias)
    assert len(convolutions) == 1
    assert found[3].isnan().all()
    assert not found[4, :7].isnan().any()
    assert not found[[0, 1, 2, 4], 7].isfinite().any()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_onednn_switched_off_is_not_used(convolutions):
    with torch.backends.mkldnn.flags(enabled=False):
        given = made(*LARGE[0])
        assert torch.equal(products.linear(*given), F.linear(*given))
    assert convolutions == []


_COMPILED = """
import torch
from circuits import products
products._PREFERS_ONEDNN = True
found = torch._dynamo.explain(lambda x, w: products.linear(x, w))(torch.randn(512, 128), torch.randn(256, 128))
print(found.graph_count, found.graph_break_count)
"""


def test_a_compiler_is_left_to_choose():
    """A break of the graph at every product would cost more than any kernel wins. (Apart from the checks of shapes.)"""
    done = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


_FAULTS = """
import resource, torch
from circuits import GPTConfig, HookedGPT
model, tokens = HookedGPT(GPTConfig.course()), torch.zeros(8, 64, dtype=torch.long)
count = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with torch.no_grad():
    for _ in range(3):
        model(tokens)
    before = count()
    for _ in range(10):
        model(tokens)
print((count() - before) / 10)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how long freed pages stay is up to the C library: glibc")
def test_a_pass_does_not_wait_for_new_pages():
    """Without `circuits.pages`: about a thousand faults a pass."""
    done = subprocess.run([sys.executable, "-c", _FAULTS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50
