"""Counts the messages of an answer over gRPC, with its chunks joined and without.

The same greedy answers are asked for twice, through a server that sends every chunk by itself and one with the
configured buffer. Messages are counted where they arrive, tokens where they are made, and the texts are compared.
"""

from __future__ import annotations

import asyncio
import time

import grpc.aio
from msgspec import Struct
from msgspec.structs import replace

from weft.api.grpc.ai_service_pb2 import (
    GenerationParameters,
    StreamMetadata,
    StreamPredictRequest,
    StreamPredictResponse,
)
from weft.api.grpc.grpc_server import serve_rpc
from weft.api.grpc.inference import SERVICE_NAME
from weft.backends import start_engine
from weft.backends.contract import Engine
from weft.options import Config, LimitOptions
from weft.serving.admission import Admission

PROMPTS = ("The history of the sea is", "One, two, three, four,", "A recipe for bread begins with", "In the beginning")


class RpcWork(Struct, frozen=True, kw_only=True):
    """The requests to send."""

    requests: int
    concurrency: int
    output_tokens: int


class RpcFigures(Struct, frozen=True, kw_only=True):
    """The figures of all answers through one server."""

    buffer_size: int
    flush_interval_ms: int
    tokens: int
    messages: int
    seconds: float
    first_text_ms: float
    """Milliseconds from a request to its first text, on average."""


class RpcReport(Struct, frozen=True, kw_only=True):
    model: str
    work: RpcWork
    alone: RpcFigures
    """The figures with every chunk in a message of its own."""
    joined: RpcFigures
    fewer: float
    """The share of the messages that joining saves."""
    same_text: bool


async def run_rpc(config: Config, work: RpcWork) -> RpcReport:
    """Start an engine, ask for the answers both ways, and end it."""
    engine = await start_engine(config)
    try:
        alone_config = replace(config, grpc=replace(config.grpc, grpc_buffer_size=1))
        # The first answers warm the engine up; they are not counted.
        await _pass(engine, alone_config, replace(work, requests=work.concurrency))
        alone, alone_texts = await _pass(engine, alone_config, work)
        joined, joined_texts = await _pass(engine, config, work)
    finally:
        await engine.close()
    return RpcReport(
        model=engine.model.name,
        work=work,
        alone=alone,
        joined=joined,
        fewer=1 - joined.messages / alone.messages,
        same_text=alone_texts == joined_texts,
    )


class _Answer(Struct):
    text: str = ""
    messages: int = 0
    first_text_s: float = 0.0


async def _pass(engine: Engine, config: Config, work: RpcWork) -> tuple[RpcFigures, list[str]]:
    config = replace(
        config,
        server=replace(config.server, host="127.0.0.1", api_key=[], api_key_file=""),
        limits=LimitOptions(),
        grpc=replace(
            config.grpc, grpc_port=0, grpc_socket="", grpc_tls_cert="", grpc_tls_key="", grpc_tls_client_ca=""
        ),
    )
    admission = Admission(config)
    admission.open(engine)
    server = await serve_rpc(admission, config)
    tokens_before = engine.stats().generation_tokens
    began = time.perf_counter()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answers = await _ask_all(channel, work)
    finally:
        await server.stop(0)
    figures = RpcFigures(
        buffer_size=config.grpc.grpc_buffer_size,
        flush_interval_ms=config.grpc.grpc_flush_interval_ms,
        tokens=engine.stats().generation_tokens - tokens_before,
        messages=sum(answer.messages for answer in answers),
        seconds=time.perf_counter() - began,
        first_text_ms=1000 * sum(answer.first_text_s for answer in answers) / len(answers),
    )
    return figures, [answer.text for answer in answers]


async def _ask_all(channel: grpc.aio.Channel, work: RpcWork) -> list[_Answer]:
    predict = channel.stream_stream(
        f"/{SERVICE_NAME}/StreamPredict", StreamPredictRequest.SerializeToString, StreamPredictResponse.FromString
    )
    turns = asyncio.Semaphore(work.concurrency)

    async def ask(number: int) -> _Answer:
        request = StreamPredictRequest(
            prompt=PROMPTS[number % len(PROMPTS)],
            generation=GenerationParameters(temperature=0, max_new_tokens=work.output_tokens),
            metadata=StreamMetadata(trace_id=str(number)),
        )
        answer = _Answer()
        async with turns:
            began = time.perf_counter()
            async for response in predict(iter([request])):
                answer.messages += 1
                answer.text += response.chunk
                if response.index == 0:
                    answer.first_text_s = time.perf_counter() - began
        return answer

    return await asyncio.gather(*map(ask, range(work.requests)))
