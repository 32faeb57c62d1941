"""Hub ids: `hf:ORG/NAME`, fetched through the usual cache. The only module that may use the network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from circuits.pretrained.folder import CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_json
from circuits.pretrained.shards import CONVERT, INDEX, SINGLE


class HubError(OSError):
    """A model that could not be fetched; the message says what went wrong, in one line."""


def fetch(model_id: str) -> Path:
    """A folder with those files of ``ORG/NAME``, or of ``ORG/NAME@REVISION``, that are read here, and no others.

    ``HF_HUB_OFFLINE``, ``HF_HOME`` and the user's login mean what they mean everywhere. The folder's name is the
    commit: all files come from one.

    Raises:
        HubError: Gated, missing, no network and not in the cache, or without safetensors.
    """
    repo, _, revision = model_id.partition("@")
    _ask_once(repo, CONFIG, revision or None)
    config = _required(repo, CONFIG, revision or None)
    commit = config.parent.name
    index = _download(repo, INDEX, commit)
    if index is not None:
        for name in sorted(set(read_json(index)["weight_map"].values())):
            _required(repo, name, commit)
    elif _download(repo, SINGLE, commit) is None:
        raise HubError(
            f"hf:{repo}: {SINGLE} (or {INDEX}) {_absent()}; "
            f"if it has only pytorch_model.bin, a pickle, fetch that and convert it where you trust it: {CONVERT}"
        )
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        _download(repo, name, commit)
    return config.parent


def _required(repo: str, name: str, revision: str | None) -> Path:
    path = _download(repo, name, revision)
    if path is None:
        raise HubError(f"hf:{repo}: {name} {_absent()}")
    return path


def _absent() -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    return "is not in the cache, and HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "is not there, or cannot be reached"


def _ask_once(repo: str, name: str, revision: str | None) -> None:
    """Ask the hub for a file that is not in the cache, once: `hf_hub_download` asks for half a minute, noisily.

    Raises:
        HubError: As for `fetch`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    def ask() -> None:
        if not isinstance(try_to_load_from_cache(repo, name, revision=revision), str):
            get_hf_file_metadata(hf_hub_url(repo, name, revision=revision))

    if not HF_HUB_OFFLINE:
        _answered(repo, name, revision, ask)


def _download(repo: str, name: str, revision: str | None) -> Path | None:
    """A file from the cache or the hub; None where neither has it."""
    from huggingface_hub import hf_hub_download

    path = _answered(repo, name, revision, lambda: hf_hub_download(repo, name, revision=revision))
    return None if path is None else Path(path)


def _answered(repo: str, name: str, revision: str | None, request: Callable[[], Any]) -> Any:
    """What a request to the hub's client gives; None where there is no such file. Its own log lines are left out."""
    from huggingface_hub import errors

    log = logging.getLogger("huggingface_hub.utils._http")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return request()
    except errors.EntryNotFoundError:
        return None
    except errors.GatedRepoError:
        message = "gated; accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        message = "no such model on the hub, or a private one (`hf auth login` or HF_TOKEN to log in)"
    except errors.RevisionNotFoundError:
        message = f"no revision {revision!r}"
    except errors.HFValidationError:
        message = "not a hub id; expected hf:ORG/NAME or hf:ORG/NAME@REVISION"
    except Exception as error:  # what the hub answered, a connection that broke off, a full disk
        message = f"{name} could not be fetched: {' '.join(str(error).split())}"
    finally:
        log.setLevel(level)
    raise HubError(f"hf:{repo}: {message}")
