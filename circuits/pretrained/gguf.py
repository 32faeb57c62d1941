"""GGUF files of the Llama family and of GPT-2, de-quantised, with their tokenizers.

The container is parsed here; the `gguf` package (the ``gguf`` extra) knows how each type packs its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuits.config import GPTConfig, RotaryScaling
from circuits.layers import rotary_frequencies
from circuits.model import HookedGPT
from circuits.pretrained.assemble import assemble, chosen_layers
from circuits.pretrained.family import Family
from circuits.pretrained.fields import Fields, UnsupportedModel
from circuits.pretrained.gguf_families import FAMILIES
from circuits.pretrained.gguf_file import GGUFFile
from circuits.pretrained.gguf_tokenizer import tokenizer_of

ROPE_FACTORS = "rope_freqs.weight"
_NUMBERS_AT_A_TIME = 1 << 20  # de-quantising makes several copies of what it is given


def read_gguf(
    path: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    layers: Sequence[int] | None = None,
) -> HookedGPT:
    """A model from a GGUF file.

    Args:
        path: The file.
        device: Where the weights go; by default the CPU.
        dtype: Their type once de-quantised; by default float32.
        layers: Which layers to read; by default all.

    Raises:
        ImportError: The ``gguf`` extra is not installed.
        ValueError: Not a whole GGUF file, or tensors that do not fit its metadata.
        UnsupportedModel: An architecture or a tokenizer that has no equal here.
    """
    file = GGUFFile(path)
    try:
        tensors = GGUFTensors(file)
        family, config = _family_and_config(file, tensors)
        chosen = chosen_layers(layers, config.n_layers)
        model = assemble(config, family, tensors, layers=chosen, dtype=dtype or torch.float32, device=device)
        model.tokenizer = tokenizer_of(file.metadata)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    source = str(file.metadata.get("general.name") or path.name)
    model.card = {"source": source, "model_type": family.model_type, "file": path.name}
    if layers is not None:
        model.card["layers"] = list(chosen)
    return model


class GGUFTensors:
    """The tensors of a file, each de-quantised when it is read."""

    def __init__(self, file: GGUFFile) -> None:
        try:
            import gguf
        except ImportError:
            raise ImportError("GGUF files need the gguf package: pip install 'qkov[gguf]'") from None
        self._gguf: Any = gguf
        self._file = file

    @property
    def names(self) -> set[str]:
        """The tensors that the file holds."""
        return set(self._file.places)

    def shape(self, name: str) -> tuple[int, ...]:
        """The sizes of a tensor."""
        return self._file.places[name].shape

    def read(self, name: str) -> Tensor:
        """A tensor as float32 (float16 where it is stored so)."""
        place = self._file.places[name]
        kind = self._gguf.GGMLQuantizationType(place.kind)
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        rows, width = int(np.prod(place.shape[:-1])), place.shape[-1]
        count = rows * (width // block) * size
        if place.start + count > len(self._file.data):
            raise ValueError(f"tensor {name} reaches beyond the end of the file; it is cut short")
        data = np.frombuffer(self._file.data, np.uint8, count, place.start).reshape(rows, -1)
        if kind.name == "F16":
            return torch.from_numpy(data.view(np.float16).reshape(place.shape).copy())
        out = np.empty((rows, width), np.float32)
        step = max(1, _NUMBERS_AT_A_TIME // width)
        for start in range(0, rows, step):
            out[start : start + step] = self._gguf.dequantize(data[start : start + step], kind)
        return torch.from_numpy(out.reshape(place.shape))


def _family_and_config(file: GGUFFile, tensors: GGUFTensors) -> tuple[Family, GPTConfig]:
    architecture = file.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"general.architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    prefix = f"{architecture}."
    data: dict[str, Any] = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    # What a file shows by which tensors it holds.
    data |= {
        "model_type": architecture,
        "d_vocab": tensors.shape("token_embd.weight")[0],
        "tied": "output.weight" not in tensors.names,
        "bias_qkv": "blk.0.attn_q.bias" in tensors.names,
        "bias_out": "blk.0.attn_output.bias" in tensors.names,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors.names,
    }
    family = FAMILIES[architecture]
    try:
        config = family.config(Fields(data))
    except UnsupportedModel:
        raise
    except (ValueError, TypeError) as error:
        raise UnsupportedModel(f"{architecture}: {error}") from None
    if ROPE_FACTORS in tensors.names:
        config = config.replace(rotary_scaling=_llama3_scaling(config, tensors.read(ROPE_FACTORS)))
    return family, config


def _llama3_scaling(config: GPTConfig, divisors: Tensor) -> RotaryScaling:
    """The llama-3 rule behind the stored divisors: the files keep what it makes of the frequencies, not its name."""
    plain = rotary_frequencies(config)
    for factor in (8.0, 32.0):
        rule = RotaryScaling(kind="llama3", factor=factor)
        stretched = rotary_frequencies(config.replace(rotary_scaling=rule))
        if torch.allclose(plain / stretched, divisors.double(), rtol=1e-4):
            return rule
    raise UnsupportedModel(f"{ROPE_FACTORS} are not those of Llama 3.1 or 3.2, the only ones that are known")
