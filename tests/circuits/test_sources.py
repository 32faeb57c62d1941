"""`load`: what a source means, and that nothing but "hf:" could mean the network."""

import socket

import pytest
import torch
from unchecked import unchecked

from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.sources import load
from circuits.storage import CheckpointError, bundled_names, save

SIZES = {"n_layers": 1, "d_model": 6, "n_heads": 3, "n_ctx": 13, "d_vocab": 17}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_load_reads_own_checkpoints(tmp_path):
    model = HookedGPT(GPTConfig(**SIZES))
    save(model, tmp_path / "m.safetensors")
    for source in (tmp_path / "m.safetensors", str(tmp_path / "m.safetensors")):
        again = load(source, dtype=torch.float64, device="cpu")
        assert again.dtype == torch.float64
        assert torch.equal(again.W_E.float(), model.W_E)


@pytest.mark.parametrize("name", ["gpt2", "EleutherAI/pythia-70m", "shakespear", "nothing like it"])
def test_unknown_name_lists_what_there_is_and_stays_off_the_network(name):
    with pytest.raises(ValueError, match=f"'{name}' is neither a bundled model nor a path") as error:
        load(name)
    assert all(bundled in str(error.value) for bundled in bundled_names())


@pytest.mark.parametrize("path", ["./m", "runs/m.safetensors", "m.gguf", "/nowhere/m"])
def test_path_with_nothing_there_is_a_missing_file(path):
    with pytest.raises(FileNotFoundError, match=f"no file or folder '{path}'"):
        load(path)


def test_each_form_reaches_its_reader(tmp_path):
    with pytest.raises(OSError, match=r"hf:openai-community/gpt2: config.json is not in the cache, and HF_HUB_OFFLINE"):
        load("hf:openai-community/gpt2")
    with pytest.raises(FileNotFoundError, match=r"has no config.json, so it is no Hugging Face folder"):
        load(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        load(tmp_path / "m.gguf")


def test_part_of_the_stack_of_an_own_checkpoint(tmp_path):
    model = HookedGPT(GPTConfig(**{**SIZES, "n_layers": 5}))
    model.card = {"trained_on": "nothing"}
    save(model, tmp_path / "m.safetensors")
    part = load(tmp_path / "m.safetensors", layers=range(2, 4))
    assert torch.equal(part.W_V, model.W_V[2:4])
    assert part.card == {"trained_on": "nothing", "layers": [2, 3]}
    with pytest.raises(ValueError, match="increasing numbers from 0 to 4"):
        load(tmp_path / "m.safetensors", layers=range(4, 6))


def test_a_pickle_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="a pickle"):
        load(tmp_path / "model.bin")


@pytest.mark.parametrize("source", [None, 5, b"shakespeare"])
def test_what_names_no_model_is_refused(source):
    with unchecked(), pytest.raises(TypeError, match="expected the name or path of a model"):
        load(source)


@pytest.mark.parametrize("source", ["", "  "])
def test_an_empty_name_is_not_the_folder_one_stands_in(source):
    with pytest.raises(ValueError, match="the name of the model is empty"):
        load(source)


def test_a_name_of_the_hub_is_told_how_to_ask_for_it():
    with pytest.raises(ValueError, match=r"asked for as 'hf:gpt2'"):
        load("gpt2")
