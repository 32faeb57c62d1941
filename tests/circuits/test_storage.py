"""Checkpoints: what is saved is read back bit for bit, files are whole, and what is wrong with one is all said."""

import json
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from unchecked import unchecked

from circuits import storage, tensorfile
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.storage import CheckpointError, read, save
from circuits.text import CharTokenizer

SIZES = {"n_layers": 2, "d_model": 6, "n_heads": 3, "d_head": 5, "d_mlp": 11, "n_ctx": 13, "d_vocab": 17}


def tiny(**changes) -> HookedGPT:
    return HookedGPT(GPTConfig(**(SIZES | changes)), seed=3)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "tiny.safetensors"
    save(tiny(), path)
    return path


def rewritten(path, tensors=None, **header):
    """The same file with other tensors, or other entries in its header (None removes one)."""
    old = storage.read_header(path)
    new = {key: value for key, value in (old | header).items() if value is not None}
    save_file(tensors if tensors is not None else load_file(path), path, metadata={"circuits": json.dumps(new)})
    return path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tie", [False, True])
def test_saving_and_reading_keeps_every_bit(tmp_path, dtype, tie):
    model = tiny(tie_embeddings=tie).to(dtype)
    model.tokenizer = CharTokenizer.from_text("abcdefghijklmnopq")
    model.card = {"command": "circuits train …", "loss": {"val": 1.25}}
    save(model, tmp_path / "m.safetensors")
    again = read(tmp_path / "m.safetensors")
    assert (again.config, again.tokenizer, again.card) == (model.config, model.tokenizer, model.card)
    assert again.dtype == dtype
    state = again.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    tokens = torch.tensor([[1, 16, 4]])
    assert torch.equal(again(tokens), model(tokens))


def test_tied_embeddings_stand_once_and_stay_tied(tmp_path):
    save(tiny(tie_embeddings=True), tmp_path / "m.safetensors")
    save(tiny(), tmp_path / "untied.safetensors")
    difference = (tmp_path / "untied.safetensors").stat().st_size - (tmp_path / "m.safetensors").stat().st_size
    assert difference == pytest.approx(SIZES["d_vocab"] * SIZES["d_model"] * 4, abs=200)
    again = read(tmp_path / "m.safetensors")
    assert again.W_U.data_ptr() == again.W_E.data_ptr()


def test_reading_in_another_type(saved):
    assert read(saved, dtype=torch.float64).dtype == torch.float64
    assert torch.equal(read(saved, dtype=torch.float64).W_E.float(), read(saved).W_E)


def test_a_read_model_can_be_changed_without_changing_the_file(saved):
    before = saved.read_bytes()
    model = read(saved)
    with torch.no_grad():
        model.blocks[0].attn.W_Q.zero_()
    assert saved.read_bytes() == before


