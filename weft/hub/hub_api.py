"""The files that a hub has of a model, and requests to a hub, without a client library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from weft.errors import ModelError

if TYPE_CHECKING:
    import httpx

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
CODE = "*.py"
"""Files that only vLLM runs, and only with --trust-remote-code."""
TIMEOUT_SECONDS = 10.0
"""The timeout of an API call; a file may take longer."""
OWN_FILES = "Check the network, or give the path of a model directory or GGUF file."


class RemoteFile(Struct, frozen=True):
    name: str
    url: str
    size: int
    digest: str
    """The digest as the hub writes it (see `digest_of`); empty when the hub tells none."""


class RemoteModel(Struct, frozen=True, kw_only=True):
    hub_id: str
    commit: str
    """40 hexadecimal digits that stand for these very files."""
    files: list[RemoteFile]
    headers: dict[str, str]
    """Headers of every request for a file: credentials."""

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


Found = tuple[Path, str]
"""A folder, and the commit that is in it."""


class Hub(Protocol):
    """The interface of a hub's module."""

    def look_up(self, hub_id: str, revision: str, *, with_code: bool) -> RemoteModel:
        """Return what the hub has of a model now. Raises ModelError."""

    def cached(self, hub_id: str, revision: str) -> Found | None:
        """Return where the hub's own clients have put the model on this machine."""


def wanted(hub_id: str, files: list[RemoteFile], *, with_code: bool) -> list[RemoteFile]:
    """Return whether a file is wanted: configuration, tokenizer and safetensors; never pickles, nothing hidden, and
    nothing of subfolders, which hold other formats and variants of the same weights."""
    patterns = (*WANTED, CODE) if with_code else WANTED
    chosen = [
        file
        for file in files
        if "/" not in file.name and not file.name.startswith(".") and any(fnmatch(file.name, p) for p in patterns)
    ]
    if not any(file.name.endswith(".safetensors") for file in chosen):
        raise ModelError(
            f"{hub_id} has no safetensors weights; Weft loads safetensors and GGUF only.",
            hint="For a GGUF file: download it and give its path.",
        )
    return chosen


def ask(hub_id: str, url: str, headers: Mapping[str, str]) -> httpx.Response:
    """Send a request and return the hub's answer, whatever its status. Raises ModelError where there is none."""
    import httpx

    try:
        return httpx.get(url, headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(hub_id, str(error) or type(error).__name__) from error


def body_of(hub_id: str, answer: httpx.Response, form: type[Any]) -> Any:
    """Return the body of a good answer. Raises ModelError for any other."""
    if answer.status_code != 200:
        raise unreachable(hub_id, f"it answers {answer.status_code}")
    try:
        return msgspec.json.decode(answer.content, type=form)
    except msgspec.DecodeError as error:
        raise ModelError(f"{hub_id}: what the hub answers is not understood: {error}.") from error


def unreachable(hub_id: str, reason: str) -> ModelError:
    line = (reason.splitlines() or [""])[0][:160].rstrip(".")
    return ModelError(
        f"{hub_id} is not on this machine and cannot be fetched from the hub: {line}.",
        hint=OWN_FILES,
    )
