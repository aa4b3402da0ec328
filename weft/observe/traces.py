"""Records OpenTelemetry spans of every request. They are sent from a thread, so that no request waits for them.

At an edge a request's span is the parent of one at every replica that has it, and that of one for every engine process
there. The packages are an extra (`otel`), and are imported only when traces are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import Struct

from weft.errors import ConfigError
from weft.types import Arrival, FinishReason, Request, TraceContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span, Tracer

SERVICE = "weft"
MAX_ATTRIBUTE_CHARS = 256
"""Texts of an edge that are longer are cut."""

_parent: ContextVar[str] = ContextVar("weft_traceparent", default="")
"""The client's span that the running task serves, as the traceparent header names it."""


class RequestOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of one request at the engine. Seconds are counted from its arrival."""

    model: str
    request_id: str
    tenant: str
    choices: int
    prompt_tokens: int
    completion_tokens: int
    queue_seconds: float | None
    """Seconds in the queue; None when no token came: it may have waited to the end."""
    first_token_seconds: float | None
    seconds: float
    finish: str
    """The finish reasons of the choices, joined."""


def take_in(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Remember the client's span that the request's headers or metadata name. Header names are in lower case."""
    found = [value for name, value in headers if name == "traceparent" and isinstance(value, str)]
    _parent.set(found[0] if len(found) == 1 else "")


class RequestSpan:
    """The span of a request that is under way."""

    def __init__(self, span: Span, began_ns: int) -> None:
        self.span = span
        self.began_ns = began_ns

    @property
    def trace(self) -> TraceContext | None:
        """The context that the request carries to its replica; None where it is not sampled."""
        context = self.span.get_span_context()
        if not context.trace_flags.sampled:
            return None
        return TraceContext(f"00-{context.trace_id:032x}-{context.span_id:016x}-01")


class ReplicaSpan:
    """The span of a request at a replica. Inside is one for every engine process that brought the request anything: one
    that dies is replaced, and the next goes on with it."""

    def __init__(self, tracer: Tracer, parent: Context, request: Request, trace: TraceContext) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = tracer
        self._where = {"weft.replica": trace.replica[:MAX_ATTRIBUTE_CHARS]}
        self._last_ns = time.time_ns()
        self._span = tracer.start_span(
            "replica",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._last_ns,
            attributes={
                **self._where,
                "weft.request_id": request.request_id[:MAX_ATTRIBUTE_CHARS],
                "weft.continuation": trace.moves > 0,
                "weft.moves": trace.moves,
                "weft.continued_tokens": len(request.output_token_ids),
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            },
        )
        self._inside = set_span_in_context(self._span)
        self._engine: Span | None = None
        self._engine_pid: int | None = None
        self._num_tokens = self._engine_tokens = 0

    def saw(self, arrival: Arrival, engine_pid: int | None) -> None:
        """Take note of what an engine process brought; None for the process: there is none now."""
        if self._engine is None or engine_pid not in (None, self._engine_pid):
            self._end_engine()
            self._engine_pid = engine_pid
            attributes: dict[str, str | int] = {**self._where, "weft.engine.pid": engine_pid or 0}
            self._engine = self._tracer.start_span(
                "engine", context=self._inside, start_time=self._last_ns, attributes=attributes
            )
        self._last_ns = time.time_ns()
        if isinstance(arrival, int):
            self._engine_tokens += 1
            return
        self._engine_tokens += len(arrival.token_ids)
        if arrival.queue_seconds is not None:
            self._engine.set_attribute("weft.queue_seconds", arrival.queue_seconds)
        if arrival.cached_tokens is not None:
            self._engine.set_attribute("weft.cached_tokens", arrival.cached_tokens)
        if arrival.finish is not None:
            self.end(arrival.finish)

    def end(self, finish: FinishReason) -> None:
        self._end_engine()
        self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        self._span.set_attribute("gen_ai.response.finish_reasons", finish)
        self._span.end()

    def _end_engine(self) -> None:
        if self._engine is not None:
            self._engine.set_attribute("gen_ai.usage.output_tokens", self._engine_tokens)
            self._engine.end(self._last_ns)
        self._num_tokens += self._engine_tokens
        self._engine, self._engine_tokens = None, 0


class Traces:
    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, arrived: float) -> RequestSpan:
        """Begin the span of a request that arrived then (`time.perf_counter`), inside the client's own."""
        from opentelemetry.trace import SpanKind

        began = time.time_ns() - _ns(time.perf_counter() - arrived)
        # What is no traceparent begins a trace of its own.
        context = self._propagator.extract({"traceparent": _parent.get()})
        span = self._tracer.start_span("generate", context=context, kind=SpanKind.SERVER, start_time=began)
        return RequestSpan(span, began)

    def begin_at_replica(self, request: Request) -> ReplicaSpan | None:
        """Begin the span of a request that an edge sent; None where the edge does not trace it."""
        if request.trace is None:
            return None
        parent = self._propagator.extract({"traceparent": request.trace.traceparent[:MAX_ATTRIBUTE_CHARS]})
        return ReplicaSpan(self._tracer, parent, request, request.trace)

    def record(self, outcome: RequestOutcome, begun: RequestSpan) -> None:
        """End the span of a request, with a span inside for the time in the queue and one for the time to the first
        token. They are sent later, from another thread."""
        from opentelemetry.trace import set_span_in_context

        request, began = begun.span, begun.began_ns
        end = began + _ns(outcome.seconds)
        request.set_attributes(_attributes(outcome))
        inside = set_span_in_context(request)
        if outcome.queue_seconds is not None:
            self._span("queue", inside, began, began + _ns(outcome.queue_seconds))
        if outcome.first_token_seconds is not None:
            first_token = began + _ns(outcome.first_token_seconds)
            self._span("first token", inside, began + _ns(outcome.queue_seconds or 0.0), first_token)
            self._span("answer", inside, first_token, end)
        request.end(end)

    def close(self) -> None:
        """Send the spans that are not sent yet."""
        self._provider.shutdown()

    def _span(self, name: str, context: Context, began_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, context=context, start_time=began_ns).end(end_ns)


def open_traces(endpoint: str) -> Traces:
    """Open an exporter to the endpoint. Raises ConfigError when the packages are not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otlp-endpoint needs packages that are not installed.",
            hint="Install them: pip install 'weft-serve[otel]'.",
        ) from error
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _attributes(outcome: RequestOutcome) -> dict[str, str | int]:
    """Return a span's attributes, named by OpenTelemetry's conventions for generative models where there are any."""
    return {
        "gen_ai.request.model": outcome.model,
        "gen_ai.usage.input_tokens": outcome.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.completion_tokens,
        "gen_ai.response.finish_reasons": outcome.finish,
        "gen_ai.request.choice.count": outcome.choices,
        "weft.request_id": outcome.request_id,
        "weft.tenant": outcome.tenant,
    }
