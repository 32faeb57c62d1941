"""A picture of a matrix of weights as a PNG, written by hand: one colour, its opacity the weight."""

from __future__ import annotations

import base64
import struct
import zlib

import torch
from jaxtyping import Float
from torch import Tensor

ACCENT = (31, 95, 191)  # the page's accent in the light theme


def weights_png(weights: Float[Tensor, "query key"], color: tuple[int, int, int] = ACCENT) -> bytes:
    """A PNG with one pixel per weight in [0, 1]: transparent at 0, `color` at 1.

    A palette of one colour at 256 opacities: one byte for each pixel before compression.
    """
    rows, columns = weights.shape
    pixels = quantised(weights)
    lines = torch.cat([pixels.new_zeros(rows, 1), pixels], dim=1)  # each line starts with its filter, 0 for none
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(color) * 256),
        (b"tRNS", bytes(range(256))),
        (b"IDAT", zlib.compress(lines.numpy().tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def quantised(weights: Float[Tensor, "*axes"]) -> Tensor:
    """Weights in [0, 1] as the nearest of 256 levels, on the CPU; what is not a number as 0."""
    return (weights.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def data_uri(png: bytes) -> str:
    """The picture as an address that needs no request."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
