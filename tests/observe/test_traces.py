"""Every request gets a span, part of the client's own trace where it has one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests import virtual_time
from tests.api.grpc.calls import ask, served
from tests.api.http import COMPLETIONS, PROMPT, request_app
from tests.api.scripted_engine import ScriptedEngine, Step, answer
from weft.api.app import build_app
from weft.config import load
from weft.errors import ConfigError, EngineFault
from weft.observe.traces import Traces, open_traces
from weft.serving import admission
from weft.types import Event, FinishReason, Output, Request, SamplingParams, TraceContext

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SCRIPT: list[Step] = [0.06, Output(text="ab", token_ids=[1, 2], queue_seconds=0.02), 0.03, *answer("c")]
WITH_TRACES = {"otlp_endpoint": "http://collector/v1/traces"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(admission, "open_traces", lambda endpoint: traces)
    yield exporter
    traces.close()


def post(script: list[Step], headers: dict[str, str] | None = None, **fields: Any) -> int:
    app = build_app(ScriptedEngine(script), load(WITH_TRACES, env={}))
    body = PROMPT | fields
    return request_app(app, "POST", COMPLETIONS, run=virtual_time.run, json=body, headers=headers).status_code


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_s_stages(exporter: InMemorySpanExporter) -> None:
    assert post(SCRIPT, {"traceparent": TRACEPARENT, "x-request-id": "r-1"}) == 200
    spans = by_name(exporter)
    assert spans.keys() == {"generate", "queue", "first token", "answer"}
    whole = spans["generate"]
    assert whole.parent is not None and whole.context is not None
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    for name in ("queue", "first token", "answer"):
        parent = spans[name].parent
        assert parent is not None and parent.span_id == whole.context.span_id
    assert seconds(spans["queue"]) == pytest.approx(0.02, abs=1e-4)
    assert seconds(spans["first token"]) == pytest.approx(0.06 - 0.02, abs=1e-4)
    assert seconds(spans["answer"]) == pytest.approx(0.03, abs=1e-4)
    assert spans["first token"].end_time == spans["answer"].start_time
    assert seconds(whole) == pytest.approx(sum(seconds(span) for span in spans.values()) - seconds(whole), abs=1e-3)
    assert whole.attributes is not None
    assert dict(whole.attributes) == {
        "gen_ai.request.model": "scripted",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": "stop",
        "gen_ai.request.choice.count": 1,
        "weft.request_id": "r-1",
        "weft.tenant": "",
    }
    assert whole.resource.attributes["service.name"] == "weft"


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
def test_what_is_no_traceparent_begins_a_trace(exporter: InMemorySpanExporter, traceparent: str) -> None:
    assert post(SCRIPT, {"traceparent": traceparent}) == 200
    assert by_name(exporter)["generate"].parent is None


def test_a_client_that_does_not_sample_is_obeyed(exporter: InMemorySpanExporter) -> None:
    assert post(SCRIPT, {"traceparent": TRACEPARENT[:-1] + "0"}) == 200
    assert not exporter.get_finished_spans()


def test_a_failure_has_its_span(exporter: InMemorySpanExporter) -> None:
    assert post([EngineFault("broken")]) == 500
    span = by_name(exporter)["generate"]
    assert span.attributes is not None and span.attributes["gen_ai.response.finish_reasons"] == "error"


def test_predictions_have_spans_too(exporter: InMemorySpanExporter) -> None:
    async def scenario() -> None:
        async with served(ScriptedEngine(), **WITH_TRACES) as opened:
            method = opened.channel.stream_stream("/cy.llm.AiInference/StreamPredict")
            call = method([ask(trace_id="t-1").SerializeToString()], metadata=[("traceparent", TRACEPARENT)])
            assert [one async for one in call]

    asyncio.run(scenario())
    span = by_name(exporter)["generate"]
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    assert span.attributes is not None and span.attributes["weft.request_id"] == "t-1"


def at_replica(traceparent: str) -> Request:
    trace = TraceContext(traceparent, "10.0.0.7:9400", moves=2)
    params = SamplingParams(max_tokens=9, seed=1)
    return Request(request_id="r", prompt_token_ids=[1, 2], params=params, output_token_ids=[3], trace=trace)


def test_every_engine_that_worked_on_a_request_has_a_span_at_its_replica() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    span = traces.begin_at_replica(at_replica(TRACEPARENT))
    assert span is not None
    span.saw(Event(request_id="r", token_ids=[4], cached_tokens=1, queue_seconds=0.5), 100)
    span.saw(5, 100)
    span.saw(6, 200)
    span.saw(Event(request_id="r", finish=FinishReason.ERROR, error="There is no engine any more."), None)
    first, second, whole = exporter.get_finished_spans()
    assert [one.name for one in (first, second, whole)] == ["engine", "engine", "replica"]
    assert whole.context is not None and whole.parent is not None and f"{whole.parent.span_id:016x}" == PARENT
    assert all(one.parent is not None and one.parent.span_id == whole.context.span_id for one in (first, second))
    engines = [dict(one.attributes or {}) for one in (first, second)]
    assert [one["weft.engine.pid"] for one in engines] == [100, 200]
    assert [one["gen_ai.usage.output_tokens"] for one in engines] == [2, 1]
    assert engines[0]["weft.queue_seconds"] == 0.5 and engines[0]["weft.cached_tokens"] == 1
    assert dict(whole.attributes or {}) == {
        "weft.replica": "10.0.0.7:9400",
        "weft.request_id": "r",
        "weft.continuation": True,
        "weft.moves": 2,
        "weft.continued_tokens": 1,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": "error",
    }
    traces.close()


def test_what_an_edge_sends_is_no_traceparent() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(SimpleSpanProcessor(exporter))
    span = traces.begin_at_replica(at_replica("x" * 10**6))
    assert span is not None
    span.end(FinishReason.ABORT)
    assert [one.parent for one in exporter.get_finished_spans()] == [None]
    assert traces.begin_at_replica(replace(at_replica(TRACEPARENT), trace=None)) is None
    traces.close()


def test_without_an_endpoint_there_are_none() -> None:
    assert admission.Admission(load(env={})).traces is None


def test_missing_packages_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"weft-serve\[otel\]"):
        open_traces("http://collector")


def test_the_packages_are_loaded_only_when_they_are_wanted() -> None:
    code = "import sys, weft.api.app; print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
