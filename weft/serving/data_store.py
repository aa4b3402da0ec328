"""The files of clients, the records of their batches and their responses in the background, in one folder that outlives
the server.

A record is a small JSON file that is replaced as a whole; what has no record is not there, and is removed when the
store is opened. The results of a batch are appended line by line, and only whole lines count. Paths are made of ids
that this store has given, never of a client's words.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from weft.errors import InvalidRequest, WeftError
from weft.options import LimitOptions

log = logging.getLogger(__name__)

TTL_S = 30 * 24 * 3600
"""Files, and batches that have ended, are kept so long, unless a client wants a file to go earlier."""
MAX_RECORDS = 10_000
"""Of files, and of batches that have ended, for each tenant."""
RECORD_BYTES = 4096
"""A record takes at least so much of its tenant's quota, as it does of a disk."""
_ID = re.compile(r"[a-z]+[-_][0-9a-f]{32}")

T = TypeVar("T")
Record = TypeVar("Record", "FileRecord", "BatchRecord", "ResponseRecord")


class NoStore(WeftError):
    """There is no folder that files and batches could be kept in."""

    status = 501
    grpc_code = "UNIMPLEMENTED"
    kind = "no_data_dir"


class RecordNotFound(InvalidRequest):
    status = 404
    kind = "not_found"


class QuotaExceeded(InvalidRequest):
    status = 413
    kind = "quota_exceeded"


class Status(StrEnum):
    """The status of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self in (Status.COMPLETED, Status.FAILED, Status.CANCELLED, Status.EXPIRED)


class Outcome(StrEnum):
    """The end of a line of a batch."""

    SUCCEEDED = "succeeded"
    ERRORED = "errored"
    CANCELED = "canceled"
    EXPIRED = "expired"


class FileRecord(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    filename: str
    """The client's name for it, which is only shown."""
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class LineProblem(Struct, frozen=True, kw_only=True):
    """The reason why a batch was refused as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    interface: str
    """The name of the codec that made it, and that writes its results."""
    endpoint: str
    status: Status = Status.VALIDATING
    created_at: int
    expires_at: int
    """Lines that have no result by then get none."""
    times: dict[str, int] = {}
    """When it came into each status."""
    num_lines: int = 0
    counts: dict[str, int] = {}
    """Results so far, by outcome. The results themselves are the truth of a batch that has not ended."""
    input_file_id: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    output_ttl_s: int = TTL_S
    metadata: dict[str, str] = {}
    problems: list[LineProblem] = []

    def count(self, outcome: Outcome) -> int:
        return self.counts.get(outcome, 0)


class ResponseRecord(Struct, frozen=True):
    id: str
    owner: str
    created_at: int
    answer: Raw
    """JSON, as clients read it."""
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """The conversation up to and with the answer."""


class BatchLine(Struct, frozen=True):
    """A line of a batch's input."""

    custom_id: str
    body: Raw
    url: str = ""
    method: str = "POST"


class LineResult(Struct, frozen=True, kw_only=True):
    """A line of a batch's results, in the words of no interface."""

    custom_id: str
    outcome: Outcome
    status: int = 0
    """HTTP's; 0: it was not answered."""
    request_id: str = ""
    body: bytes = b"null"
    """JSON."""

    def encoded(self) -> bytes:
        """Return the result as a line. Its body is behind a tab, which JSON does not have, so that nothing needs to
        parse it."""
        head = msgspec.json.encode((self.custom_id, self.outcome, self.status, self.request_id))
        return head + b"\t" + self.body + b"\n"


def _decoded(line: bytes) -> LineResult:
    head, _, body = line[:-1].partition(b"\t")
    custom_id, outcome, status, request_id = _HEAD.decode(head)
    return LineResult(custom_id=custom_id, outcome=outcome, status=status, request_id=request_id, body=body)


_HEAD = msgspec.json.Decoder(tuple[str, Outcome, int, str])


