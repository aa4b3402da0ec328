"""One prediction: what is asked, what the engine is told, what comes back."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from typing import Any

import grpc
import pytest

from tests.api.clock import Clock
from tests.api.grpc.calls import answer_to, ask, check_whole, failed, refused, served, text_of
from tests.api.scripted_engine import Condition, ScriptedEngine, Step, answer, forever
from weft import logs
from weft.errors import ContextTooLong, EngineFault, Overloaded, Unavailable, WeftError
from weft.types import FinishReason, Output, SamplingParams, Usage

Code = grpc.StatusCode


def predict(engine: ScriptedEngine, request: Any, **settings: Any) -> Any:
    """All responses to one request, from a server of its own."""

    async def scenario() -> Any:
        async with served(engine, **settings) as opened:
            return await answer_to(opened, request)

    return asyncio.run(scenario())


def refusal(engine: ScriptedEngine, request: Any, **settings: Any) -> tuple[grpc.StatusCode, str]:
    async def scenario() -> tuple[grpc.StatusCode, str]:
        async with served(engine, **settings) as opened:
            return await refused(opened.predict([request]))

    return asyncio.run(scenario())


def params_told(**generation: Any) -> SamplingParams:
    engine = ScriptedEngine()
    predict(engine, ask(generation=generation))
    return engine.submitted[0].params


def test_an_answer_is_whole_and_nothing_but_the_models_text() -> None:
    responses = predict(ScriptedEngine(answer("Hel", "lo", ", wörld", " 世界")), ask(trace_id="abc"))
    check_whole(responses)
    assert text_of(responses) == "Hello, wörld 世界"
    assert responses[0].trace_id == "abc"


def test_a_trace_id_is_made_up_where_there_is_none() -> None:
    first, second = (predict(ScriptedEngine(), ask())[0].trace_id for _ in range(2))
    assert first and second and first != second


def test_the_prompt_reaches_the_engine_as_it_stands() -> None:
    engine = ScriptedEngine()
    predict(engine, ask("User: hi\n", priority=-7, worker_hint="gpu0"))
    assert bytes(engine.submitted[0].prompt).decode() == "User: hi\n"
    assert engine.submitted[0].session == "gpu0"


def test_a_long_prompt_reaches_the_engine_whole() -> None:
    engine = ScriptedEngine()
    predict(engine, ask("ä" * 5000))
    assert bytes(engine.submitted[0].prompt).decode() == "ä" * 5000


def test_without_parameters_the_servers_own_defaults_hold() -> None:
    assert params_told() == SamplingParams()
    engine = ScriptedEngine()
    predict(engine, ask())
    assert engine.submitted[0].params == SamplingParams()


def test_presence_and_not_truth_decides() -> None:
    assert params_told(temperature=0).temperature == 0
    told = params_told(max_new_tokens=7, temperature=0.25, top_p=0.5, repetition_penalty=1.5)
    assert told == SamplingParams(max_tokens=7, temperature=0.25, top_p=0.5, repetition_penalty=1.5)


@pytest.mark.parametrize(
    ("generation", "name"),
    [
        ({"max_new_tokens": 0}, "max_tokens"),
        ({"max_new_tokens": 2**32 - 1}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_a_value_that_no_model_can_honour_is_refused(generation: dict[str, Any], name: str) -> None:
    engine = ScriptedEngine()
    code, details = refusal(engine, ask(generation=generation))
    assert code is Code.INVALID_ARGUMENT
    assert name in details
    assert not engine.submitted


def test_more_tokens_than_the_context_holds_are_cut_to_what_fits() -> None:
    engine, asked = ScriptedEngine(), ask(generation={"max_new_tokens": 10**6})
    *_, last = predict(engine, asked)
    [submitted] = engine.submitted
    assert submitted.params.max_tokens == engine.model.max_model_len - len(submitted.prompt)
    assert [*last.fields_without_effect] == ["generation.max_new_tokens"]
    *_, last = predict(engine, ask(generation={"max_new_tokens": 7}))
    assert not last.fields_without_effect
    predict(engine, asked, fields="strict")
    assert engine.submitted[-1].params.max_tokens == 10**6, "the engine itself refuses it"


@pytest.mark.parametrize("name", ["", "default", "scripted"])
def test_the_served_model_has_several_names(name: str) -> None:
    check_whole(predict(ScriptedEngine(), ask(model_id=name)))


def test_the_operators_name_for_the_model_counts() -> None:
    check_whole(predict(ScriptedEngine(), ask(model_id="mine"), served_model_name="mine"))
    assert refusal(ScriptedEngine(), ask(model_id="scripted"), served_model_name="mine")[0] is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (ask(model_id="gpt-4"), Code.NOT_FOUND, "gpt-4"),
        (ask(model_id="m" * 100_000), Code.NOT_FOUND, "mmm"),
        (ask(adapter="lora"), Code.INVALID_ARGUMENT, "no adapter 'lora'"),
        (ask(""), Code.INVALID_ARGUMENT, "empty prompt"),
        (ask(trace_id="t" * 257), Code.INVALID_ARGUMENT, "trace_id"),
    ],
)
def test_what_cannot_be_is_refused(request_: Any, code: grpc.StatusCode, said: str) -> None:
    engine = ScriptedEngine()
    told, details = refusal(engine, request_)
    assert told is code
    assert said in details and len(details) < 1000
    assert not engine.submitted


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("1024 requests are waiting already."), Code.RESOURCE_EXHAUSTED),
        (Unavailable("The engine is not available: failed."), Code.UNAVAILABLE),
        (ContextTooLong("The prompt has 9000 tokens."), Code.INVALID_ARGUMENT),
        (EngineFault("The engine failed."), Code.INTERNAL),
    ],
)
def test_what_the_engine_refuses_has_its_status(error: WeftError, code: grpc.StatusCode) -> None:
    told, details = refusal(ScriptedEngine(refuse=error), ask())
    assert told is code
    assert error.message in details


@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (FinishReason.ERROR, Code.INTERNAL),
        (FinishReason.TIMEOUT, Code.DEADLINE_EXCEEDED),
        (FinishReason.REJECTED, Code.INVALID_ARGUMENT),
        (FinishReason.ABORT, Code.UNAVAILABLE),
    ],
)
def test_an_answer_that_fails_sends_its_text_then_its_status(finish: FinishReason, code: grpc.StatusCode) -> None:
    script = [Output(text=text, token_ids=[1]) for text in "abc"]

    async def scenario() -> None:
        engine = ScriptedEngine([*script, Output(finish=finish, error="So it is.")])
        async with served(engine) as opened:
            received, told, details = await failed(opened.predict([ask()]))
            assert told is code
            assert "So it is." in details
            assert text_of(received) == "abc"
            assert not any(response.end_of_stream for response in received)

    asyncio.run(scenario())


def test_a_defect_tells_no_secrets() -> None:
    engine = ScriptedEngine(
        [Output(text="a", token_ids=[1]), RuntimeError("boom in /home/secret/weft.py at 0xdeadbeef")]
    )
    code, details = refusal(engine, ask(trace_id="t-1"))
    assert code is Code.INTERNAL
    assert "boom" not in details and "secret" not in details and "Traceback" not in details
    assert "t-1" in details
    assert not engine.open


def test_a_request_that_takes_too_long_is_ended() -> None:
    engine = ScriptedEngine([Output(text="a", token_ids=[1]), forever])
    code, details = refusal(engine, ask(), request_timeout_s=0.1)
    assert code is Code.DEADLINE_EXCEEDED
    assert "0.1 s" in details
    assert not engine.open


def test_the_times_are_true_and_counted_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens in two deltas of many characters: neither characters nor messages may be what is counted."""
    usage = Usage(completion_tokens=3)
    clock = Clock()

    def passing(seconds: float) -> Condition:
        async def move() -> None:
            clock.now += seconds

        return move

    script: list[Step] = [
        passing(0.1),
        Output(text="a long first text", token_ids=[1]),
        passing(0.2),
        Output(text="and another", token_ids=[2, 3], finish=FinishReason.STOP, usage=usage),
    ]
    monkeypatch.setattr(time, "perf_counter", clock)
    last = predict(ScriptedEngine(script), ask())[-1]
    assert last.ttft_ms == pytest.approx(100)
    assert last.tokens_per_sec == pytest.approx(3 / 0.3)