def test_equal_models_give_equal_files_that_others_may_read(saved, tmp_path):
    save(tiny(), tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == saved.read_bytes()
    (tmp_path / "plain").touch()
    assert saved.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    before = saved.read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(before[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(tensorfile, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save(tiny(), saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_card_that_is_not_data_is_refused_before_anything_is_written(tmp_path):
    model = tiny()
    model.card = {"when": object()}
    with pytest.raises(TypeError):
        save(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_places_where_nothing_can_be_saved_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.safetensors, and 'm\.pt' does not"):
        save(tiny(), tmp_path / "m.pt")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        save(tiny(), tmp_path / "nowhere" / "m.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match="it is a folder"):
        save(tiny(), tmp_path / "folder.safetensors")


def test_every_truncation_is_refused(saved):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 5, 8, 9, header - 1, header, len(content) - 1):
        saved.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"truncated|not a safetensors file"):
            read(saved)
    saved.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"should have {len(content)} bytes and has {len(content) - 1}"):
        read(saved)


def test_every_wrong_tensor_is_listed(saved):
    tensors = load_file(saved)
    del tensors["embed.weight"], tensors["blocks.1.attn.qkv.weight"]
    tensors["blocks.7.mlp.up.weight"] = torch.zeros(2, 3)
    tensors["pos_embed.weight"] = torch.zeros(13, 7)
    with pytest.raises(CheckpointError) as error:
        read(rewritten(saved, tensors))
    for part in (
        r"embed.weight [17, 6]",
        r"blocks.1.attn.qkv.weight [45, 6]",
        r"blocks.7.mlp.up.weight [2, 3]",
        r"pos_embed.weight has shape [13, 7], expected [13, 6]",
    ):
        assert part in str(error.value)


def test_whole_numbers_are_no_weights(saved):
    tensors = {name: tensor.to(torch.int32) for name, tensor in load_file(saved).items()}
    with pytest.raises(CheckpointError, match="int32"):
        read(rewritten(saved, tensors))


def test_unknown_config_field_is_named_with_the_nearest(saved):
    config = storage.read_header(saved)["config"]
    config["n_layer"] = config.pop("n_layers")
    with pytest.raises(CheckpointError, match=r"no field 'n_layer'; did you mean n_layers"):
        read(rewritten(saved, config=config))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": 99}, "written in format 99; this version reads format 1"),
        ({"config": None}, "its header has no 'config'"),
        ({"config": {"n_layers": 2}}, "the config lacks d_model"),
        ({"config": {**SIZES, "n_heads": 0}}, "n_heads must be at least 1, not 0"),
        ({"tokenizer": {"kind": "words"}}, "'words' is not one of"),
        ({"tokenizer": {"kind": "char", "vocab": "abcdefghijklmnopqr"}}, "its tokenizer has 18 tokens, its config 17"),
        ({"kind": "training state"}, "holds a training state, not a model"),
    ],
)
def test_headers_that_mean_nothing_are_refused(saved, header, message):
    with pytest.raises(CheckpointError, match=message):
        read(rewritten(saved, **header))


def test_safetensors_of_others_are_refused(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="not one of ours"):
        read(tmp_path / "a.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "b.safetensors", metadata={"circuits": "[}"})
    with pytest.raises(CheckpointError, match="not JSON"):
        read(tmp_path / "b.safetensors")


class Bomb:
    def __reduce__(self):
        return exec, ("raise AssertionError('the pickle was opened')",)


@pytest.mark.parametrize("name", ["m.pt", "pytorch_model.bin", "m.safetensors"])
def test_pickles_are_refused_unopened(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Bomb(), protocol=4))
    with pytest.raises(CheckpointError, match="a pickle, which can run any code"):
        read(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="a pickle, which can run any code"):
        read(path)


@pytest.mark.parametrize("content", [b"hello, this is text\n", b"\x05\0\0\0\0\0\0\0hello", b"\x02\0\0\0\0\0\0\0{]"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read(tmp_path / "m.safetensors")


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*m\.safetensors"):
        read(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="a folder"):
        read(tmp_path)


def test_unknown_bundled_name_lists_those_there_are():
    with pytest.raises(ValueError, match="no bundled model 'nobody'"), storage.bundled_path("nobody"):
        pass


@pytest.mark.parametrize("field", ["n_layers", "d_model", "d_vocab", "d_mlp", "d_head", "n_ctx"])
@pytest.mark.parametrize("size", [10**9, 2**62, 10**30])
def test_sizes_far_beyond_the_file_are_refused_before_memory_is_taken(saved, field, size):
    config = storage.read_header(saved)["config"] | {field: size, "window": None}
    with pytest.raises(CheckpointError, match=r"n_layers \d+, but the file has|sizes that no tensor|do not fit"):
        read(rewritten(saved, config=config))


@pytest.mark.parametrize("entry", ["config", "tokenizer", "card"])
@pytest.mark.parametrize("value", [5, "text", [1], True])
def test_header_entries_of_another_kind_are_named(saved, entry, value):
    with pytest.raises(CheckpointError, match=f"the '{entry}' in its header is not a JSON object, but "):
        read(rewritten(saved, **{entry: value}))


def test_types_and_devices_that_no_model_can_have_are_refused(saved):
    with unchecked(), pytest.raises(TypeError, match="dtype must be one of"):
        read(saved, dtype="float32")
    with pytest.raises(TypeError, match="dtype must be one of"):
        read(saved, dtype=torch.int8)
    tensors = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(saved).items()}
    with pytest.raises(CheckpointError, match="float8_e4m3fn, not one of"):
        read(rewritten(saved, tensors))


def test_what_cannot_be_saved_is_named(tmp_path):
    path = tmp_path / "m.safetensors"
    with unchecked(), pytest.raises(TypeError, match="expected a HookedGPT to save, not dict"):
        save({}, path)
    model = tiny()
    model.card = None
    with pytest.raises(TypeError, match="the card must be a dict of JSON data, not None"):
        save(model, path)
    with pytest.raises(ValueError, match="meta device has no weights"):
        save(HookedGPT(GPTConfig(**SIZES), device="meta"), path)
    assert list(tmp_path.iterdir()) == []
