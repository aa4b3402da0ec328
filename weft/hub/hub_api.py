"""The files that a hub has of a model, and requests to a hub, without a client library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import Struct

from weft.errors import ModelError

if TYPE_CHECKING:
    import httpx

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
GGUF_ID = re.compile(rf"({HUB_ID.pattern}):([A-Za-z0-9][A-Za-z0-9._-]*)")
"""A hub id with the GGUF file that is meant: its name, or its quantisation (org/name:Q4_K_M)."""
COMMIT = re.compile(r"[0-9a-f]{40}")
WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
DEFAULT_GGUF = "Q4_K_M"
"""The quantisation of a repository that has GGUF files alone, where none is named."""
_NOT_A_MODEL = re.compile(r"mmproj|imatrix|-\d{5}-of-\d{5}", re.IGNORECASE)
"""In the names of GGUF files that are no whole language model."""
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

    def look_up(self, hub_id: str, revision: str, *, with_code: bool, gguf: str = "") -> RemoteModel:
        """Return what the hub has of a model now; of one GGUF file of it where `gguf` names that. Raises ModelError."""

    def cached(self, hub_id: str, revision: str) -> Found | None:
        """Return where the hub's own clients have put the model on this machine."""


def wanted(hub_id: str, files: list[RemoteFile], *, with_code: bool, gguf: str = "") -> list[RemoteFile]:
    """Return the files that are wanted: configuration, tokenizer and safetensors, or one GGUF file; never pickles,
    nothing hidden, and nothing of subfolders, which hold other formats and variants of the same weights."""
    patterns = (*WANTED, CODE) if with_code else WANTED
    visible = [file for file in files if "/" not in file.name and not file.name.startswith(".")]
    chosen = [file for file in visible if any(fnmatch(file.name, pattern) for pattern in patterns)]
    if not gguf and any(file.name.endswith(".safetensors") for file in chosen):
        return chosen
    names = gguf_names(file.name for file in visible)
    name = gguf_named(names, gguf or DEFAULT_GGUF)
    if name is not None:
        return [file for file in visible if file.name == name]
    if names:
        kinds = ", ".join(quantisation_of(name) for name in names)
        raise ModelError(
            f"{hub_id} has no GGUF file {gguf or DEFAULT_GGUF}; it has {kinds}.",
            hint=f"Name one, as in {hub_id}:{quantisation_of(names[0])}.",
        )
    if gguf:
        raise ModelError(f"{hub_id} has no GGUF files in one part.", hint=f"Without :{gguf} its safetensors are taken.")
    raise ModelError(
        f"{hub_id} has neither safetensors weights nor a GGUF file in one part; Weft loads nothing else.",
        hint="Pickled weights (.bin, .pt) can run code, and are never loaded.",
    )


def gguf_names(names: Iterable[str]) -> list[str]:
    """Return the names of GGUF files that hold a whole language model, in order."""
    return sorted(name for name in names if name.endswith(".gguf") and not _NOT_A_MODEL.search(name))


def gguf_named(names: Sequence[str], wanted: str) -> str | None:
    """Return the GGUF file of that name, or of that quantisation; None: there is none."""
    if wanted in names:
        return wanted
    return next((name for name in names if quantisation_of(name).lower() == wanted.lower()), None)


def quantisation_of(name: str) -> str:
    """Return what a GGUF file's name ends with, as in Q4_K_M; the whole name where it does not tell."""
    return found[1] if (found := re.search(r"[-.]([A-Za-z]*\d\w*)\.gguf$", name)) else name


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
