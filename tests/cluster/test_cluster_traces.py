"""A request of an edge is one trace, from the client's span to the engine that works on it, wherever it moves."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.cluster.replicas import PATIENT, Edge, ScriptedReplica
from tests.e2e.tiny_server import NAME
from tests.waiting import PATIENCE, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": NAME, "prompt": "Weave", "max_tokens": 40, "ignore_eos": True}


class Collector(ThreadingHTTPServer):
    """A sink of OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), _Sink)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def named(self, name: str, trace: str = TRACE) -> list[Span]:
        return [span for span in self.spans if span.name == name and span.trace_id.hex() == trace]

    def wait_for(self, name: str, count: int = 1) -> list[Span]:
        wait_until(lambda: len(self.named(name)) >= count, f"{count} spans {name}")
        return self.named(name)


class _Sink(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    # The exporters of the servers send soon, and are not compressed, whatever this machine's settings are.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join(PATIENCE)


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def holders(edge: Edge) -> list[str]:
    """The replicas that have requests in their steps."""
    return re.findall(r'^weft_replica_requests_running{.*replica="([^"]+)".*} [1-9]', edge.get("/metrics").text, re.M)


def test_one_trace_goes_through_edge_replica_and_engine_and_on_when_a_replica_dies(
    long_model: Path, cluster_key: Path, collector: Collector
) -> None:
    traced = ("--otlp-endpoint", collector.endpoint, *PATIENT)
    with ExitStack() as stack:
        replicas = [stack.enter_context(ScriptedReplica(long_model, cluster_key, *traced)) for _ in range(2)]
        edge = Edge(long_model, cluster_key, [one.address for one in replicas], *traced)
        stack.enter_context(edge)
        edge.wait_connected(2)

        def ask(flags: str, **fields: Any) -> AbstractContextManager[httpx.Response]:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
            url = edge.url + "/v1/completions"
            return httpx.stream("POST", url, json=BODY | fields, headers=headers, timeout=PATIENCE)

        for flags in ("00", "01"):
            with ask(flags) as answer:
                assert answer.read() and answer.status_code == 200
        (whole,), (at_replica,), (engine,) = map(collector.wait_for, ("generate", "replica", "engine"))
        assert whole.parent_span_id.hex() == PARENT
        assert at_replica.parent_span_id == whole.span_id and engine.parent_span_id == at_replica.span_id
        told = attributes(at_replica)
        first = next(one for one in replicas if one.address == told["weft.replica"])
        assert (told["weft.continuation"], told["gen_ai.usage.output_tokens"]) == (False, 40)
        assert attributes(engine)["weft.replica"] == first.address
        assert attributes(engine)["weft.engine.pid"] != first.process.pid
        assert whole.start_time_unix_nano <= at_replica.start_time_unix_nano <= engine.start_time_unix_nano

        # The edge hears of a replica's steps a while later: it would else still know the one of the request before.
        wait_until(lambda: not holders(edge), "idle replicas")
        with ask("01", max_tokens=10_000, stream=True) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_until(lambda: bool(holders(edge)), "a replica with the request")
            [holder] = holders(edge)
            lost, left = sorted(replicas, key=lambda one: one.address != holder)
            lost.kill()
            wait_until(lambda: holders(edge) == [left.address], "the other replica with the request")
            next(lines)
        again = collector.wait_for("replica", 2)[-1]
        assert again.parent_span_id == collector.wait_for("generate", 2)[-1].span_id
        told = attributes(again)
        assert told["weft.replica"] == left.address
        assert (told["weft.continuation"], told["weft.moves"]) == (True, 1)
        assert told["weft.continued_tokens"] > 0 and told["gen_ai.response.finish_reasons"] == "abort"
        assert collector.wait_for("engine", 2)[-1].parent_span_id == again.span_id
