"""When the engine in use is lost for good the next one takes over, and what was being answered goes on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from msgspec.structs import replace

from tests import virtual_time
from tests.backends.reciting_engine import QUESTION, TEXT, ByteTokenizer, RecitingEngine
from tests.generation import embed, generate_image, sample
from tests.waiting import PATIENCE, until
from weft.backends import failover
from weft.backends.contract import Abilities, Engine, Health, Stream, final_output
from weft.backends.failover import FailoverEngine, start_engine
from weft.backends.registry import EngineSpec
from weft.config import load
from weft.errors import EngineFault, ModelError, Unavailable
from weft.types import (
    Adapter,
    ControlMessage,
    FinishReason,
    GenerationRequest,
    ImageParams,
    LoadLora,
    Output,
    SamplingParams,
    UnloadLora,
)

PROMPT = list(QUESTION.encode())
PLAIN = SamplingParams(max_tokens=200)


@asynccontextmanager
async def served(*engines: RecitingEngine | Exception) -> AsyncIterator[FailoverEngine]:
    """The first of these, with the others behind it."""

    async def start_first(others: Sequence[EngineSpec]) -> tuple[Engine, Sequence[EngineSpec]]:
        *_, engine = engines[-len(others) :][:1]
        if isinstance(engine, Exception):
            raise engine
        return engine, others[1:]

    first, *rest = engines
    assert isinstance(first, RecitingEngine)
    specs = [EngineSpec(name=f"number-{i}", start="", platform="any", about="") for i, _ in enumerate(rest)]
    engine = FailoverEngine(first, specs, start_first, patience_s=1)
    try:
        yield engine
    finally:
        await engine.close()


async def read(engine: FailoverEngine, params: SamplingParams = PLAIN) -> list[Output]:
    return [delta async for delta in await engine.submit(sample(PROMPT, params))]


async def followed(engine: FailoverEngine, params: SamplingParams = PLAIN) -> list[Output]:
    deltas: list[Output] = []
    await (await engine.submit(sample(PROMPT, params))).follow(deltas.append)
    return deltas


def text_of(deltas: list[Output]) -> str:
    return "".join(delta.text for delta in deltas)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), PATIENCE)

    asyncio.run(bounded())


Way = Callable[..., Awaitable[list[Output]]]
WAYS = pytest.mark.parametrize("way", [read, followed])


@WAYS
@pytest.mark.parametrize("dies_after", [0, 1, 5, 9, 10, 13, 14, 15, 30, len(TEXT.encode()) - 1])
def test_an_answer_goes_on_with_the_next_engine_at_any_byte(way: Way, dies_after: int) -> None:
    """After 9 and 10, and after 13 to 15, it is in the midst of a character."""

    async def scenario() -> None:
        first, second = RecitingEngine(dies_after=dies_after), RecitingEngine("second")
        async with served(first, second) as engine:
            deltas = await way(engine)
            assert text_of(deltas) == TEXT
            assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.STOP]
            assert deltas[-1].usage.completion_tokens == len(TEXT.encode())
            assert deltas[-1].usage.prompt_tokens == len(PROMPT)
            assert bytes(token for delta in deltas for token in delta.token_ids).decode() == TEXT
            assert engine.name == "second" and engine.health().ready
            assert first.closed and not second.closed and engine.stats().open_requests == 0
            assert engine.stats().restarts == 3, "one of each engine, and the takeover"
            assert engine.stats().generation_tokens == len(TEXT.encode()), "counters go on rising"
        assert second.closed

    run(scenario)


@WAYS
def test_a_stop_string_is_found_across_the_takeover(way: Way) -> None:
    async def scenario() -> None:
        half = len(TEXT.encode()) - len("D of it.")
        second = RecitingEngine("second")
        async with served(RecitingEngine(dies_after=half), second) as engine:
            deltas = await way(engine, replace(PLAIN, stop=("END of", "wilder")))
            assert text_of(deltas) == TEXT.partition("END")[0]
            assert deltas[-1].finish is FinishReason.STOP and deltas[-1].stop_reason == "END of"
            assert not second.open, "the engine was told that nobody reads on"

    run(scenario)


def test_what_is_asked_of_the_next_engine_is_the_rest() -> None:
    async def scenario() -> None:
        second = RecitingEngine("second")
        async with served(RecitingEngine(dies_after=6), second) as engine:
            params = SamplingParams(max_tokens=20, min_tokens=10, stop=("never",), logprobs=1, seed=7, temperature=0.5)
            deltas = await read(engine, params)
            asked = second.asked[0]
            assert bytes(asked.prompt).decode() == QUESTION + TEXT[:6]
            assert asked.task.params == replace(params, max_tokens=14, min_tokens=4, stop=())
            assert deltas[-1].finish is FinishReason.LENGTH and deltas[-1].usage.completion_tokens == 20
            told = [logprob.logprob for delta in deltas for logprob in delta.logprobs or ()]
            assert told == [-float(token) for token in TEXT.encode()[:20]]

    run(scenario)


def test_the_next_engine_has_the_adapters_that_the_lost_one_had() -> None:
    """The operator may have changed them since the start."""

    async def scenario() -> None:
        first, second = RecitingEngine(dies_after=6), RecitingEngine("second")
        for engine in (first, second):
            await engine.control(LoadLora("kept", "/kept"))
            await engine.control(LoadLora("dropped", "/dropped"))
        async with served(first, second) as both:
            await both.control(UnloadLora("dropped"))
            await both.control(LoadLora("new", "/new"))
            first.adapters.append(Adapter(name="lost", number=9, path="gone since"))
            asked = sample(PROMPT, PLAIN, request_id="mine", adapter="new", tenant="somebody")
            answer = [delta async for delta in await both.submit(asked)]
            assert text_of(answer) == TEXT
            assert [adapter.name for adapter in both.adapters] == ["kept", "new"]
            [again] = second.asked
            assert (again.request_id, again.adapter, again.tenant) == ("mine", "new", "somebody")

    run(scenario)


def test_two_engines_may_die_during_one_answer() -> None:
    async def scenario() -> None:
        engines = RecitingEngine(dies_after=12), RecitingEngine(dies_after=9), RecitingEngine("third")
        async with served(*engines) as engine:
            assert text_of(await read(engine)) == TEXT
            assert engine.name == "third"

    run(scenario)


def test_many_answers_go_on_and_one_engine_is_started_for_all() -> None:
    async def scenario() -> None:
        async with served(RecitingEngine(dies_after=400), RecitingEngine("second")) as engine:
            answers = await asyncio.gather(*(read(engine) for _ in range(20)))
            assert {text_of(answer) for answer in answers} == {TEXT}
            assert engine.stats().restarts == 3

    run(scenario)


def test_an_idle_engine_that_dies_is_replaced_too(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        first = RecitingEngine("first")
        async with served(first, RecitingEngine("second")) as engine:
            first.state = Health(False, "failed")
            assert engine.health() == Health(False, "restarting"), "not failed: another will be there"
            await until(lambda: engine.health().ready, "another engine is ready")
            assert engine.name == "second"

    run(scenario)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        "The engine first is lost: failed. Another takes over.",
        "The engine second has taken over from first.",
    ]


def test_an_engine_that_recovers_by_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has `patience_s`, 1 s, of the virtual clock; where it says that it restarts it has as long as it takes."""
    monkeypatch.setattr(failover, "time", SimpleNamespace(monotonic=virtual_time.now))
    monkeypatch.setattr(failover, "TICK_SECONDS", 0.125)

    async def scenario() -> None:
        first = RecitingEngine("first")
        async with served(first, RecitingEngine("second")) as engine:
            for reason, seconds in (("restarting", 3600), ("unreachable", 0.75)):
                first.state = Health(False, reason)
                await virtual_time.sleep(seconds)
                assert engine.health() == Health(False, reason)
                first.state = Health(True)
                await virtual_time.sleep(0.25)
            assert engine.name == "first"
            first.state = Health(False, "unreachable")
            await virtual_time.sleep(1.5)
            assert engine.name == "second" and engine.health().ready

    virtual_time.run(scenario())


