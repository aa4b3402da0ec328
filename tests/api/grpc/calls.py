"""A gRPC server over an engine, and a client of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio

from tests.api.scripted_engine import ScriptedEngine
from weft.api.grpc.ai_service_pb2 import (
    ControlMessage,
    GenerationParameters,
    StreamMetadata,
    StreamPredictRequest,
    StreamPredictResponse,
    WorkerHealthRequest,
    WorkerHealthResponse,
)
from weft.api.grpc.grpc_server import RpcServer, serve_rpc
from weft.backends.contract import Engine
from weft.config import load
from weft.serving.admission import Admission

STREAM_PREDICT = "/cy.llm.AiInference/StreamPredict"
CONTROL = "/cy.llm.AiInference/Control"
HEALTH = "/cy.llm.AiInference/Health"

Call = grpc.aio.StreamStreamCall[Any, StreamPredictResponse]
Requests = Iterable[StreamPredictRequest] | AsyncIterable[StreamPredictRequest]


class Client:
    """The service's methods on a channel."""

    def __init__(self, channel: grpc.aio.Channel, key: str = "") -> None:
        self.channel = channel
        self._metadata = [("authorization", f"Bearer {key}")] if key else []

    def predict(self, requests: Requests | None = None, **options: Any) -> Call:
        method = self.channel.stream_stream(
            STREAM_PREDICT, StreamPredictRequest.SerializeToString, StreamPredictResponse.FromString
        )
        return method(requests, metadata=self._metadata, **options)

    async def control(self, command: str, **fields: Any) -> ControlMessage:
        method = self.channel.unary_unary(CONTROL, ControlMessage.SerializeToString, ControlMessage.FromString)
        return await method(ControlMessage(command=command, **fields), metadata=self._metadata)

    async def health(self) -> WorkerHealthResponse:
        method = self.channel.unary_unary(
            HEALTH, WorkerHealthRequest.SerializeToString, WorkerHealthResponse.FromString
        )
        return await method(WorkerHealthRequest(), metadata=self._metadata)


class ServedClient(Client):
    def __init__(self, channel: grpc.aio.Channel, admission: Admission, server: RpcServer) -> None:
        super().__init__(channel)
        self.admission = admission
        self.server = server


@contextlib.asynccontextmanager
async def served(engine: Engine | None = None, *, opened: bool = True, **settings: Any) -> AsyncIterator[ServedClient]:
    config = load({"grpc_port": 0, **settings}, env={})
    admission = Admission(config)
    if opened:
        admission.open(engine or ScriptedEngine())
    server = await serve_rpc(admission, config)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield ServedClient(channel, admission, server)
    finally:
        await server.stop(0)


def ask(prompt: str = "hi", trace_id: str = "", *, generation: dict[str, Any] | None = None, **fields: Any) -> Any:
    return StreamPredictRequest(
        prompt=prompt,
        metadata=StreamMetadata(trace_id=trace_id),
        generation=None if generation is None else GenerationParameters(**generation),
        **fields,
    )


async def answer_to(client: Client, request: StreamPredictRequest) -> list[StreamPredictResponse]:
    """All responses to one request, as a client of old sends it: alone on its stream."""
    return [response async for response in client.predict([request])]


def text_of(responses: Iterable[StreamPredictResponse]) -> str:
    return "".join(response.chunk for response in responses)


def check_whole(responses: list[StreamPredictResponse]) -> None:
    """What every whole answer must be."""
    assert [response.index for response in responses] == list(range(len(responses)))
    assert [response.end_of_stream for response in responses] == [False] * (len(responses) - 1) + [True]
    assert not responses[-1].chunk
    assert all(response.chunk for response in responses[:-1])
    assert len({response.trace_id for response in responses}) == 1


async def failed(call: Call) -> tuple[list[StreamPredictResponse], grpc.StatusCode, str]:
    """What a call brought before it failed, and the status that it failed with."""
    received = []
    try:
        while (response := await call.read()) != grpc.aio.EOF:
            received.append(response)
    except grpc.aio.AioRpcError as error:
        return received, error.code(), error.details() or ""
    raise AssertionError("the call went well")


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status that a call ends with, which must be an error."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("the call went well")
