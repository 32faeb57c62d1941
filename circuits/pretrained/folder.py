"""Hugging Face folders: `config.json`, safetensors and `tokenizer.json`, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.pretrained.assemble import assemble, chosen_layers
from circuits.pretrained.families import FAMILIES
from circuits.pretrained.family import Family
from circuits.pretrained.fields import Fields, UnsupportedModel
from circuits.pretrained.shards import Shards, weight_files
from circuits.text import PretrainedTokenizer

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


def read_folder(
    folder: Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    layers: Sequence[int] | None = None,
) -> HookedGPT:
    """A model from a folder as `save_pretrained` writes it or the hub serves it.

    Args:
        folder: Holds ``config.json``, the weights as safetensors (one file, or shards and their index), and where the
            model has text, ``tokenizer.json``.
        device: Where the weights go; by default the CPU.
        dtype: Their type; by default float32, whatever the file's.
        layers: Which layers to read; by default all.

    Raises:
        FileNotFoundError: A file that should be there is not.
        UnsupportedModel: A family, or a value in its config, that has no equal here.
        ValueError: Pickled weights, a file cut short, or tensors that do not fit the config.
    """
    data = read_json(folder / CONFIG)
    family, config = family_and_config(data)
    chosen = chosen_layers(layers, config.n_layers)
    tensors = Shards(weight_files(folder))
    try:
        model = assemble(config, family, tensors, layers=chosen, dtype=dtype or torch.float32, device=device)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    model.tokenizer = read_tokenizer(folder)
    model.card = {"source": str(data.get("_name_or_path") or folder.name), "model_type": family.model_type}
    if layers is not None:
        model.card["layers"] = list(chosen)
    return model


def family_and_config(data: Mapping[str, Any]) -> tuple[Family, GPTConfig]:
    """The family that a `config.json` names, and its fields as a `GPTConfig`.

    Raises:
        UnsupportedModel: Another family, quantised weights, or a value that has no equal here.
    """
    model_type = data.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModel(f"model_type {model_type!r} is not supported (supported: {', '.join(FAMILIES)})")
    fields = Fields(data)
    if fields.get("quantization_config") is not None:
        method = fields.get("quantization_config").get("quant_method")
        raise fields.unsupported("quantization_config", method, "weights in float32, float16 or bfloat16")
    family = FAMILIES[model_type]
    try:
        return family, family.config(fields)
    except UnsupportedModel:
        raise
    except (ValueError, TypeError) as error:
        raise UnsupportedModel(f"{model_type}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: No such file.
        ValueError: Not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent}: has no {path.name}, so it is no Hugging Face folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: not a JSON object")
    return data


def read_tokenizer(folder: Path) -> PretrainedTokenizer | None:
    """The tokenizer of a folder; None where it has no ``tokenizer.json``."""
    if not (folder / TOKENIZER).is_file():
        return None
    config = folder / TOKENIZER_CONFIG
    return PretrainedTokenizer.from_files(
        (folder / TOKENIZER).read_text(encoding="utf-8"), read_json(config) if config.is_file() else {}
    )
