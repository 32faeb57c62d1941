"""Types and devices that no model can have are refused by name."""

import pytest
import torch
from unchecked import unchecked

from circuits import GPTConfig, HookedGPT
from circuits.placement import WEIGHT_DTYPES, check_device, check_dtype

CONFIG = GPTConfig(n_layers=1, d_model=6, n_heads=2, n_ctx=5, d_vocab=7)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, "float32"])
def test_types_in_which_no_model_runs_are_refused(dtype):
    with unchecked(), pytest.raises(TypeError, match=r"must be one of torch\.float64, .* not "):
        HookedGPT(CONFIG, dtype=dtype)


@pytest.mark.parametrize("dtype", [None, *WEIGHT_DTYPES])
def test_types_in_which_models_run_pass(dtype):
    assert check_dtype(dtype) is dtype


def test_unknown_and_missing_devices_are_named():
    with pytest.raises(ValueError, match="device 'gpu' cannot be used here; try 'cpu'"):
        HookedGPT(CONFIG, device="gpu")
    with unchecked(), pytest.raises(TypeError, match=r"device must be a name .* not 3\.5"):
        check_device(3.5)


def test_cpu_with_an_index_is_the_cpu():
    assert check_device("cpu:0") == torch.device("cpu")
    assert check_device(None) is None