def test_an_answer_that_cannot_be_continued_ends_with_an_error() -> None:
    class OtherWords(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id ^ 1])

    text_engine = RecitingEngine("text")
    text_engine.abilities = Abilities(tokens=False)
    grammar = replace(PLAIN, grammar='start: "x"')

    async def scenario() -> None:
        for second, params in (
            (RecitingEngine("other", spelling=OtherWords()), PLAIN),
            (text_engine, PLAIN),
            (RecitingEngine("second"), grammar),
        ):
            async with served(RecitingEngine(dies_after=6), second) as engine:
                deltas = await read(engine, params)
                assert text_of(deltas) == TEXT[:6]
                assert [delta.finish for delta in deltas if delta.finish] == [FinishReason.ERROR]
                assert "cannot be continued" in deltas[-1].error
                assert engine.health().ready, "the next request is answered"

    run(scenario)


def test_when_no_engine_is_left_everybody_is_told_why() -> None:
    async def scenario() -> None:
        async with served(RecitingEngine(dies_after=6), ModelError("damaged")) as engine:
            deltas = await read(engine)
            assert deltas[-1].finish is FinishReason.ERROR and "damaged" in deltas[-1].error
            assert engine.health() == Health(False, "failed")
            with pytest.raises(Unavailable, match="damaged"):
                await engine.submit(sample(PROMPT, PLAIN))

    run(scenario)


