"""The watchdog measures how long the event loop stood still, and says which endpoint held it."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from pathlib import Path

import pytest

from tests.api.http import complete
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.waiting import until, wait_until
from weft.observe import watchdog
from weft.observe.metrics import Metrics, exposition
from weft.observe.watchdog import LOGGED_S, LoopWatchdog, name_task


def hold(seconds: float) -> None:
    """Work for so long; a busy machine only makes it longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def num_stalls(dog: LoopWatchdog) -> float:
    return dog.stalls.buckets()[-1][1]


def test_a_stall_is_measured_and_its_endpoint_and_line_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_PACKAGE", str(Path(__file__).parent))

    async def scenario() -> LoopWatchdog:
        with LoopWatchdog() as dog:
            name_task("POST /v1/slow")
            before = num_stalls(dog)
            hold(1.0)
            await until(lambda: num_stalls(dog) > before, "the stall")
            return dog

    with caplog.at_level(logging.WARNING, "weft"):
        dog = asyncio.run(scenario())
    assert dog.stalls.total > 0.5
    [record] = [one for one in caplog.records if "stood still" in one.getMessage()]
    fields = record.__dict__["weft_fields"]
    assert fields["seconds"] > LOGGED_S and fields["cpu_seconds"] > 0
    assert fields["endpoint"] == "POST /v1/slow" and fields["line"].startswith("weft/test_watchdog.py:")


def test_a_thread_that_holds_the_interpreter_is_seen_too() -> None:
    """The loop's own task only waits, and cannot: what holds the GIL stalls the loop like its own work."""

    async def scenario() -> float:
        with LoopWatchdog() as dog:
            await asyncio.to_thread(_hold_the_gil)
            await until(lambda: num_stalls(dog) > 0, "the stall")
            return dog.stalls.total

    assert asyncio.run(scenario()) > 0.1


def _hold_the_gil() -> None:
    """A regular expression runs without a pause in which another thread could go on."""
    n = 18
    began = time.monotonic()
    while time.monotonic() - began < 0.5:
        re.fullmatch("(a|aa)+b", "a" * n)
        n += 2


def test_nothing_is_counted_for_work_in_small_pieces_and_it_ends_with_its_block() -> None:
    async def scenario() -> None:
        with LoopWatchdog():
            assert any(thread.name == "weft-watchdog" for thread in threading.enumerate())

    asyncio.run(scenario())
    wait_until(lambda: not any(thread.name == "weft-watchdog" for thread in threading.enumerate()), "the thread's end")


def test_stalls_are_exported() -> None:
    dog = LoopWatchdog()
    dog.stalls.observe(0.3)
    text = exposition([Metrics("m", ScriptedEngine())], stalls=dog.stalls).decode()
    assert 'weft_event_loop_stall_seconds_bucket{le="0.5"} 1.0' in text
    assert "weft_event_loop_stall_seconds_count 1.0" in text


def test_requests_name_the_tasks_that_serve_them() -> None:
    names: list[str] = []

    class Noting(ScriptedEngine):
        async def submit(self, request):  # type: ignore[no-untyped-def]
            task = asyncio.current_task()
            assert task is not None
            names.append(task.get_name())
            return await super().submit(request)

    assert complete(Noting(answer("Hello"))).status_code == 200
    assert names == ["POST /v1/completions"]
