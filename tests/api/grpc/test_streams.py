"""Several predictions on one stream, and clients that leave."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.grpc.calls import Client, answer_to, ask, check_whole, failed, refused, served, text_of
from tests.api.scripted_engine import Condition, ScriptedEngine, Step, answer, forever
from tests.waiting import PATIENCE, until
from weft.api.grpc.status import RpcStatus
from weft.api.grpc.stream_predict import MAX_OPEN, PredictionStream
from weft.backends.contract import Stream, tokens_of
from weft.types import GenerationRequest, Output

Code = grpc.StatusCode
FIRST = Output(text="a", token_ids=[1])


class ByPrompt(ScriptedEngine):
    """Plays the script that the prompt names."""

    def __init__(self, **scripts: Sequence[Step]) -> None:
        super().__init__()
        self.scripts = scripts

    async def submit(self, request: GenerationRequest) -> Stream:
        self.script = list(self.scripts[bytes(tokens_of(request.prompt)).decode()])
        return await super().submit(request)


class Watch:
    """What the streams of a test have read, and how many of their predictions have failed."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_dealt_with = 0
        """Of those that were read: begun, or let go."""
        self.num_failed = 0
        self.has_all_requests = False

    async def has_failure(self) -> None:
        await until(lambda: self.num_failed, "a failed prediction")

    async def has_failure_and_all_requests(self) -> None:
        """grpc.aio's client drops the answers that it has not handed out when a write of its own fails."""
        await until(lambda: self.num_failed and self.has_all_requests, "a failed prediction and the last request")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    run, end = PredictionStream.run, PredictionStream._end

    async def watched_run(stream: PredictionStream, requests: AsyncIterable[bytes]) -> RpcStatus | None:
        async def counted() -> AsyncIterable[bytes]:
            async for message in requests:
                watch.num_read += 1
                yield message
                watch.num_dealt_with += 1
            watch.has_all_requests = True

        return await run(stream, counted())

    def watched_end(stream: PredictionStream, status: RpcStatus) -> None:
        end(stream, status)
        watch.num_failed += 1

    monkeypatch.setattr(PredictionStream, "run", watched_run)
    monkeypatch.setattr(PredictionStream, "_end", watched_end)
    return watch


def turns(count: int) -> Condition:
    """A condition that holds after so many turns of the loop."""

    async def pass_by() -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    return pass_by


def by_trace_id(responses: list[Any]) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for response in responses:
        found[response.trace_id].append(response)
    return dict(found)


def test_predictions_of_one_stream_run_side_by_side() -> None:
    async def scenario() -> None:
        fast_is_whole = asyncio.Event()
        engine = ByPrompt(slow=[FIRST, fast_is_whole.wait, *answer("slow")], fast=answer("fast"))
        responses = []
        async with served(engine) as opened:
            async for response in opened.predict([ask("slow", "1"), ask("fast", "2"), ask("slow", "3")]):
                responses.append(response)
                if response.trace_id == "2" and response.end_of_stream:
                    fast_is_whole.set()
        found = by_trace_id(responses)
        for answers in found.values():
            check_whole(answers)
        assert {trace: text_of(answers) for trace, answers in found.items()} == {
            "1": "aslow",
            "2": "fast",
            "3": "aslow",
        }

    asyncio.run(scenario())


@settings(max_examples=20)
@given(st.lists(st.lists(st.sampled_from([0, 2, 50, "x", "世", "\n"]), max_size=12), min_size=1, max_size=8))
def test_any_mixture_comes_out_in_order(scripts: list[list[Any]]) -> None:
    def played(script: list[Any]) -> list[Step]:
        steps = [Output(text=step, token_ids=[1]) if isinstance(step, str) else turns(step) for step in script]
        return [*steps, *answer("!")]

    async def scenario() -> None:
        engine = ByPrompt(**{f"p{i}": played(script) for i, script in enumerate(scripts)})
        async with served(engine, grpc_buffer_size=3, grpc_flush_interval_ms=5) as opened:
            requests = [ask(f"p{i}", f"t{i}") for i in range(len(scripts))]
            found = by_trace_id([response async for response in opened.predict(requests)])
        assert len(found) == len(scripts)
        for i, script in enumerate(scripts):
            check_whole(found[f"t{i}"])
            assert text_of(found[f"t{i}"]) == "".join(step for step in script if isinstance(step, str)) + "!"

    asyncio.run(scenario())


