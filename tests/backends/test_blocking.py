"""An engine on a loop of its own thread: used from any thread, left at any time, closed whenever."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.generation import sample
from tests.waiting import PATIENCE, until, wait_until
from weft.backends import blocking as blocking_module
from weft.backends.blocking import BlockingEngine
from weft.errors import EngineFault, InvalidRequest, ModelError, Unavailable
from weft.types import FinishReason, Output, SamplingParams

REQUEST = sample([1])
MINE = sample([1], request_id="mine")
HANGING: list[Step] = [Output(text="Hel", token_ids=[1]), lambda: asyncio.Event().wait()]


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves waits for the engine, and not for this time to pass: a test that needs it hangs."""
    monkeypatch.setattr(blocking_module, "ABORT_SECONDS", 3600.0)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def blocking(engine: ScriptedEngine) -> Iterator[BlockingEngine]:
    async def start() -> ScriptedEngine:
        return engine

    with BlockingEngine(start) as blocking:
        yield blocking
    assert engine.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-engine-loop"]


def test_deltas_come_when_they_come_and_not_at_the_end(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = HANGING
    outputs = blocking.follow(REQUEST)
    assert next(outputs).text == "Hel", "while the rest never comes"
    outputs.close()


def test_whoever_leaves_ends_the_request_before_going_on(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = HANGING

    def break_off() -> None:
        for _ in blocking.follow(REQUEST):
            break

    def throw_away() -> None:
        next(blocking.follow(REQUEST))
        gc.collect()

    for leave in (break_off, throw_away):
        leave()
        assert not engine.open


def test_a_generator_that_nobody_began_asks_for_nothing(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    blocking.follow(REQUEST).close()
    assert not engine.submitted


def test_a_generator_may_be_collected_on_the_engine_s_own_thread(
    engine: ScriptedEngine, blocking: BlockingEngine
) -> None:
    engine.script = HANGING
    held = [blocking.follow(REQUEST)]
    next(held[0])

    async def drop() -> None:
        held.clear()

    blocking.wait(drop())
    wait_until(lambda: not engine.open, "the request is ended")


def test_the_engine_s_own_thread_is_told_instead_of_waiting_for_ever(blocking: BlockingEngine) -> None:
    async def wait_in_vain() -> None:
        list(blocking.stream([1], SamplingParams()))

    with pytest.raises(Unavailable, match="own thread"):
        blocking.wait(wait_in_vain())


def test_an_abort_ends_the_generator_wherever_it_is_read(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = HANGING
    read: list[str] = []

    def reader() -> None:
        read.extend(output.text for output in blocking.follow(MINE))
        read.append("ended")

    thread = threading.Thread(target=reader)
    thread.start()
    wait_until(lambda: read, "the first output is read")
    with pytest.raises(InvalidRequest, match="already"):
        next(blocking.follow(MINE))
    assert not blocking.abort("another's")
    assert blocking.abort("mine") and not blocking.abort("mine")
    thread.join(PATIENCE)
    assert read == ["Hel", "ended"]
    wait_until(lambda: not engine.open, "the request is ended")


def test_an_error_of_the_engine_is_the_reader_s(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = [Output(text="a"), Output(finish=FinishReason.ERROR, error="broken")]
    with pytest.raises(EngineFault, match="broken"):
        list(blocking.follow(REQUEST))
    with pytest.raises(EngineFault, match="broken"):
        blocking.collect([REQUEST])
    engine.refuse = InvalidRequest("no")
    with pytest.raises(InvalidRequest, match="no"):
        list(blocking.follow(REQUEST))
    assert not engine.open


def test_on_another_loop_the_caller_goes_on_meanwhile(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    turns = 0
    engine.script = [
        Output(text="a"),
        lambda: until(lambda: turns > 5, "the caller's loop goes on"),
        Output(text="b", finish=FinishReason.STOP),
    ]

    async def scenario() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        assert [output.text async for output in blocking.follow_async(REQUEST)] == ["a", "b"]
        counting.cancel()
        engine.script = HANGING
        outputs = blocking.follow_async(REQUEST)
        assert (await anext(outputs)).text == "Hel"
        await outputs.aclose()
        assert not engine.open
        deltas_again = blocking.follow_async(sample([1], request_id="a"))
        assert (await anext(deltas_again)).text == "Hel"
        reading = asyncio.create_task(anext(deltas_again))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not engine.open

    asyncio.run(scenario())


def test_closing_ends_what_is_read_and_says_so(engine: ScriptedEngine) -> None:
    async def start() -> ScriptedEngine:
        return engine

    engine.script = HANGING
    blocking = BlockingEngine(start)
    outputs = blocking.follow(REQUEST)
    next(outputs)
    closing = threading.Thread(target=blocking.close)
    closing.start()
    with pytest.raises(Unavailable, match="closed"):
        next(outputs)
    closing.join()
    blocking.close()
    with pytest.raises(Unavailable, match="closed"):
        list(blocking.follow(REQUEST))


def test_answers_of_many_threads_do_not_mix(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = answer("one ", "two ", "three")
    texts: list[str] = []

    def ask() -> None:
        for _ in range(10):
            texts.append("".join(output.text for output in blocking.follow(REQUEST)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert texts == ["one two three"] * 80


def test_a_start_in_the_background_can_be_waited_for_and_given_up() -> None:
    go_on = threading.Event()
    cancelled = threading.Event()

    async def start() -> ScriptedEngine:
        try:
            await until(go_on.is_set, "the start may go on")
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ScriptedEngine()

    blocking = BlockingEngine(start, in_background=True)
    with pytest.raises(Unavailable, match="still being started"):
        _ = blocking.engine
    with pytest.raises(Unavailable, match="still being started"):
        list(blocking.follow(REQUEST))
    go_on.set()
    wait_until(lambda: blocking.is_started, "it is started")
    assert "".join(output.text for output in blocking.follow(REQUEST)) == "Hello, world"
    blocking.close()
    go_on.clear()
    BlockingEngine(start, in_background=True).close()
    assert cancelled.wait(PATIENCE)


def test_what_kept_it_from_starting_is_raised() -> None:
    async def start() -> ScriptedEngine:
        raise ModelError("damaged")

    with pytest.raises(ModelError, match="damaged"):
        BlockingEngine(start)
    blocking = BlockingEngine(start, in_background=True)
    wait_until(lambda: blocking.failure is not None, "the start fails")
    with pytest.raises(ModelError, match="damaged"):
        _ = blocking.engine
    blocking.close()
