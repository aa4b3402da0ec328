"""The runner of batches: it answers their lines one by one, at the lowest priority, and goes on after a restart.

It knows no interface: a line is a body for an endpoint, and its result is an answer or an error. A line is done when
its result is on disk, and never again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import BinaryIO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from weft import logs
from weft.errors import Overloaded, Unavailable
from weft.options import Config
from weft.serving.data_store import (
    BatchLine,
    BatchRecord,
    DataStore,
    LineProblem,
    LineResult,
    Outcome,
    Results,
    Status,
    new_id,
)

log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
"""A line that the server has no capacity for is tried again after so long at the latest."""
MAX_CUSTOM_ID_CHARS = 512
MAX_PROBLEMS = 20
"""As many wrong lines are told of."""


class LineAnswer(Struct, frozen=True):
    status: int
    body: bytes
    """JSON."""


Answer = Callable[[str, bytes], Awaitable[LineAnswer]]
"""Answers a body that is sent to an endpoint, in the name of the task's tenant. Raises Overloaded or Unavailable where
it is to be tried again later."""
CheckLine = Callable[[bytes], None]
"""Raises InvalidRequest for JSON that would take long to parse."""
Finish = Callable[[BatchRecord], Awaitable[BatchRecord]]
"""Makes of a batch's results what its interface shows of them. It may be called again after a crash."""


class BatchRunner:
    def __init__(
        self, store: DataStore, config: Config, check: CheckLine, answer: Answer, finish: Mapping[str, Finish]
    ) -> None:
        self._store = store
        self._check_line = check
        self._config = config
        self._answer = answer
        self._finish = finish
        self._concurrency = config.server.batch_concurrency
        self._capacity = asyncio.Semaphore(self._concurrency)
        """First come, first served: batches at the same time take turns."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lines: dict[str, asyncio.Task[None]] = {}
        """The part of a running batch that a client may cancel."""

    def start(self, record: BatchRecord) -> None:
        """Run a batch to its end, from wherever it stands."""
        task = asyncio.create_task(self._run(record), name=f"batch {record.id}")
        self._running[record.id] = task
        task.add_done_callback(lambda _: self._running.pop(record.id, None))

    def resume(self) -> None:
        """Go on with every batch that has not ended."""
        for record in self._store.unfinished():
            self.start(record)

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """Let a batch end with the results that it has; one that is ending, or has ended, is left alone."""
        if record.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            return record
        record = await self._store.update(record, Status.CANCELLING)
        if (lines := self._lines.get(record.id)) is not None:
            lines.cancel()
        return record

    async def stop(self) -> None:
        """Leave all batches as they are."""
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, record: BatchRecord) -> None:
        logs.tenant.set(record.owner)
        try:
            if record.status is Status.VALIDATING:
                record = await self._checked(record)
            if not record.status.is_final:
                await self._complete(record)
        except Exception:
            log.exception("the batch %s failed", record.id)
            problem = LineProblem(code="server_error", message="The server failed; its log says how.")
            await self._end(replace(self._current(record), problems=[problem]), Status.FAILED)

    def _current(self, record: BatchRecord) -> BatchRecord:
        """Return the record as it is now: a client may have cancelled the batch meanwhile."""
        return self._store.batch(record.owner, record.id, record.interface)

    async def _checked(self, record: BatchRecord) -> BatchRecord:
        """Look at every line before the first is run."""
        num_lines, problems = await asyncio.to_thread(self._check, record)
        record = replace(self._current(record), num_lines=num_lines, problems=problems)
        if problems:
            return await self._end(record, Status.FAILED)
        if record.status is Status.CANCELLING:
            return self._store.counted(record)
        return await self._store.update(record, Status.IN_PROGRESS)

    def _check(self, record: BatchRecord) -> tuple[int, list[LineProblem]]:
        limit = self._config.server.max_body_mb << 20
        with self._store.input_path(record.id).open("rb") as file:
            most = self._config.limits.max_batch_lines
            return check_lines(_lines(file, limit), record.endpoint, limit, most, self._check_line)

    async def _complete(self, record: BatchRecord) -> None:
        results = await asyncio.to_thread(Results, self._store.results_path(record.id))
        try:
            counts = dict(Counter(results.outcomes.values()))
            record = self._store.counted(replace(self._current(record), counts=counts))
            if record.status is Status.IN_PROGRESS:
                await self._until_end(record, results)
            record = self._current(record)
            if len(results.outcomes) < record.num_lines:
                is_cancelled = record.status is Status.CANCELLING
                await self._mark(record, results, Outcome.CANCELED if is_cancelled else Outcome.EXPIRED)
            await asyncio.to_thread(results.sync)
        finally:
            await asyncio.to_thread(results.close)
        record = self._current(record)
        final = _final_status(record)
        if record.status is not Status.CANCELLING:
            record = await self._store.update(record, Status.FINALIZING)
        await self._end(await self._finish[record.interface](record), final)

    async def _end(self, record: BatchRecord, status: Status) -> BatchRecord:
        record = await self._store.update(record, status)
        await self._store.drop_input(record)
        if record.output_file_id or record.error_file_id:
            await self._store.drop_results(record)
        log.info("the batch %s ended as %s: %s", record.id, status, record.counts)
        return record

    async def _until_end(self, record: BatchRecord, results: Results) -> None:
        """Run the lines until all are done, the batch is cancelled, or its time is over."""
        work = asyncio.create_task(self._run_lines(record, results), name=f"batch {record.id}")
        self._lines[record.id] = work
        try:
            await asyncio.wait({work}, timeout=max(0.0, record.expires_at - self._store.clock()))
        finally:
            del self._lines[record.id]
            work.cancel()
            await asyncio.wait({work})
        if not work.cancelled():
            work.result()

    async def _run_lines(self, record: BatchRecord, results: Results) -> None:
        taking = asyncio.Lock()
        with self._store.input_path(record.id).open("rb") as file:
            lines = self._pending(file, results)

            async def take() -> None:
                while True:
                    async with taking:
                        line = await asyncio.to_thread(next, lines, None)
                    if line is None:
                        return
                    await self._put(record, results, await self._result(record, line))

            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._concurrency, record.num_lines)):
                    group.create_task(take())

    def _pending(self, file: BinaryIO, results: Results) -> Iterator[BatchLine]:
        """Yield the lines that have no result."""
        for text in _lines(file, self._config.server.max_body_mb << 20):
            line = msgspec.json.decode(text, type=BatchLine)
            if line.custom_id not in results.outcomes:
                yield line

    async def _result(self, record: BatchRecord, line: BatchLine) -> LineResult:
        request_id = new_id("batch_req_")
        logs.request_id.set(request_id)
        while True:
            try:
                async with self._capacity:
                    answer = await self._answer(record.endpoint, bytes(line.body))
            except (Overloaded, Unavailable) as busy:
                await asyncio.sleep(min(max(1.0, busy.retry_after_s), MAX_WAIT_S))
                continue
            return LineResult(
                custom_id=line.custom_id,
                outcome=Outcome.SUCCEEDED if answer.status < 400 else Outcome.ERRORED,
                status=answer.status,
                request_id=request_id,
                body=answer.body,
            )

    async def _put(self, record: BatchRecord, results: Results, result: LineResult) -> None:
        # Once it is begun it is done, also where the batch is cancelled meanwhile: half a line is none.
        writing = asyncio.ensure_future(self._store.do(results.append, result))
        self._store.hold(record, await _unbroken(writing))
        current = self._current(record)
        counts = current.counts | {result.outcome: current.count(result.outcome) + 1}
        self._store.counted(replace(current, counts=counts))

    async def _mark(self, record: BatchRecord, results: Results, outcome: Outcome) -> None:
        """Give every line that has no result this one."""

        def mark() -> int:
            with self._store.input_path(record.id).open("rb") as file:
                return sum(
                    results.append(LineResult(custom_id=line.custom_id, outcome=outcome))
                    for line in self._pending(file, results)
                )

        self._store.hold(record, await asyncio.to_thread(mark))
        self._store.counted(replace(self._current(record), counts=dict(Counter(results.outcomes.values()))))


async def _unbroken(work: asyncio.Future[int]) -> int:
    """Wait for work that is not cancelled with the one that waits."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


