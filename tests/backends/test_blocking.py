"""An engine on a loop of its own thread: used from any thread, left at any time, closed whenever."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from tests.api.scripted_engine import ScriptedEngine, Step, answer
from tests.waiting import PATIENCE, until, wait_until
from weft.backends import blocking as looped_engine
from weft.backends.blocking import BlockingEngine, submitting
from weft.errors import EngineFault, InvalidRequest, ModelError, Unavailable
from weft.types import FinishReason, Output, SamplingParams

ASK = submitting([1], SamplingParams())
HANGING: list[Step] = [Output(text="Hel", token_ids=[1]), lambda: asyncio.Event().wait()]


@pytest.fixture(autouse=True)
def _let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that leaves waits for the engine, and not for this time to pass: a test that needs it hangs."""
    monkeypatch.setattr(looped_engine, "LETTING_GO_S", 3600.0)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def looped(engine: ScriptedEngine) -> Iterator[BlockingEngine]:
    async def start() -> ScriptedEngine:
        return engine

    with BlockingEngine(start) as looped:
        yield looped
    assert engine.closed
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-engine-loop"]


def test_deltas_come_when_they_come_and_not_at_the_end(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    engine.script = HANGING
    deltas = looped.follow(ASK)
    assert next(deltas).text == "Hel", "while the rest never comes"
    deltas.close()


def test_whoever_leaves_ends_the_request_before_going_on(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    engine.script = HANGING

    def break_off() -> None:
        for _ in looped.follow(ASK):
            break

    def throw_away() -> None:
        next(looped.follow(ASK))
        gc.collect()

    for leave in (break_off, throw_away):
        leave()
        assert not engine.open


def test_a_generator_that_nobody_began_asks_for_nothing(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    looped.follow(ASK).close()
    assert not engine.submitted


def test_a_generator_may_be_collected_on_the_engine_s_own_thread(
    engine: ScriptedEngine, looped: BlockingEngine
) -> None:
    engine.script = HANGING
    held = [looped.follow(ASK)]
    next(held[0])

    async def drop() -> None:
        held.clear()

    looped.wait(drop())
    wait_until(lambda: not engine.open, "the request is ended")


def test_the_engine_s_own_thread_is_told_instead_of_waiting_for_ever(looped: BlockingEngine) -> None:
    async def wait_in_vain() -> None:
        list(looped.stream([1], SamplingParams()))

    with pytest.raises(Unavailable, match="own thread"):
        looped.wait(wait_in_vain())


def test_an_abort_ends_the_generator_wherever_it_is_read(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    engine.script = HANGING
    read: list[str] = []

    def reader() -> None:
        read.extend(delta.text for delta in looped.follow(ASK, "mine"))
        read.append("ended")

    thread = threading.Thread(target=reader)
    thread.start()
    wait_until(lambda: read, "the first delta is read")
    with pytest.raises(InvalidRequest, match="already"):
        next(looped.follow(ASK, "mine"))
    assert not looped.abort("another's")
    assert looped.abort("mine") and not looped.abort("mine")
    thread.join(PATIENCE)
    assert read == ["Hel", "ended"]
    wait_until(lambda: not engine.open, "the request is ended")


def test_an_error_of_the_engine_is_the_reader_s(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    engine.script = [Output(text="a"), Output(finish=FinishReason.ERROR, error="broken")]
    with pytest.raises(EngineFault, match="broken"):
        list(looped.follow(ASK))
    with pytest.raises(EngineFault, match="broken"):
        looped.collect([ASK])
    engine.refuse = InvalidRequest("no")
    with pytest.raises(InvalidRequest, match="no"):
        list(looped.follow(ASK))
    assert not engine.open


def test_on_another_loop_the_caller_goes_on_meanwhile(engine: ScriptedEngine, looped: BlockingEngine) -> None:
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
        assert [delta.text async for delta in looped.follow_async(ASK)] == ["a", "b"]
        counting.cancel()
        engine.script = HANGING
        deltas = looped.follow_async(ASK)
        assert (await anext(deltas)).text == "Hel"
        await deltas.aclose()
        assert not engine.open
        deltas_again = looped.follow_async(ASK, "a")
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
    looped = BlockingEngine(start)
    deltas = looped.follow(ASK)
    next(deltas)
    closing = threading.Thread(target=looped.close)
    closing.start()
    with pytest.raises(Unavailable, match="closed"):
        next(deltas)
    closing.join()
    looped.close()
    with pytest.raises(Unavailable, match="closed"):
        list(looped.follow(ASK))


def test_answers_of_many_threads_do_not_mix(engine: ScriptedEngine, looped: BlockingEngine) -> None:
    engine.script = answer("one ", "two ", "three")
    texts: list[str] = []

    def ask() -> None:
        for _ in range(10):
            texts.append("".join(delta.text for delta in looped.follow(ASK)))

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

    looped = BlockingEngine(start, in_background=True)
    with pytest.raises(Unavailable, match="still being started"):
        _ = looped.engine
    with pytest.raises(Unavailable, match="still being started"):
        list(looped.follow(ASK))
    go_on.set()
    wait_until(lambda: looped.is_started, "it is started")
    assert "".join(delta.text for delta in looped.follow(ASK)) == "Hello, world"
    looped.close()
    go_on.clear()
    BlockingEngine(start, in_background=True).close()
    assert cancelled.wait(PATIENCE)


def test_what_kept_it_from_starting_is_raised() -> None:
    async def start() -> ScriptedEngine:
        raise ModelError("damaged")

    with pytest.raises(ModelError, match="damaged"):
        BlockingEngine(start)
    looped = BlockingEngine(start, in_background=True)
    wait_until(lambda: looped.failure is not None, "the start fails")
    with pytest.raises(ModelError, match="damaged"):
        _ = looped.engine
    looped.close()