def test_an_error_of_a_living_engine_is_its_own() -> None:
    async def scenario() -> None:
        first = RecitingEngine(dies_after=6)
        async with served(first, RecitingEngine("second")) as engine:
            answer = await engine.submit(sample(PROMPT, PLAIN))
            first.dies_after, first.state = 10**9, Health(True)

            def refuse(*_: object, **__: object) -> None:
                raise EngineFault("this request alone")

            first.submit = refuse  # type: ignore[assignment]
            with pytest.raises(EngineFault, match="this request alone"):
                await engine.submit(sample(PROMPT, PLAIN))
            assert text_of([delta async for delta in answer]) == TEXT
            assert engine.name == "reciting"

    run(scenario)


def test_whatever_is_asked_of_an_engine_that_turns_out_to_be_lost_is_asked_of_the_next() -> None:
    class Dying(RecitingEngine):
        async def _die(self, *_: object, **__: object) -> NoReturn:
            self.state = Health(False, "failed")
            raise EngineFault("this was too much")

        submit = _die

    image = ImageParams(width=4, height=4, steps=1, guidance_scale=1.0, seed=0)
    requests = [sample(PROMPT, PLAIN), embed(PROMPT, request_id="mine"), generate_image(PROMPT, image)]

    async def scenario() -> None:
        for request in requests:
            third = RecitingEngine("third")
            async with served(Dying("first"), Dying("second"), third) as engine:
                assert (await final_output(await engine.submit(request))).finish is FinishReason.STOP
                assert len(third.asked) + len(third.embedded) + len(third.drawn) == 1

    run(scenario)


class FallingSilent(Stream):
    """A stream whose engine is lost before it gives anything."""

    def __init__(self, engine: RecitingEngine) -> None:
        self._engine = engine

    def __aiter__(self) -> FallingSilent:
        return self

    async def __anext__(self) -> Output:
        self._engine.state = Health(False, "failed")
        return Output(finish=FinishReason.ERROR, error="There is no engine any more.")

    async def aclose(self) -> None:
        pass


def test_a_vector_under_way_is_made_by_the_next_engine_and_an_image_ends_with_an_error() -> None:
    class Failing(RecitingEngine):
        async def submit(self, request: GenerationRequest) -> Stream:
            return FallingSilent(self)

    image = ImageParams(width=4, height=4, steps=1, guidance_scale=1.0, seed=0)

    async def scenario() -> None:
        async with served(Failing("first"), RecitingEngine("second")) as engine:
            last = await final_output(await engine.submit(embed(PROMPT)))
            assert last.embedding is not None and engine.name == "second"
        async with served(Failing("first"), RecitingEngine("second")) as engine:
            with pytest.raises(EngineFault, match="no engine any more"):
                await final_output(await engine.submit(generate_image(PROMPT, image)))

    run(scenario)