class DataStore:
    """Records are in memory, and on disk before a change of them is told. All writing is done by one thread."""

    def __init__(self, folder: str, limits: LimitOptions, clock: Callable[[], float] = time.time) -> None:
        """`folder` may be absent, and is made when the first file or batch is; empty: nothing is kept."""
        self._folder = Path(folder) if folder else None
        self._limits = limits
        self.clock = clock
        self._executor = ThreadPoolExecutor(1, "weft-data")
        self._lock_file: BinaryIO | None = None
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, BatchRecord] = {}
        self._held: dict[str, int] = {}
        """Bytes of a batch's input and results."""
        self._used: Counter[str] = Counter()
        """Bytes by tenant."""

    @property
    def exists(self) -> bool:
        return self._folder is not None and self._folder.is_dir()

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do work on the disk in the store's own thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def open(self) -> None:
        """Read the records, once. Raises NoStore where the folder cannot be used, or another server uses it."""
        if self._lock_file is None:
            await self.do(self._open)

    def close(self) -> None:
        self._executor.shutdown()
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _open(self) -> None:
        if self._lock_file is not None:
            return
        if self._folder is None:
            raise NoStore("This server keeps no files and no batches.", hint="The operator's setting is --data-dir.")
        lock: BinaryIO | None = None
        try:
            for name in ("files", "batches", "responses"):
                (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self._folder / "lock").open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except OSError as error:
            if lock is not None:
                lock.close()
            why = "another server uses it" if isinstance(error, BlockingIOError) else error.strerror
            log.error("files and batches are off: %s: %s; --data-dir names another folder", self._folder, why)
            raise NoStore(
                "This server's folder for files and batches cannot be used; its log says why.",
                hint="The operator's setting is --data-dir.",
            ) from error
        self._lock_file = lock

    def _read(self) -> None:
        assert self._folder is not None
        for record in _records(self._folder / "files", FileRecord):
            if self._file_path(record.id).is_file():
                self._files[record.id] = record
                self._used[record.owner] += record.bytes + RECORD_BYTES
        for batch in _records(self._folder / "batches", BatchRecord):
            if batch.status.is_final:
                _unlink([self.input_path(batch.id)])
            self._batches[batch.id] = batch
            self._held[batch.id] = RECORD_BYTES + sum(
                path.stat().st_size
                for path in (self.input_path(batch.id), self.results_path(batch.id))
                if path.is_file()
            )
            self._used[batch.owner] += self._held[batch.id]
        for name, known in (("files", self._files.keys()), ("batches", self._batches.keys())):
            for path in (self._folder / name).iterdir():
                if path.name.partition(".")[0] not in known or path.suffix == ".part":
                    path.unlink()

    def _file_path(self, file_id: str) -> Path:
        assert self._folder is not None
        return self._folder / "files" / file_id

    def _batch_path(self, batch_id: str, end: str) -> Path:
        assert self._folder is not None
        return self._folder / "batches" / f"{batch_id}.{end}"

    def input_path(self, batch_id: str) -> Path:
        return self._batch_path(batch_id, "input")

    def results_path(self, batch_id: str) -> Path:
        return self._batch_path(batch_id, "results")

    # Files

    async def new_file(self, owner: str) -> NewFile:
        """Begin a file. Raises NoStore and QuotaExceeded."""
        await self.open()
        await self.drop_expired()
        if sum(record.owner == owner for record in self._files.values()) >= MAX_RECORDS:
            raise QuotaExceeded(f"There are {MAX_RECORDS} files of this key.", hint="Delete some.")
        file_id = new_id("file-")
        return NewFile(self, owner, file_id, self._file_path(file_id).with_suffix(".part"))

    async def keep_file(self, record: FileRecord, written: Path) -> FileRecord:
        """Keep what was written under the record's id, in the place of an older file of it."""

        def keep() -> None:
            written.replace(self._file_path(record.id))
            _write(self._file_path(record.id).with_suffix(".json"), msgspec.json.encode(record))

        await self.do(keep)
        self._forget_file(record.id)
        self._files[record.id] = record
        self._used[record.owner] += record.bytes + RECORD_BYTES
        return record

    def file(self, owner: str, file_id: str) -> FileRecord:
        record = self._files.get(file_id)
        if record is None or record.owner != owner or record.expires_at <= self.clock():
            raise RecordNotFound(f"There is no file {file_id!r:.100}.", param="file_id")
        return record

    def files(self, owner: str) -> list[FileRecord]:
        """Return the tenant's files, the oldest first."""
        now = self.clock()
        return [record for record in self._files.values() if record.owner == owner and record.expires_at > now]

    def path_of(self, record: FileRecord) -> Path:
        return self._file_path(record.id)

    async def write_output(self, batch: BatchRecord, file_id: str, filename: str, lines: Iterable[bytes]) -> str:
        """Write a file of a batch's results, whatever its tenant's quota is, and return its id; empty: no lines."""
        part = self._file_path(file_id).with_suffix(".part")

        def write() -> int:
            with part.open("wb") as file:
                file.writelines(lines)
                _sync(file)
                return file.tell()

        now, size = int(self.clock()), await asyncio.to_thread(write)
        if not size:
            await self.do(_unlink, [part])
            return ""
        record = FileRecord(
            id=file_id, owner=batch.owner, filename=filename, purpose="batch_output", bytes=size, created_at=now,
            expires_at=now + batch.output_ttl_s,
        )  # fmt: skip
        return (await self.keep_file(record, part)).id

    async def delete_file(self, owner: str, file_id: str) -> None:
        self.file(owner, file_id)
        await self._remove_file(file_id)

    async def _remove_file(self, file_id: str) -> None:
        self._forget_file(file_id)
        path = self._file_path(file_id)
        await self.do(_unlink, [path.with_suffix(".json"), path])

    def _forget_file(self, file_id: str) -> None:
        if (record := self._files.pop(file_id, None)) is not None:
            self._used[record.owner] -= record.bytes + RECORD_BYTES

    # Batches

    async def add_batch(self, record: BatchRecord, source: FileRecord | Iterable[bytes]) -> None:
        """Keep a new batch, with the lines of a file or these. Raises NoStore and QuotaExceeded."""
        await self.open()
        await self.drop_expired()
        most = self._limits.max_batches_per_key
        if sum(batch.owner == record.owner and not batch.status.is_final for batch in self._batches.values()) >= most:
            raise QuotaExceeded(
                f"{most} batches of this key have not ended.", hint="The operator's setting is --max-batches-per-key."
            )
        path = self.input_path(record.id)

        def write() -> int:
            if isinstance(source, FileRecord):
                # The client may delete the file meanwhile.
                os.link(self._file_path(source.id), path)
            else:
                with path.open("wb") as file:
                    file.writelines(source)
                    _sync(file)
            _write(self._batch_path(record.id, "json"), msgspec.json.encode(record))
            return path.stat().st_size

        size = await self.do(write)
        self._batches[record.id] = record
        self.hold(record, size + RECORD_BYTES)

    def batch(self, owner: str, batch_id: str, interface: str) -> BatchRecord:
        record = self._batches.get(batch_id)
        if record is None or (record.owner, record.interface) != (owner, interface):
            raise RecordNotFound(f"There is no batch {batch_id!r:.100}.", param="batch_id")
        return record

    def batches(self, owner: str, interface: str) -> list[BatchRecord]:
        """Return the tenant's batches that one interface has made, the oldest first."""
        return [record for record in self._batches.values() if record.owner == owner and record.interface == interface]

    def unfinished(self) -> list[BatchRecord]:
        return [record for record in self._batches.values() if not record.status.is_final]

    def counted(self, record: BatchRecord) -> BatchRecord:
        """Take note of a batch's new counts, in memory alone."""
        self._batches[record.id] = record
        return record

    async def update(self, record: BatchRecord, status: Status) -> BatchRecord:
        """Put a batch into a status, and return when that is on disk."""
        record = self.counted(replace(record, status=status, times=record.times | {status: int(self.clock())}))
        await self.do(_write, self._batch_path(record.id, "json"), msgspec.json.encode(record))
        return record

    def hold(self, record: BatchRecord, num_bytes: int) -> None:
        """Count bytes that a batch takes on disk, or with a negative number gives back; none of one that is deleted."""
        if record.id in self._batches:
            self._held[record.id] = self._held.get(record.id, 0) + num_bytes
            self._used[record.owner] += num_bytes

    async def drop_input(self, record: BatchRecord) -> None:
        """Remove the lines of a batch that needs them no more."""
        self.hold(record, -await self.do(_unlink, [self.input_path(record.id)]))

    async def drop_results(self, record: BatchRecord) -> None:
        self.hold(record, -await self.do(_unlink, [self.results_path(record.id)]))

    async def delete_batch(self, record: BatchRecord) -> None:
        self._batches.pop(record.id, None)
        self._used[record.owner] -= self._held.pop(record.id, 0)
        await self.do(_unlink, [self._batch_path(record.id, end) for end in ("json", "input", "results")])

    # Responses

    def _response_path(self, response_id: str) -> Path:
        assert self._folder is not None
        return self._folder / "responses" / f"{response_id}.json"

    async def keep_response(self, record: ResponseRecord) -> None:
        """Keep a response in the place of what has its id, and return when it is on disk. Raises NoStore."""
        await self.open()
        await self.do(lambda: _write(self._response_path(record.id), msgspec.json.encode(record)))

    async def responses(self) -> list[ResponseRecord]:
        """Return the responses of an open store, the oldest first."""
        assert self._folder is not None
        return await self.do(_records, self._folder / "responses", ResponseRecord)

    def drop_response(self, response_id: str) -> None:
        """Remove a response, behind all that is being written."""
        if self._lock_file is not None:
            self._executor.submit(_unlink, [self._response_path(response_id)])

    # Quotas, and what is over

    def reserve(self, owner: str, num_bytes: int) -> None:
        """Count bytes that a tenant is about to write, or with a negative number gives back. Raises QuotaExceeded."""
        self.check_quota(owner, num_bytes)
        self._used[owner] += num_bytes

    def check_quota(self, owner: str, num_bytes: int = 1) -> None:
        """Raise QuotaExceeded where so many more bytes of a tenant's are too many."""
        limit_mb = self._limits.max_data_mb_per_key
        if num_bytes > 0 and self._used[owner] + num_bytes > limit_mb << 20:
            raise QuotaExceeded(
                f"The files and batches of this key would take more than {limit_mb} MiB.",
                hint="Delete some; the operator's setting is --max-data-mb-per-key.",
            )

    async def drop_expired(self) -> None:
        """Remove files whose time has come, and batches that ended long ago or are too many."""
        now = self.clock()
        for record in [record for record in self._files.values() if record.expires_at <= now]:
            await self._remove_file(record.id)
        ended = [batch for batch in self._batches.values() if batch.status.is_final]
        num_ended = Counter(batch.owner for batch in ended)
        for batch in ended:
            if batch.created_at + TTL_S <= now or num_ended[batch.owner] > MAX_RECORDS:
                num_ended[batch.owner] -= 1
                await self.delete_batch(batch)