def test_a_stream_stays_open_for_the_next_request() -> None:
    async def scenario() -> None:
        async with served() as opened:
            call = opened.predict()
            for trace_id in ("1", "2", "2"):
                await call.write(ask(trace_id=trace_id))
                answers = []
                while not answers or not answers[-1].end_of_stream:
                    answers.append(await call.read())
                check_whole(answers)
                assert answers[0].trace_id == trace_id
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF
            assert await call.code() is Code.OK

    asyncio.run(scenario())


@pytest.mark.parametrize("bad", [ask("bad", "b"), ask("fine", "b", model_id="gpt-4")])
def test_a_failure_ends_the_call_after_the_others_are_whole(bad: Any, watch: Watch) -> None:
    async def scenario() -> None:
        fine = [FIRST, watch.has_failure_and_all_requests, *answer("fine")]
        engine = ByPrompt(fine=fine, bad=[FIRST, RuntimeError("boom")])
        async with served(engine) as opened:
            received, code, details = await failed(opened.predict([ask("fine", "1"), bad, ask("fine", "2")]))
            found = by_trace_id(received)
            check_whole(found["1"])
            assert text_of(found["1"]) == "afine"
            assert not any(response.end_of_stream for response in found.get("b", []))
            assert code is (Code.NOT_FOUND if bad.model_id else Code.INTERNAL)
            assert details.startswith("trace_id 'b': ")
            assert not engine.open

    asyncio.run(scenario())


def test_after_a_failure_nothing_more_is_begun(watch: Watch) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        engine = ByPrompt(slow=[FIRST, ended.wait, *answer("slow")], late=answer("late"))
        async with served(engine) as opened:
            call = opened.predict()
            await call.write(ask("slow", "1"))
            await call.write(ask(model_id="gpt-4"))
            await watch.has_failure()
            await call.write(ask("late", "3"))
            await until(lambda: watch.num_dealt_with == 3, "the late request")
            ended.set()
            received, code, _ = await failed(call)
            assert code is Code.NOT_FOUND
            check_whole(received)
            assert text_of(received) == "aslow"
            assert len(engine.submitted) == 1

    asyncio.run(scenario())


def test_a_failure_is_told_though_the_client_would_send_more() -> None:
    async def scenario() -> None:
        async with served() as opened:
            call = opened.predict()
            await call.write(ask(model_id="gpt-4"))
            assert (await asyncio.wait_for(refused(call), PATIENCE))[0] is Code.NOT_FOUND

    asyncio.run(scenario())


def test_two_open_predictions_may_not_have_the_same_trace_id(watch: Watch) -> None:
    async def scenario() -> None:
        engine = ByPrompt(slow=[FIRST, watch.has_failure_and_all_requests, *answer("slow")])
        async with served(engine) as opened:
            received, code, _ = await failed(opened.predict([ask("slow", "t"), ask("slow", "t")]))
            assert code is Code.INVALID_ARGUMENT
            check_whole(received)
            assert len(engine.submitted) == 1

    asyncio.run(scenario())


def test_more_requests_than_a_stream_may_have_open_wait_unread(watch: Watch) -> None:
    async def scenario() -> None:
        most = 0

        async def one_waits() -> None:
            await until(lambda: watch.num_read > MAX_OPEN and most >= MAX_OPEN, "a request too many")

        class Watched(ScriptedEngine):
            async def submit(self, request: GenerationRequest) -> Stream:
                nonlocal most
                most = max(most, len(self.open) + 1)
                return await super().submit(request)

        async with served(Watched([one_waits, *answer("x")])) as opened:
            found = by_trace_id([r async for r in opened.predict([ask(trace_id=str(i)) for i in range(MAX_OPEN + 50)])])
        assert len(found) == MAX_OPEN + 50
        assert most == MAX_OPEN

    asyncio.run(scenario())


