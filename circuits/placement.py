"""Where weights can live and in what type: refused with what there is, before anything is made or read."""

from __future__ import annotations

import torch

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """The type, or an error if no model can run in it.

    Raises:
        TypeError: Not one of `WEIGHT_DTYPES`.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise TypeError(f"dtype must be one of {dtype_names()}, not {dtype!r}")
    return dtype


def dtype_names() -> str:
    """`WEIGHT_DTYPES` for a message."""
    return ", ".join(map(str, WEIGHT_DTYPES))


def check_device(device: torch.device | str | int | None) -> torch.device | None:
    """The device, or an error if it is unknown, or not on this machine.

    Raises:
        TypeError: Nothing that names a device.
        ValueError: A device that cannot be used here, with the reason.
    """
    if device is None:
        return None
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"device must be a name such as 'cpu' or 'cuda:0', not {device!r}")
    try:
        known = torch.device(device)
        torch.empty(1, device=known)
    except (RuntimeError, AssertionError, ImportError) as error:  # unknown, or lacking in this PyTorch or machine
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device {str(device)!r} cannot be used here; try 'cpu' ({reason:.160})") from None
    return torch.device("cpu") if known.type == "cpu" else known
