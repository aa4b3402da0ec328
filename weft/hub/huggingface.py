"""Pulling a hub model ("org/name") at one commit: configuration, tokenizer and safetensors, never code or pickles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from weft.errors import ModelError
from weft.hub.directory import model_at
from weft.hub.disk import check_space
from weft.hub.files import ModelFiles, partial_folder, snapshots_folder
from weft.hub.lock import pull_lock
from weft.hub.progress import PullProgress, file_sizes

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
REFUSED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.py", "*.pkl", "*/*"]
"""Subfolders hold other formats and variants of the same weights."""
TIMEOUT_SECONDS = 5.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


class RemoteModel(Struct, frozen=True):
    commit: str
    total_bytes: int


def find_snapshot(hub_id: str, revision: str) -> ModelFiles | None:
    """The model at the commit that the revision stood for when it was pulled; None when it is not here."""
    commit = revision if _COMMIT.fullmatch(revision) else _pins(hub_id).get(revision, "")
    folder = _folder(hub_id) / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    return model_at(folder, name=hub_id, revision=commit)


def list_snapshots() -> list[tuple[str, str]]:
    """Every hub id and commit on this machine."""
    folders = sorted(snapshots_folder().glob("*--*/*/"))
    return [(path.parent.name.replace("--", "/", 1), path.name) for path in folders if _COMMIT.fullmatch(path.name)]


def pull_snapshot(hub_id: str, revision: str, *, progress: bool) -> ModelFiles:
    """Resolve the revision to a commit, download it, check that it is complete, and pin the revision to it."""
    bars = PullProgress(shown=progress)
    remote = _look_up(hub_id, revision)
    final = _folder(hub_id) / remote.commit
    with pull_lock(final.parent.name, lambda: bars.say(f"Another process is pulling {hub_id}; waiting for it.")):
        if not final.is_dir():
            _download(hub_id, remote, final, bars)
        _write_pins(hub_id, {**_pins(hub_id), revision: remote.commit})
    return model_at(final, name=hub_id, revision=remote.commit)


def _folder(hub_id: str) -> Path:
    return snapshots_folder() / hub_id.replace("/", "--")


def _pins(hub_id: str) -> dict[str, str]:
    """The commit of every revision that was pulled; the empty one is the newest of its day."""
    try:
        return msgspec.json.decode((_folder(hub_id) / "pins.json").read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_pins(hub_id: str, pins: dict[str, str]) -> None:
    fresh = _folder(hub_id) / "pins.json.partial"
    fresh.write_bytes(msgspec.json.encode(pins))
    fresh.replace(_folder(hub_id) / "pins.json")


def _look_up(hub_id: str, revision: str) -> RemoteModel:
    hub = _library(hub_id)
    with _explained(hub, hub_id, revision):
        info = hub.HfApi().model_info(hub_id, revision=revision or None, timeout=TIMEOUT_SECONDS, files_metadata=True)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise ModelError(f"{hub_id}: the hub gave no commit for the revision {revision or 'main'!r}.")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = {name: size for name, size in sizes.items() if _is_wanted(name)}
    if not any(name.endswith(".safetensors") for name in wanted):
        raise ModelError(
            f"{hub_id} has no safetensors weights; Weft loads safetensors and GGUF only.",
            hint="For a GGUF file: download it and give its path.",
        )
    return RemoteModel(info.sha, sum(wanted.values()))


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WANTED) and not any(fnmatch(name, p) for p in REFUSED)


def _download(hub_id: str, remote: RemoteModel, final: Path, bars: PullProgress) -> None:
    """Download into the partial folder, where the hub's client resumes what a kill left behind, and move it whole."""
    hub = _library(hub_id)
    partial = partial_folder() / final.parent.name / remote.commit
    try:
        partial.mkdir(parents=True, exist_ok=True)
        check_space(partial, remote.total_bytes)
        with (
            _explained(hub, hub_id, remote.commit),
            _silent(hub),
            bars.watch(f"Downloading {hub_id}", lambda: sum(file_sizes(partial)), remote.total_bytes),
        ):
            hub.snapshot_download(
                hub_id,
                revision=remote.commit,
                local_dir=partial,
                allow_patterns=WANTED,
                ignore_patterns=REFUSED,
                etag_timeout=TIMEOUT_SECONDS,
            )
        model_at(partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(final)
    except OSError as error:
        raise ModelError(f"{hub_id} cannot be pulled: {error}.", hint="WEFT_HOME moves the models.") from error


def _library(hub_id: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise ModelError(
            f"{hub_id} is a hub id, and huggingface_hub is not installed.",
            hint="Run `pip install 'weft[hub]'`, or give the path of a model directory or GGUF file.",
        ) from error
    return huggingface_hub


@contextmanager
def _silent(hub: Any) -> Iterator[None]:
    """Weft shows one bar of its own."""
    were_off = hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            hub.utils.enable_progress_bars()


@contextmanager
def _explained(hub: Any, hub_id: str, revision: str) -> Iterator[None]:
    """The client library's errors, as one line each. The order matters: a gated repository is also a missing one."""
    errors = hub.errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: its owner must grant you access.", hint="Then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {hub_id!r}, or it is private.",
            hint="Check the name, or log in with `hf auth login`.",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{hub_id} has no revision {revision!r}.", hint="Give a branch, a tag or a commit.") from error
    except (errors.HTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160].rstrip(".")
        raise ModelError(
            f"{hub_id} is not on this machine and cannot be fetched from the hub: {reason}.",
            hint="Check the network, or give the path of a model directory or GGUF file.",
        ) from error