@pytest.mark.parametrize("script", [[forever], [FIRST, forever]], ids=["queued", "decoding"])
@pytest.mark.parametrize("way", ["cancel", "deadline", "hang up"])
def test_a_client_that_leaves_aborts_all_that_it_asked(way: str, script: list[Step]) -> None:
    async def scenario(deadline_s: float | None) -> bool:
        """False: the deadline came before there was anything to abort."""
        engine = ScriptedEngine(script)
        async with served(engine) as opened, grpc.aio.insecure_channel(f"127.0.0.1:{opened.server.port}") as own:
            await own.channel_ready()
            call = Client(own).predict([ask(), ask()], timeout=deadline_s)
            has_text = asyncio.create_task(call.read())
            wanted = {has_text} if script[0] is FIRST else set()
            await until(lambda: call.done() or (len(engine.submitted) == 2 and all(one.done() for one in wanted)))
            if call.done():
                await asyncio.gather(has_text, return_exceptions=True)
                return False
            assert script[0] is not FIRST or has_text.result().chunk == "a"
            if way == "cancel":
                call.cancel()
            elif way == "hang up":
                await own.close()
            await until(lambda: not engine.open)
            await asyncio.wait_for(opened.admission.empty(), PATIENCE)
            await until(lambda: call.done())
            await asyncio.gather(has_text, return_exceptions=True)
            metrics = (await opened.health()).metrics
            assert metrics["requests_aborted"] == "2"
            engine.script = answer("still here")
            check_whole(await answer_to(opened, ask()))
            return True

    deadline_s = 0.25 if way == "deadline" else None
    while not asyncio.run(scenario(deadline_s)):
        assert deadline_s is not None and deadline_s < PATIENCE
        deadline_s *= 4


def test_a_client_that_stops_reading_is_not_read_ahead_for() -> None:
    """The engine is asked for no more than fits into the windows of the connection: it stands still while the server
    answers others."""
    taken = 0

    class Endless(ScriptedEngine):
        async def submit(self, request: GenerationRequest) -> Stream:
            self.script = Counted()  # type: ignore[assignment]
            return await super().submit(request)

    class Counted:
        def __iter__(self) -> Any:
            nonlocal taken
            while True:
                taken += 1
                yield Output(text="x" * 10_000, token_ids=[1])

    async def scenario() -> None:
        engine = Endless()
        async with served(engine) as opened:
            call = opened.predict([ask()])
            await call.read()
            unchanged = before = 0
            while unchanged < 20:
                await opened.health()
                unchanged = unchanged + 1 if before == taken else 0
                before = taken
                assert taken < 2000
            other = ScriptedEngine()
            opened.admission.open(other)
            check_whole(await answer_to(opened, ask()))
            call.cancel()
            await until(lambda: not engine.open)

    asyncio.run(scenario())


def test_a_drain_lets_predictions_finish_and_takes_no_more(watch: Watch) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        engine = ScriptedEngine([FIRST, ended.wait, *answer("z")])
        async with served(engine) as opened:
            call = opened.predict()
            await call.write(ask(trace_id="1"))
            assert (await call.read()).chunk == "a"
            opened.admission.drain()
            assert (await refused(opened.predict([ask()])))[0] is Code.UNAVAILABLE
            await call.write(ask(trace_id="2"))
            await until(lambda: watch.num_failed == 2, "the second request's refusal")
            ended.set()
            received, code, details = await failed(call)
            assert code is Code.UNAVAILABLE
            assert "shutting down" in details
            assert text_of(received) == "z" and received[-1].end_of_stream
            await asyncio.wait_for(opened.admission.empty(), PATIENCE)

    asyncio.run(scenario())


def test_what_outlasts_the_drain_is_ended() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine([FIRST, FIRST, forever])
        async with served(engine, grpc_flush_interval_ms=60_000) as opened:
            call = opened.predict([ask()])
            assert (await call.read()).chunk == "a"
            opened.admission.drain()
            opened.admission.abort()
            received, code, details = await failed(call)
            assert code is Code.UNAVAILABLE
            assert "shutting down" in details
            assert text_of(received) == "a"
            assert not engine.open

    asyncio.run(scenario())
