"""Downloads the files of a model: several at a time, each resumed where a kill or a lost connection left it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.model_files import locks_folder
from weft.errors import ModelError
from weft.hub.hub_api import RemoteFile, RemoteModel
from weft.hub.progress import POLL_SECONDS, STALL_SECONDS, Progress, Report, file_sizes

if TYPE_CHECKING:
    import httpx


PARALLEL_FILES = 4
SILENCE_SECONDS = 30.0
"""Seconds without data after which a connection is made again."""
RETRY_SECONDS = 1.0
UNFINISHED = ".partial"


def missing_files(model: RemoteModel, folder: Path) -> list[RemoteFile]:
    """Return the files that are missing or not complete."""
    return [file for file in model.files if _size(folder / file.name) != file.size]


def download(model: RemoteModel, folder: Path, report: Report) -> None:
    """Download every missing file of the model into the folder. After a failure, the next call resumes."""
    files = missing_files(model, folder)
    if files:
        _Download(model, files, folder, report).run()


class _Download:
    def __init__(self, model: RemoteModel, files: list[RemoteFile], folder: Path, report: Report) -> None:
        self._model = model
        self._folder = folder
        self._report = report
        self._waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in files:
            self._waiting.put(file)
        self._whole = model.total_bytes - sum(file.size for file in files)
        self._arrived = {file.name: max(0, _size(folder / f"{file.name}{UNFINISHED}")) for file in files}
        """The largest size that each file has had: bytes that come a second time are no progress."""
        self._stop = threading.Event()
        self._trouble = ""
        """The last connection error."""
        self._ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        """The end of every worker: None, or the error that it failed with."""

    def run(self) -> None:
        import httpx

        num_workers = min(PARALLEL_FILES, len(self._arrived))
        headers = {**self._model.headers, "Accept-Encoding": "identity"}
        with httpx.Client(headers=headers, follow_redirects=True, timeout=SILENCE_SECONDS) as client:
            for number in range(num_workers):
                # Daemons: a program that ends does not wait for a download.
                threading.Thread(target=self._work, args=(client,), name=f"weft-download-{number}", daemon=True).start()
            try:
                self._watch(num_workers)
            finally:
                self._stop.set()

    def _watch(self, num_workers: int) -> None:
        """Wait until all workers have ended; raise the error that one of them failed with."""
        done, moved = -1, time.monotonic()
        while num_workers:
            try:
                failure = self._ends.get(timeout=POLL_SECONDS)
                num_workers -= 1
            except queue.Empty:
                failure = None
            if failure is not None:
                raise failure
            now = self._whole + sum(self._arrived.values())
            if now > done:
                done, moved = now, time.monotonic()
                self._report(Progress("download", done, self._model.total_bytes, self._model.hub_id))
            elif time.monotonic() - moved > STALL_SECONDS:
                raise ModelError(
                    f"The download of {self._model.hub_id} stalled: nothing came for {STALL_SECONDS:g} s"
                    f"{self._trouble and f' ({self._trouble})'}.",
                    hint="Run it again: it goes on from where it is.",
                )

    def _work(self, client: httpx.Client) -> None:
        failure = None
        try:
            for file in self._files():
                self._fetch(client, file)
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            failure = error
        self._ends.put(failure)

    def _files(self) -> Iterator[RemoteFile]:
        while not self._stop.is_set():
            try:
                yield self._waiting.get_nowait()
            except queue.Empty:
                return

    def _fetch(self, client: httpx.Client, file: RemoteFile) -> None:
        import httpx

        unfinished = self._folder / f"{file.name}{UNFINISHED}"
        while _size(unfinished) != file.size and not self._stop.is_set():
            try:
                self._take(client, file, unfinished)
                continue
            except httpx.TransportError as error:
                self._trouble = str(error) or type(error).__name__
            self._stop.wait(RETRY_SECONDS)
        if not self._stop.is_set():
            unfinished.replace(self._folder / file.name)

    def _take(self, client: httpx.Client, file: RemoteFile, unfinished: Path) -> None:
        """Download as much of a file as one connection brings. Raises httpx.TransportError where a retry may help."""
        import httpx

        have = max(_size(unfinished), 0)
        if have > file.size:
            unfinished.unlink()
            have = 0
        range_wanted = {"Range": f"bytes={have}-"} if have else {}
        with client.stream("GET", file.url, headers=range_wanted) as answer:
            if answer.status_code in (408, 429) or answer.status_code >= 500:
                raise httpx.RemoteProtocolError(f"the hub answers {answer.status_code}")
            if answer.status_code not in (200, 206):
                raise ModelError(
                    f"{self._model.hub_id}: {file.name} cannot be fetched: the hub answers {answer.status_code}."
                )
            is_rest = answer.status_code == 206
            if is_rest and not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                unfinished.unlink()
                raise httpx.RemoteProtocolError(f"the hub answers with another part of {file.name}")
            have = have if is_rest else 0
            with unfinished.open("ab" if is_rest else "wb") as out:
                for piece in answer.iter_bytes():
                    have += len(piece)
                    if have > file.size:
                        raise ModelError(
                            f"{self._model.hub_id}: {file.name} is larger than the {file.size} bytes announced."
                        )
                    out.write(piece)
                    self._arrived[file.name] = max(self._arrived[file.name], have)
                    if self._stop.is_set():
                        return
        if have < file.size:
            raise httpx.RemoteProtocolError(f"{file.name} ended after {have} of {file.size} bytes")


def _size(path: Path) -> int:
    """Return the size of a file; -1 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


READ_BYTES = 8 << 20


def damaged_files(folder: Path, digests: Mapping[str, str], report: Report, note: str) -> list[str]:
    """Return the files whose content has another digest, and those that are missing."""
    there = {name: digest for name, digest in digests.items() if (folder / name).is_file()}
    total = sum((folder / name).stat().st_size for name in there)
    done = 0

    def read(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        report(Progress("verify", done, total, note))

    report(Progress("verify", 0, total, note))
    wrong = [name for name, digest in there.items() if digest_of(folder / name, digest, read) != digest]
    return sorted([*wrong, *(digests.keys() - there.keys())])


def digest_of(path: Path, like: str, read: Callable[[int], None]) -> str:
    """Compute the digest of the same kind as `like`. `read` is called with the size of every piece."""
    try:
        with path.open("rb") as file:
            if len(like) == 64:
                digest = hashlib.sha256()
            else:
                digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                read(len(piece))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ModelError(
            f"{folder}: {needed_bytes / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free.",
            hint="Free some, or set WEFT_HOME to a folder on a larger disk.",
        )


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_tree(path: Path) -> int:
    """Remove a file, a link or a folder with all that is in it, and return the bytes of its files."""
    try:
        if path.is_symlink() or path.is_file():
            freed = 0 if path.is_symlink() else path.stat().st_size
            path.unlink()
            return freed
        freed = sum(file_sizes(path))
        shutil.rmtree(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be removed: {error.strerror}.") from error
    return freed


@contextmanager
def pull_lock(name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of `name`; `on_wait` is called once when another process has it.

    The kernel drops the lock when its process ends, however it ends, so the file itself may stay for ever.
    """
    folder = locks_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"{name}.lock").open("ab")
    except OSError as error:
        raise ModelError(
            f"{folder}: cannot be written: {error.strerror}.", hint="Set WEFT_HOME to a folder that can."
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
