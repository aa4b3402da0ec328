"""Records an OpenTelemetry span for every request, made when the request is over, so that no request waits for it.

The packages are an extra (`otel`), and are imported only when traces are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING

from msgspec import Struct

from weft.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

SERVICE = "weft"

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


class Traces:
    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, outcome: RequestOutcome) -> None:
        """Record a span from arrival to end, with a span inside for the time in the queue and one for the time to the
        first token. They are sent later, from another thread."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        end = time.time_ns()
        began = end - _ns(outcome.seconds)
        # What is no traceparent begins a trace of its own.
        context = self._propagator.extract({"traceparent": _parent.get()})
        request = self._tracer.start_span(
            "generate", context=context, kind=SpanKind.SERVER, start_time=began, attributes=_attributes(outcome)
        )
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
