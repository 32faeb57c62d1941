"""Files appear whole or not at all, and no header, however hostile, gets further than a CheckpointError."""

import json
import os
import stat

import pytest
import torch

from circuits.tensorfile import CheckpointError, read_tensors, write_tensors, written_whole

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, TENSORS, {"format": 1, "kind": "some"})
    return path


def with_header(path, text: bytes):
    """The same file with other bytes as its header."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    return path


def header_of(path):
    content = path.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_what_is_written_is_read_back(saved):
    tensors, header = read_tensors(saved)
    assert header == {"format": 1, "kind": "some"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "metadata",
    [5, None, "circuits", ["circuits"], {"circuits": 5}, {"circuits": None}, {"circuits": "[" * 100_000}, {}],
    ids=str,
)
def test_metadata_that_are_not_ours_are_refused(saved, metadata):
    with pytest.raises(CheckpointError):
        read_tensors(with_header(saved, json.dumps(header_of(saved) | {"__metadata__": metadata}).encode()))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F5"},
        {"dtype": 5},
        {"shape": [-2, 3]},
        {"shape": [10**30]},
        {"data_offsets": [0, 10**18]},
        {"data_offsets": [24, 0]},
        {"data_offsets": [0]},
        {"data_offsets": ["0", "x"]},
        {"data_offsets": None},
    ],
    ids=str,
)
def test_entries_that_fit_no_file_are_refused(saved, entry):
    header = header_of(saved)
    header["a"] |= entry
    with pytest.raises(CheckpointError):
        read_tensors(with_header(saved, json.dumps(header).encode()))


@pytest.mark.parametrize("text", [b'{"a":' + b"[" * 100_000, b'{"a": 1}', b'{"\xff": 1}', b"{", b"[]"], ids=range(5))
def test_headers_that_are_no_headers_are_refused(saved, text):
    with pytest.raises(CheckpointError):
        read_tensors(with_header(saved, text))


def test_no_changed_byte_of_the_header_gets_further_than_an_error_of_ours(saved):
    content = saved.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    for place in range(length):
        for value in (0, 0x22, 0x7B, 0xFF):
            saved.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
            try:
                read_tensors(saved)
            except CheckpointError:
                continue


def test_a_device_that_is_not_here_is_no_fault_of_the_file(saved):
    with pytest.raises(ValueError, match=r"device 'nowhere' cannot be used here") as error:
        read_tensors(saved, device="nowhere")
    assert not isinstance(error.value, CheckpointError)
    with pytest.raises(ValueError, match="'meta' holds no weights"):
        read_tensors(saved, device="meta")


def test_a_link_stays_a_link_to_the_file_that_is_written(saved, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(saved.name)
    write_tensors(link, TENSORS, {"format": 1, "kind": "other"})
    assert link.is_symlink()
    assert read_tensors(saved)[1]["kind"] == "other"


def test_a_pipe_or_a_device_is_never_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), written_whole(pipe):
        pass
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_name_as_long_as_names_may_be_can_be_written(tmp_path):
    path = tmp_path / ("n" * (255 - len(".safetensors")) + ".safetensors")
    write_tensors(path, TENSORS, {"format": 1})
    assert list(tmp_path.iterdir()) == [path]


def test_a_header_that_is_not_data_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match="must be JSON data: Object of type Tensor"):
        write_tensors(tmp_path / "t.safetensors", TENSORS, {"card": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
