"""A client whose engines cannot be started, are slow to start, or say what nobody understands: it ends every request,
and leaves no engine behind."""

from __future__ import annotations

import asyncio
import itertools
import sys

import pytest

from tests.engine.stand_in import StandIn, StandIns
from tests.engine.test_client import FILES, client_of, request, submitted
from tests.waiting import PATIENCE, until
from weft.config import load
from weft.engine.client import EngineClient
from weft.engine.process import EngineProcess
from weft.engine.wire import Done, Heartbeat, StepOutput, frame
from weft.engine_stats import EngineStats
from weft.errors import EngineFault
from weft.types import Event, FinishReason, ResetPrefixCache

SILENT = "import signal, socket, sys; socket.socket(fileno=int(sys.argv[1])); signal.pause()"
"""It holds its end open, and never looks at it."""


class SilentEngine(EngineProcess):
    def __init__(self) -> None:
        super().__init__(sys.executable, "-c", SILENT)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None


def test_where_no_process_can_be_started_requests_end() -> None:
    launch = StandIns()

    def once() -> StandIn:
        if launch.launched:
            raise BlockingIOError("Resource temporarily unavailable")
        return launch()

    async def scenario() -> None:
        client = EngineClient(load(env={}), FILES, once)
        await client.start()
        entry = client.submit(request("a"))
        launch.launched[0].kill()
        await until(lambda: client.state == "failed")
        [event] = entry.take()
        assert not isinstance(event, int) and event.finish is FinishReason.ERROR
        assert client.num_open == 0
        await asyncio.wait_for(client.close(), PATIENCE)

    asyncio.run(scenario())


@pytest.mark.parametrize(("oom_kills", "num_lives"), [([0], 5), ([0, 1], 2)], ids=["others", "no memory"])
def test_who_killed_an_engine_decides_whether_its_request_is_to_blame(
    monkeypatch: pytest.MonkeyPatch, oom_kills: list[int], num_lives: int
) -> None:
    """A request takes two engines down when the kernel has to kill them for want of memory. When others do, it is tried
    again, though not for ever."""
    told = itertools.cycle(oom_kills)
    monkeypatch.setattr("weft.engine.client.num_oom_kills", lambda: next(told))

    class Killed(StandIn):
        def wait(self, timeout_s: float) -> str | None:
            return super().wait(timeout_s) and "killed by SIGKILL"

    async def scenario() -> None:
        launch = StandIns(Killed)
        async with client_of(launch) as client:
            entry = client.submit(request("a"))
            for life in range(num_lives):
                assert entry.is_open
                await until(lambda n=life: len(launch.launched) > n and launch.launched[n].inbox.qsize())
                launch.launched[life].kill()
            await until(lambda: not entry.is_open)
            [last] = entry.take()
            assert isinstance(last, Event) and last.finish is FinishReason.ERROR
            assert ("twice" if num_lives == 2 else "5 times") in last.error

    asyncio.run(scenario())


def test_an_unforeseen_error_ends_requests_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: EngineClient, output: object) -> None:
        raise RuntimeError("unforeseen")

    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            client.submit(request("a"))
            monkeypatch.setattr(EngineClient, "_deliver", fails)
            launch.launched[0].send(StepOutput({}, [], EngineStats()))
            await until(lambda: client.state == "failed" and client.num_open == 0)
            await asyncio.to_thread(launch.launched[0]._thread.join, PATIENCE)
            assert not launch.launched[0]._thread.is_alive()

    asyncio.run(scenario())


def test_an_answer_for_somebody_who_has_gone_harms_nothing() -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            asked = asyncio.create_task(client.control(ResetPrefixCache()))
            await asyncio.sleep(0)
            # The answer arrives in the turn of the loop in which the caller is cancelled.
            assert client._connection is not None
            client._connection.inbox.data_received(frame(Done(1, "0")))
            asked.cancel()
            await asyncio.wait({asked})
            again = asyncio.create_task(client.control(ResetPrefixCache()))
            await asyncio.sleep(0)
            launch.launched[0].send(Done(2, "7"))
            assert await asyncio.wait_for(again, PATIENCE) == "7"

    asyncio.run(scenario())


def test_a_start_that_is_called_off_leaves_no_process() -> None:
    launched: list[SilentEngine] = []

    def launch() -> SilentEngine:
        launched.append(SilentEngine())
        return launched[-1]

    async def scenario() -> None:
        client = EngineClient(load(env={}), FILES, launch)
        starting = asyncio.create_task(client.start())
        await until(lambda: bool(launched))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, PATIENCE)
        assert launched[0].has_ended

    asyncio.run(scenario())


def test_a_close_waits_for_no_engine_that_is_still_starting() -> None:
    launched: list[StandIn | SilentEngine] = []

    def launch() -> StandIn | SilentEngine:
        launched.append(SilentEngine() if launched else StandIn())
        return launched[-1]

    async def scenario() -> None:
        client = EngineClient(load(env={}), FILES, launch)
        await client.start()
        launched[0].kill()
        await until(lambda: len(launched) == 2)
        await asyncio.wait_for(client.close(), PATIENCE)
        [_, second] = launched
        assert isinstance(second, SilentEngine) and second.has_ended
        assert client.state == "closed"

    asyncio.run(scenario())


def test_a_close_leaves_no_engine_that_was_launched_and_not_yet_connected() -> None:
    launched: list[StandIn | SilentEngine] = []

    def launch() -> StandIn | SilentEngine:
        launched.append(SilentEngine() if launched else StandIn())
        return launched[-1]

    async def scenario() -> None:
        client = EngineClient(load(env={}), FILES, launch)
        await client.start()
        connecting = asyncio.Event()

        async def never(*arguments: object, **more: object) -> None:
            connecting.set()
            await asyncio.Event().wait()

        asyncio.get_running_loop().create_unix_connection = never  # type: ignore[method-assign, assignment]
        launched[0].kill()
        await connecting.wait()
        await asyncio.wait_for(client.close(), PATIENCE)
        [_, second] = launched
        assert isinstance(second, SilentEngine) and second.has_ended

    asyncio.run(scenario())


def test_an_engine_that_speaks_another_language_is_refused() -> None:
    class Babbler(StandIn):
        def _read_forever(self) -> None:
            self._theirs.sendall(b"\x03\x00\x00\x00???")
            while self._theirs.recv(1 << 16):
                pass

    with pytest.raises(EngineFault, match="no message"):
        asyncio.run(EngineClient(load(env={}), FILES, Babbler).start())


def test_an_engine_whose_step_takes_too_long_is_replaced_and_its_request_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        launch = StandIns()
        async with client_of(launch) as client:
            entry = client.submit(request("a"))
            [first] = launch.launched
            await submitted(first)
            first.send(Heartbeat(299.0), StepOutput({"a": 5}, [], EngineStats()))
            await until(lambda: entry.delivered == [5])
            assert client.state == "ready"
            first.send(Heartbeat(301.0))
            await until(lambda: len(launch.launched) == 2 and client.state == "ready")
            [again] = await submitted(launch.launched[1])
            assert again.output_token_ids == [5]

    asyncio.run(scenario())
    assert "a step took more than 300 s" in caplog.text
