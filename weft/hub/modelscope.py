"""Looks up models on ModelScope, and in the cache that its own clients keep on this machine."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from urllib.parse import quote, urlencode

from msgspec import Struct

from weft.errors import ModelError
from weft.hub.hub_api import Found, RemoteFile, RemoteModel, ask, body_of, wanted

ENDPOINT = "https://www.modelscope.cn"
DEFAULT_REVISION = "master"
VERSION_FILE = ".mv"
"""The file where older clients note what they fetched, as in `Revision:v1.0,CreatedAt:1700000000`."""


class _File(Struct):
    Path: str
    Size: int = 0
    Sha256: str = ""
    Type: str = "blob"


class _Files(Struct):
    Files: list[_File] | None = None


class _Answer(Struct):
    Data: _Files


def look_up(hub_id: str, revision: str, *, with_code: bool, gguf: str = "") -> RemoteModel:
    """Return the files of a branch or a tag. ModelScope tells no commit: the files' own digests stand for one."""
    address = f"{_endpoint()}/api/v1/models/{quote(hub_id)}/repo"
    at = {"Revision": revision or DEFAULT_REVISION}
    headers = _credentials()
    answer = ask(hub_id, f"{address}/files?{urlencode(at | {'Recursive': 'True'})}", headers)
    if answer.status_code in (401, 403, 404):
        raise ModelError(
            f"ModelScope has no model {hub_id!r} with the revision {at['Revision']!r}, or it is private.",
            hint="Check the name and the revision, or set MODELSCOPE_API_TOKEN.",
        )
    listed: _Answer = body_of(hub_id, answer, _Answer)
    files = [
        RemoteFile(file.Path, f"{address}?{urlencode(at | {'FilePath': file.Path})}", file.Size, file.Sha256)
        for file in listed.Data.Files or []
        if file.Type != "tree"
    ]
    chosen = wanted(hub_id, files, with_code=with_code, gguf=gguf)
    contents = sorted(
        f"{file.name} {file.size} {file.digest}" for file in wanted(hub_id, files, with_code=False, gguf=gguf)
    )
    commit = hashlib.sha256("\n".join(contents).encode()).hexdigest()[:40]
    return RemoteModel(hub_id=hub_id, commit=commit, files=chosen, headers=headers)


def cached(hub_id: str, revision: str) -> Found | None:
    """Return where ModelScope's own clients have put the model, and the revision as far as they noted it."""
    owner, name = hub_id.split("/")
    masked = name.replace(".", "___")
    base = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()
    snapshots = base / "models" / f"{owner}--{name}" / "snapshots"
    for found in (snapshots / revision,) if revision else (snapshots / DEFAULT_REVISION, *_newest_first(snapshots)):
        if found.is_dir() and found.parent == snapshots:
            return found, found.name
    # Its clients before 1.38 kept one version of a model, under a name without dots.
    for older in ("models", "hub/models", "hub", "."):
        found = base / older / owner / masked
        if found.is_dir() and (not revision or _noted(found) == revision):
            return found, _noted(found)
    return None


def _newest_first(snapshots: Path) -> list[Path]:
    return sorted(snapshots.glob("*/"), key=lambda path: path.stat().st_mtime, reverse=True)


def _noted(folder: Path) -> str:
    try:
        note = (folder / VERSION_FILE).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    return note.partition(",")[0].removeprefix("Revision:").strip()


def _endpoint() -> str:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or ENDPOINT
    return (endpoint if "://" in endpoint else f"https://{endpoint}").rstrip("/")


def _credentials() -> dict[str, str]:
    """Return the token in a header and in a cookie: the hub's addresses differ in which they take."""
    token = os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}
