"""An engine on a loop of its own thread: used from any thread, left at any time, closed whenever."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.generation import sample
from weft.backends.blocking import BlockingEngine
from weft.errors import EngineFault, InvalidRequest, ModelError, Unavailable
from weft.types import FinishReason, Output, SamplingParams

REQUEST = sample([1])
MINE = sample([1], request_id="mine")
HANGING: list[Step] = [Output(text="Hel", token_ids=[1]), 60.0]


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


def until(true: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_deltas_come_when_they_come_and_not_at_the_end(engine: ScriptedEngine, blocking: BlockingEngine) -> None:
    engine.script = HANGING
    outputs = blocking.follow(REQUEST)
    assert next(outputs).text == "Hel", "while the rest is a minute away"
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
    began = time.monotonic()

    async def drop() -> None:
        held.clear()

    blocking.wait(drop())
    assert time.monotonic() - began < 4, "it did not wait for itself"
    until(lambda: not engine.open)


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
    until(lambda: read)
    with pytest.raises(InvalidRequest, match="already"):
        next(blocking.follow(MINE))
    assert not blocking.abort("another's")
    assert blocking.abort("mine") and not blocking.abort("mine")
    thread.join(20)
    assert read == ["Hel", "ended"]
    until(lambda: not engine.open)


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
    engine.script = [Output(text="a"), 0.3, Output(text="b", finish=FinishReason.STOP)]

    async def scenario() -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.01)

        counting = asyncio.create_task(count())
        assert [output.text async for output in blocking.follow_async(REQUEST)] == ["a", "b"]
        assert turns > 5
        counting.cancel()
        engine.script = HANGING
        outputs = blocking.follow_async(REQUEST)
        assert (await anext(outputs)).text == "Hel"
        await outputs.aclose()
        assert not engine.open
        reading = asyncio.create_task(anext(deltas_again := blocking.follow_async(sample([1], request_id="a"))))
        await asyncio.sleep(0.1)
        await reading
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
    closing = threading.Timer(0.1, blocking.close)
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
        thread.join(60)
    assert texts == ["one two three"] * 80


def test_a_start_in_the_background_can_be_waited_for_and_given_up() -> None:
    go_on = threading.Event()
    cancelled = threading.Event()

    async def start() -> ScriptedEngine:
        try:
            while not go_on.is_set():
                await asyncio.sleep(0.01)
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
    until(lambda: blocking.is_started)
    assert "".join(output.text for output in blocking.follow(REQUEST)) == "Hello, world"
    blocking.close()
    go_on.clear()
    BlockingEngine(start, in_background=True).close()
    assert cancelled.wait(10)


def test_what_kept_it_from_starting_is_raised() -> None:
    async def start() -> ScriptedEngine:
        raise ModelError("damaged")

    with pytest.raises(ModelError, match="damaged"):
        BlockingEngine(start)
    blocking = BlockingEngine(start, in_background=True)
    until(lambda: blocking.failure is not None)
    with pytest.raises(ModelError, match="damaged"):
        _ = blocking.engine
    blocking.close()
