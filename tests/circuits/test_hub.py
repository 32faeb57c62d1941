"""`hf:` ids: the cache and the offline switch are respected, and what goes wrong is one clear line.

The cache is laid out as the hub's own client lays it out, and that client reads it; only its answers from the network
are made up.
"""

from __future__ import annotations

import logging
import socket

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from test_pretrained_folder import TOKENS, llama_tensors, write

from circuits import load
from circuits.pretrained.hub import HubError, fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, the network forbidden."""

    def refuse(*args, **kwargs):
        pytest.fail("the network was touched")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache, repo="org/tiny"):
    """The snapshot folder of a repository in the cache, as if its main branch had been downloaded."""
    home = cache / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_model_in_the_cache_is_read_without_the_network_and_says_its_revision(cache):
    write(cached(cache), llama_tensors())
    model = load("hf:org/tiny", layers=range(2))
    assert model.config.n_layers == 2
    assert model.card == {"source": "hf:org/tiny", "model_type": "llama", "layers": [0, 1], "revision": COMMIT}
    assert torch.equal(load(f"hf:org/tiny@{COMMIT}")(TOKENS), load("hf:org/tiny")(TOKENS))


def test_what_is_not_in_the_cache_is_said_to_be_offline(cache):
    with pytest.raises(HubError, match=r"^hf:org/gone: config.json is not in the cache, and HF_HUB_OFFLINE is set$"):
        load("hf:org/gone")


def test_a_partial_download_names_the_missing_file(cache):
    snapshot = cached(cache)
    write(snapshot)
    with pytest.raises(
        HubError, match=r"model.safetensors \(or model.safetensors.index.json\) is not in the cache"
    ) as error:
        load("hf:org/tiny")
    assert "python -c" in str(error.value)
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'
    )
    (snapshot / "model-1-of-2.safetensors").write_bytes(b"")
    with pytest.raises(HubError, match=r"^hf:org/tiny: model-2-of-2.safetensors is not in the cache"):
        load("hf:org/tiny")


def test_all_files_come_from_the_commit_that_the_config_came_from(cache, monkeypatch):
    folder = write(cached(cache), llama_tensors())
    asked = []

    def download(repo, name, revision=None):
        asked.append((name, revision))
        if not (folder / name).is_file():
            raise errors.EntryNotFoundError("404")
        return str(folder / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert fetch("org/tiny@main") == folder
    assert asked[0] == ("config.json", "main")
    assert {revision for _, revision in asked[1:]} == {COMMIT}
    assert [name for name, _ in asked] == [
        *("config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"),
        "tokenizer_config.json",
    ]


def response(status):
    import httpx

    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/org/tiny"))


ANSWERS = {
    "gated": (lambda: errors.GatedRepoError("403", response=response(403)), r"gated; accept its terms .*hf auth login"),
    "missing": (lambda: errors.RepositoryNotFoundError("404", response=response(404)), r"no such model on the hub"),
    "revision": (lambda: errors.RevisionNotFoundError("404", response=response(404)), r"no revision 'v9'"),
    "id": (lambda: errors.HFValidationError("bad"), r"not a hub id; expected hf:ORG/NAME or hf:ORG/NAME@REVISION"),
    "server": (lambda: errors.HfHubHTTPError("503\nbusy", response=response(503)), r"could not be fetched: 503 busy"),
    "broken off": (lambda: ConnectionError("peer\nclosed"), r"config.json could not be fetched: peer closed"),
    "no network": (lambda: errors.LocalEntryNotFoundError("no connection"), r"config.json is not"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_whatever_goes_wrong_is_one_line_that_names_the_model(monkeypatch, case):
    make, message = ANSWERS[case]

    def fail(*args, **kwargs):
        raise make()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(HubError, match=message) as caught:
        load("hf:org/tiny@v9")
    text = str(caught.value)
    assert text.startswith("hf:org/tiny: ")
    assert "\n" not in text


def test_without_the_offline_switch_no_network_is_said(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def fail(*args, **kwargs):
        raise errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(HubError, match=r"config.json is not there, or cannot be reached"):
        load("hf:org/tiny")


def test_without_a_network_the_hub_is_asked_once_and_in_silence(monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    log = logging.getLogger("huggingface_hub.utils._http")
    level, asked = log.level, []

    def fail(url):
        asked.append(url)
        log.warning("Retrying in 1s")
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    with pytest.raises(HubError, match=r"^hf:org/tiny: config.json could not be fetched: no route$"):
        load("hf:org/tiny")
    assert len(asked) == 1
    assert caplog.records == []
    assert log.level == level
