"""The store of files and batches: what a crash leaves, what time takes away, and batches that go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import virtual_time
from tests.waiting import until
from weft.config import load
from weft.errors import Unavailable
from weft.serving.batch_runner import BatchRunner, LineAnswer
from weft.serving.data_store import (
    TTL_S,
    BatchRecord,
    DataStore,
    FileRecord,
    LineResult,
    NoStore,
    Outcome,
    Results,
    Status,
    new_id,
    read_results,
)

CONFIG = load({"batch_concurrency": 2}, env={})


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, clock: Clock | None = None) -> DataStore:
    return DataStore(str(folder), CONFIG.limits, clock or Clock())


async def kept_file(store: DataStore, content: bytes, ttl_s: int = TTL_S) -> FileRecord:
    new = await store.new_file("me")
    try:
        await new.write(content)
        return await new.keep("name", "batch", ttl_s)
    finally:
        await new.close()


def line(custom_id: str) -> bytes:
    return (
        json.dumps({"custom_id": custom_id, "method": "POST", "url": "/x", "body": {"is": custom_id}}).encode() + b"\n"
    )


def batch(**fields: Any) -> BatchRecord:
    values = {"created_at": 1000, "expires_at": 10_000, "owner": "me", "interface": "plain", "endpoint": "/x"} | fields
    return BatchRecord(id=new_id("batch_"), **values)


class Server:
    """A runner over a folder, whose lines are answered by a function."""

    def __init__(self, folder: Path, answer: Callable[[str], Any], clock: Clock | None = None) -> None:
        self.store = opened(folder, clock)
        self.asked: list[str] = []
        self._reply = answer
        self.runner = BatchRunner(self.store, CONFIG, lambda _: None, self._answer, {"plain": self._finish})

    async def _answer(self, endpoint: str, body: bytes) -> LineAnswer:
        name = json.loads(body)["is"]
        self.asked.append(name)
        await self._reply(name)
        return LineAnswer(200, body)

    async def _finish(self, record: BatchRecord) -> BatchRecord:
        return record

    async def stop(self) -> None:
        await self.runner.stop()
        self.store.close()

    def record(self) -> BatchRecord:
        [record] = self.store.batches("me", "plain")
        return record

    def results(self) -> list[LineResult]:
        return [*read_results(self.store.results_path(self.record().id))]


async def at_once(name: str) -> None:
    pass


def test_only_what_was_kept_is_there_after_a_crash(tmp_path: Path) -> None:
    async def go() -> None:
        store = opened(tmp_path)
        kept = await kept_file(store, b"abc")
        store.close()
        (tmp_path / "files" / f"{new_id('file-')}.part").write_bytes(b"half")
        (tmp_path / "files" / new_id("file-")).write_bytes(b"without a record")
        (tmp_path / "files" / f"{new_id('file-')}.json").write_bytes(b"{")
        again = opened(tmp_path)
        await again.open()
        assert again.files("me") == [kept] and again.files("you") == []
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [kept.id, f"{kept.id}.json"]
        again.close()

    asyncio.run(go())


def test_files_go_when_their_time_has_come(tmp_path: Path) -> None:
    async def go() -> None:
        clock = Clock()
        store = opened(tmp_path, clock)
        short, long = await kept_file(store, b"a", 3600), await kept_file(store, b"b")
        clock.now += 3600
        assert store.files("me") == [long]
        await store.drop_expired()
        assert not store.path_of(short).exists() and store.path_of(long).exists()
        store.close()

    asyncio.run(go())


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    async def go() -> None:
        store, other = opened(tmp_path), opened(tmp_path)
        await store.open()
        with pytest.raises(NoStore):
            await other.open()
        store.close()
        await other.open()
        other.close()

    asyncio.run(go())


def test_half_a_line_of_results_is_none(tmp_path: Path) -> None:
    path = tmp_path / "results"
    results = Results(path)
    results.append(LineResult(custom_id="a", outcome=Outcome.SUCCEEDED))
    results.close()
    path.write_bytes(path.read_bytes() + b'{"custom_id": "b", "outc')
    again = Results(path)
    assert again.outcomes == {"a": Outcome.SUCCEEDED}
    again.append(LineResult(custom_id="b", outcome=Outcome.ERRORED))
    again.close()
    assert [result.custom_id for result in read_results(path)] == ["a", "b"]


def test_a_batch_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    names = [str(number) for number in range(10)]

    async def go() -> None:
        async def first_five(name: str) -> None:
            if name >= "5":
                await asyncio.Event().wait()

        server = Server(tmp_path, first_five)
        await server.store.add_batch(record := batch(), [line(name) for name in names])
        server.runner.start(record)
        await until(lambda: {"5", "6"} <= {*server.asked})
        await server.stop()
        next_one = Server(tmp_path, at_once)
        await next_one.store.open()
        next_one.runner.resume()
        await until(lambda: next_one.record().status is Status.COMPLETED)
        assert sorted(next_one.asked) == names[5:]
        assert sorted(result.custom_id for result in next_one.results()) == names
        assert next_one.record().count(Outcome.SUCCEEDED) == 10
        await until(lambda: not next_one.store.input_path(record.id).exists())
        await next_one.stop()

    asyncio.run(go())


@pytest.mark.parametrize("status", [Status.IN_PROGRESS, Status.CANCELLING])
def test_what_was_not_done_in_time_gets_no_answer(tmp_path: Path, status: Status) -> None:
    async def go() -> None:
        server = Server(tmp_path, at_once, clock := Clock())
        record = batch(status=status, num_lines=2)
        await server.store.add_batch(record, [line("a"), line("b")])
        clock.now = 20_000
        server.runner.start(record)
        await until(lambda: server.record().status.is_final)
        ends = {Status.IN_PROGRESS: Status.EXPIRED, Status.CANCELLING: Status.CANCELLED}
        assert server.record().status is ends[status] and not server.asked
        outcome = Outcome.EXPIRED if status is Status.IN_PROGRESS else Outcome.CANCELED
        assert [result.outcome for result in server.results()] == [outcome] * 2
        await server.stop()

    asyncio.run(go())


def test_a_line_is_tried_again_while_there_is_no_capacity(tmp_path: Path) -> None:
    async def go() -> None:
        async def third_time(name: str) -> None:
            if len(server.asked) < 3:
                raise Unavailable("Draining.", retry_after_s=5)

        server = Server(tmp_path, third_time)
        await server.store.add_batch(record := batch(), [line("a")])
        server.runner.start(record)
        await until(lambda: server.record().status.is_final)
        assert server.asked == ["a"] * 3 and server.record().count(Outcome.SUCCEEDED) == 1
        await server.stop()

    virtual_time.run(go())


def test_batches_take_turns(tmp_path: Path) -> None:
    async def go() -> None:
        async def in_turn(name: str) -> None:
            await asyncio.sleep(0)

        server = Server(tmp_path, in_turn)
        records = [batch(), batch()]
        for record, letter in zip(records, "ab", strict=True):
            await server.store.add_batch(record, [line(f"{letter}{number}") for number in range(40)])
        for record in records:
            server.runner.start(record)
        await until(lambda: not server.store.unfinished())
        assert server.asked.index("b0") < server.asked.index("a39")
        await server.stop()

    asyncio.run(go())


def test_a_batch_whose_results_cannot_be_written_fails(tmp_path: Path) -> None:
    async def go() -> None:
        server = Server(tmp_path, at_once)
        await server.store.add_batch(record := batch(), [line("a")])
        server.store.results_path(record.id).mkdir()
        server.runner.start(record)
        await until(lambda: server.record().status.is_final)
        assert server.record().status is Status.FAILED
        assert [problem.code for problem in server.record().problems] == ["server_error"]
        server.store.results_path(record.id).rmdir()
        await server.stop()

    asyncio.run(go())