def test_a_stream_without_a_request_is_refused() -> None:
    async def scenario() -> None:
        async with served() as opened:
            assert (await refused(opened.predict([])))[0] is Code.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_what_is_no_message_is_the_clients_mistake() -> None:
    async def scenario() -> None:
        async with served() as opened:
            raw = opened.channel.stream_stream("/cy.llm.AiInference/StreamPredict")
            for broken in (b"\xff\xff\xff", b"\x12\x02\xff\xfe"):
                code, details = await refused(raw([broken]))
                assert (code, details) == (Code.INVALID_ARGUMENT, "What was sent is not a StreamPredictRequest.")
            check_whole(await answer_to(opened, ask()))

    asyncio.run(scenario())


def test_a_server_whose_model_is_not_there_yet_says_so() -> None:
    async def scenario() -> None:
        async with served(opened=False) as opened:
            code, details = await refused(opened.predict([ask()]))
            assert code is Code.UNAVAILABLE and "being loaded" in details
            opened.admission.open(ScriptedEngine())
            check_whole(await answer_to(opened, ask()))

    asyncio.run(scenario())


def test_every_prediction_is_a_line_of_the_log_and_no_trace_id_adds_one() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.LineFormatter())
    logger = logging.getLogger("weft.api.grpc.stream_predict")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        predict(ScriptedEngine(), ask(trace_id="good-1"))
        predict(ScriptedEngine(), ask(trace_id="x\n2026 ERROR forged"))
        refusal(ScriptedEngine(), ask(trace_id="bad-1", model_id="gpt-4"))
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    first, second, third = written.getvalue().splitlines()
    assert "request_id=good-1 prediction status=OK tokens=12 model=scripted prompt_tokens=" in first
    assert " ttft_s=" in first and "seconds=" in first
    assert "forged" not in second
    assert "request_id=bad-1 prediction status=NOT_FOUND tokens=0 reason=" in third and "seconds=" in third


def test_predictions_are_counted_by_how_they_ended() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine) as opened:
            await answer_to(opened, ask())
            engine.script = answer("x", finish=FinishReason.LENGTH)
            await answer_to(opened, ask())
            engine.script = [Output(finish=FinishReason.ERROR)]
            await refused(opened.predict([ask()]))
            engine.refuse = Overloaded("full")
            await refused(opened.predict([ask()]))
            metrics = (await opened.health()).metrics
        assert (metrics["requests_success"], metrics["requests_failed"], metrics["requests_rejected"]) == (
            "2",
            "1",
            "1",
        )

    asyncio.run(scenario())