def test_closing_ends_what_is_open_and_starts_nothing() -> None:
    async def scenario() -> None:
        second = RecitingEngine("second")
        async with served(RecitingEngine(), second) as engine:
            answer = await engine.submit(sample(PROMPT, PLAIN))
            await anext(answer)
            await answer.aclose()
            assert engine.stats().open_requests == 0
        assert not second.asked and not second.closed

    run(scenario)


class Clinging(RecitingEngine):
    """Works at what it is told to `linger` at until it may `go_on`, and counts how often it is closed."""

    def __init__(self, name: str, linger: str = "", **options: int) -> None:
        super().__init__(name, **options)
        self.linger = linger
        self.at_work = asyncio.Event()
        self.go_on = asyncio.Event()
        self.times_closed = 0

    async def control(self, message: ControlMessage) -> str:
        await self._work("load")
        return await super().control(message)

    async def close(self) -> None:
        self.times_closed += 1
        await self._work("close")
        await super().close()

    async def _work(self, what: str) -> None:
        if what == self.linger:
            self.at_work.set()
            await self.go_on.wait()


@pytest.mark.parametrize("linger", ["load", "close"])
def test_closing_during_a_takeover_leaves_no_engine_and_nobody_waiting(linger: str) -> None:
    async def scenario() -> None:
        first, second = Clinging("first", linger), Clinging("second", linger)
        first.adapters = [Adapter(name="own", number=1, path="/own")]
        async with served(first, second) as engine:
            first.state = Health(False, "failed")
            waiting = asyncio.create_task(engine.submit(sample(PROMPT, PLAIN)))
            await (second if linger == "load" else first).at_work.wait()
            closing = asyncio.create_task(engine.close())
            with pytest.raises(Unavailable, match="shutting down"):
                await waiting
            first.go_on.set()
            await closing
            assert first.closed and first.times_closed == 1
            assert second.times_closed == (1 if linger == "load" else 0), "it was never started"
        assert first.times_closed + second.times_closed == (2 if linger == "load" else 1), "closed is closed"

    run(scenario)


def test_an_adapter_that_fails_as_nobody_foresaw_does_not_end_the_takeover(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(RecitingEngine):
        async def control(self, message: ControlMessage) -> str:
            if isinstance(message, LoadLora):
                raise OSError("the disk is gone")
            raise RuntimeError("it is stuck")

    async def scenario() -> None:
        first, second, third = RecitingEngine(dies_after=6), Stubborn("second"), RecitingEngine("third")
        first.adapters = [Adapter(name="wanted", number=1, path="/wanted")]
        second.adapters = [Adapter(name="unwanted", number=1, path="/unwanted")]
        async with served(first, second, third) as engine:
            assert text_of(await read(engine)) == TEXT
            second.state = Health(False, "failed")
            assert text_of(await read(engine)) == TEXT, "the watch goes on"
            assert engine.name == "third"

    run(scenario)
    assert "it is stuck" in caplog.text and "the disk is gone" in caplog.text


def test_the_native_engine_is_killed_for_good_in_mid_stream(tiny_model: Path) -> None:
    """Two real engines, one after the other: the same seed goes on in the second as it would have in the first."""
    settings = {
        "model": str(tiny_model),
        "engine": "native,native",
        "image_model": "none",
        "num_blocks": 64,
        "threads": 1,
        "max_restarts": 0,
    }
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=400, ignore_eos=True)

    async def scenario() -> None:
        engine = await start_engine(load(settings, env={}))
        assert isinstance(engine, FailoverEngine)
        try:
            prompt = engine.text.tokenizer.encode("Once upon a time")
            undisturbed = text_of([delta async for delta in await engine.submit(sample(prompt, params))])
            pid = engine._engine.client.engine_pid  # type: ignore[attr-defined]
            deltas: list[Output] = []
            async for delta in await engine.submit(sample(prompt, params)):
                deltas.append(delta)
                if len(deltas) == 20:
                    os.kill(pid, signal.SIGKILL)
            assert deltas[-1].finish is FinishReason.LENGTH and deltas[-1].usage.completion_tokens == 400
            assert text_of(deltas) == undisturbed
            await until(lambda: engine.health().ready)
            assert engine.stats().open_requests == 0
            assert engine._engine.client.engine_pid != pid  # type: ignore[attr-defined]
        finally:
            await engine.close()

    asyncio.run(scenario())