def _final_status(record: BatchRecord) -> Status:
    if record.status is Status.CANCELLING:
        return Status.CANCELLED
    return Status.EXPIRED if record.count(Outcome.EXPIRED) else Status.COMPLETED


def _lines(file: BinaryIO, limit_bytes: int) -> Iterator[bytes]:
    """Yield the lines that are not empty; no more of one than is needed to see that it is too long."""
    while text := file.readline(limit_bytes + 2):
        if text.strip():
            yield text


def check_lines(
    lines: Iterable[bytes], endpoint: str, max_line_bytes: int, max_lines: int, check: CheckLine
) -> tuple[int, list[LineProblem]]:
    """Return how many lines there are, and what is wrong with them. A line's body is looked at when it is run."""
    seen: set[str] = set()
    problems: list[LineProblem] = []
    number = 0
    for number, text in enumerate(lines, 1):
        if number > max_lines:
            message = f"The batch has more than {max_lines} lines (--max-batch-lines)."
            problems.append(LineProblem(code="too_many_lines", message=message, line=number))
            break
        if len(text.rstrip(b"\r\n")) > max_line_bytes:
            message = f"The line is longer than {max_line_bytes >> 20} MiB (--max-body-mb)."
            problems.append(LineProblem(code="line_too_long", message=message, line=number))
            break
        problem = _problem(text, endpoint, seen, number, check)
        if problem is not None:
            problems.append(problem)
        if len(problems) == MAX_PROBLEMS:
            break
    if not number:
        problems.append(LineProblem(code="empty_file", message="The batch has no lines."))
    return number, problems


def _problem(text: bytes, endpoint: str, seen: set[str], number: int, check: CheckLine) -> LineProblem | None:
    try:
        check(text)
        line = msgspec.json.decode(text, type=BatchLine)
    except (ValueError, RecursionError) as error:
        message = f"The line is not a JSON object with custom_id, method, url and body: {error}."
        return LineProblem(code="invalid_json_line", message=message[:500], line=number)
    for code, param, is_wrong, message in (
        ("invalid_custom_id", "custom_id", not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARS,
         f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters."),
        ("duplicate_custom_id", "custom_id", line.custom_id in seen,
         f"The custom_id {line.custom_id!r:.100} is there twice."),
        ("invalid_method", "method", line.method != "POST", f"method is {line.method!r:.100}; it must be POST."),
        ("invalid_url", "url", line.url != endpoint, f"url is {line.url!r:.100}; the batch's endpoint is {endpoint}."),
        ("invalid_body", "body", not bytes(line.body).lstrip().startswith(b"{"), "body must be an object."),
    ):  # fmt: skip
        if is_wrong:
            return LineProblem(code=code, message=message, line=number, param=param)
    seen.add(line.custom_id)
    return None
