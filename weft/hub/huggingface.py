"""Looks up models on the Hugging Face hub, and in the cache that its own clients keep on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct

from weft.errors import ModelError
from weft.hub.hub_api import COMMIT, Found, RemoteFile, RemoteModel, ask, body_of, unreachable, wanted

ENDPOINT = "https://huggingface.co"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN."


class _Lfs(Struct):
    sha256: str


class _File(Struct):
    rfilename: str
    size: int = 0
    blobId: str = ""
    lfs: _Lfs | None = None


class _Info(Struct):
    sha: str
    siblings: list[_File]


def look_up(hub_id: str, revision: str, *, with_code: bool, gguf: str = "") -> RemoteModel:
    """Return the files of the newest commit of a revision; the empty revision is the default branch."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise unreachable(hub_id, "HF_HUB_OFFLINE is set")
    endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    headers = {"Authorization": f"Bearer {token}"} if (token := _token()) else {}
    at = f"/revision/{quote(revision, safe='')}" if revision else ""
    answer = ask(hub_id, f"{endpoint}/api/models/{hub_id}{at}?blobs=true", headers)
    code = answer.headers.get("X-Error-Code", "")
    if code == "GatedRepo" or answer.status_code == 403:
        raise ModelError(f"{hub_id} is gated: its owner must grant you access.", hint=f"Then {LOG_IN}")
    if code == "RevisionNotFound":
        raise ModelError(f"{hub_id} has no revision {revision!r}.", hint="Give a branch, a tag or a commit.")
    # The hub answers 401 for a model that the token may not see.
    if code == "RepoNotFound" or answer.status_code in (401, 404):
        raise ModelError(f"The hub has no model {hub_id!r}, or it is private.", hint=f"Check the name, or {LOG_IN}")
    info: _Info = body_of(hub_id, answer, _Info)
    if not COMMIT.fullmatch(info.sha):
        raise ModelError(f"{hub_id}: the hub gave no commit for the revision {revision or 'main'!r}.")
    files = [
        RemoteFile(
            file.rfilename,
            f"{endpoint}/{hub_id}/resolve/{info.sha}/{quote(file.rfilename)}",
            file.size,
            file.lfs.sha256 if file.lfs is not None else file.blobId,
        )
        for file in info.siblings
    ]
    return RemoteModel(
        hub_id=hub_id, commit=info.sha, files=wanted(hub_id, files, with_code=with_code, gguf=gguf), headers=headers
    )


def cached(hub_id: str, revision: str) -> Found | None:
    """Return where the hub's own clients have put the model, and its commit: models--org--name/snapshots/<commit>."""
    repository = _cache() / f"models--{hub_id.replace('/', '--')}"
    commit = revision
    if not COMMIT.fullmatch(revision):
        reference = repository / "refs" / (revision or "main")
        if ".." in reference.parts or not reference.is_file():
            return None
        commit = reference.read_text().strip()
    folder = repository / "snapshots" / commit
    return (folder, commit) if COMMIT.fullmatch(commit) and folder.is_dir() else None


def cached_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a model in that cache, where a file is a link to one that is called by its digest."""
    names = {path.name: path.resolve().name for path in folder.iterdir() if path.is_symlink()}
    return {name: digest for name, digest in names.items() if len(digest) in (40, 64)}


def _home() -> Path:
    chosen = os.environ.get("HF_HOME", "")
    if chosen:
        return Path(os.path.expandvars(chosen)).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"


def _cache() -> Path:
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(chosen)).expanduser() if chosen else _home() / "hub"


def _token() -> str:
    """Return the token as the hub's own clients find it: in the environment, or where `hf auth login` left it."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        return token.strip()
    try:
        return Path(os.environ.get("HF_TOKEN_PATH") or _home() / "token").expanduser().read_text().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"The token of the Hugging Face hub cannot be read: {error}.") from error