class NewFile:
    """A file that is being written. Without `keep` nothing of it stays."""

    def __init__(self, store: DataStore, owner: str, file_id: str, path: Path) -> None:
        self._store = store
        self._owner = owner
        self._id = file_id
        self._path = path
        self._file: BinaryIO | None = None
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Append a piece. Raises QuotaExceeded."""
        self._store.reserve(self._owner, len(data))
        self.num_bytes += len(data)
        await self._store.do(self._write, data)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(data)

    async def keep(self, filename: str, purpose: str, ttl_s: int) -> FileRecord:
        await self.write(b"")
        if self._file is not None:
            await self._store.do(_sync, self._file)
        now = int(self._store.clock())
        record = FileRecord(
            id=self._id, owner=self._owner, filename=filename, purpose=purpose, bytes=self.num_bytes, created_at=now,
            expires_at=now + ttl_s,
        )  # fmt: skip
        return await self._store.keep_file(record, self._path)

    async def close(self) -> None:
        """Remove what was not kept, and give back what was reserved for it."""
        self._store.reserve(self._owner, -self.num_bytes)
        if self._file is not None:
            await self._store.do(self._file.close)
            await self._store.do(_unlink, [self._path])


class Results:
    """The results of one batch on disk: whole lines are read, and new ones are put behind them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        self.outcomes: dict[str, Outcome] = {}
        """By custom id."""
        end = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            result = _decoded(line)
            self.outcomes[result.custom_id] = result.outcome
            end += len(line)
        # The server may have been killed in the middle of a line.
        self._file.truncate(end)

    def append(self, result: LineResult) -> int:
        """Write a result, and return its bytes."""
        line = result.encoded()
        self._file.write(line)
        self._file.flush()
        self.outcomes[result.custom_id] = result.outcome
        return len(line)

    def sync(self) -> None:
        _sync(self._file)

    def close(self) -> None:
        self._file.close()


def read_results(path: Path) -> Iterator[LineResult]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            yield _decoded(line)


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def _records(folder: Path, kind: type[Record]) -> list[Record]:
    """Read the records of a folder, the oldest first."""
    found: list[Record] = []
    for path in folder.glob("*.json"):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.DecodeError as error:
            log.error("%s is no record, and is removed: %s", path, error)
            continue
        if _ID.fullmatch(record.id) and path.stem == record.id:
            found.append(record)
    return sorted(found, key=lambda record: (record.created_at, record.id))


def _write(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that a crash leaves the old one or the new."""
    part = path.with_suffix(".json.part")
    with part.open("wb") as file:
        file.write(data)
        _sync(file)
    part.replace(path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unlink(paths: Iterable[Path]) -> int:
    """Remove files, and return the bytes that they had."""
    num_bytes = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
            path.unlink()
    return num_bytes
