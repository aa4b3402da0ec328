"""Measures gRPC: how many messages and bytes answers take with their chunks joined and without, and any server under
load.

The same greedy answers are asked for twice, through a server that sends every chunk by itself and one with the
configured buffer. Messages and bytes are counted where they arrive, tokens where they are made; the texts are compared.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from msgspec import Struct
from msgspec.structs import replace

from weft.api.grpc.grpc_server import serve_rpc
from weft.backends import start_engine
from weft.backends.contract import Engine
from weft.bench.arrivals import Load
from weft.bench.datasets import DatasetSpec, dialogues
from weft.bench.generator import Generator, Run
from weft.bench.grpc_load import GrpcClient, open_channel
from weft.bench.report import environment
from weft.errors import EngineFault
from weft.options import Config, LimitOptions
from weft.serving.admission import Admission

Tick = Callable[[str], None]


class RpcWork(Struct, frozen=True, kw_only=True):
    """The requests to send."""

    requests: int
    concurrencies: tuple[int, ...]
    dataset: DatasetSpec
    seed: int = 0


class RpcFigures(Struct, frozen=True, kw_only=True):
    """The same answers both ways, with so many streams at once."""

    concurrency: int
    alone: Run
    """The figures with every chunk in a message of its own."""
    joined: Run
    fewer: float
    """The share of the messages that joining saves."""
    fewer_bytes: float
    first_text_ms: float
    """How much later the first text comes where chunks are joined, in the median."""
    same_text: bool


class RpcReport(Struct, frozen=True, kw_only=True):
    model: str
    buffer_size: int
    flush_interval_ms: int
    slowest_flush_ms: int
    figures: list[RpcFigures]
    environment: dict[str, object]
    work: RpcWork

    @property
    def is_sound(self) -> bool:
        return all(f.same_text and not f.alone.errors and not f.joined.errors for f in self.figures)


async def run_rpc(config: Config, work: RpcWork, tick: Tick = lambda _: None) -> RpcReport:
    """Start an engine, ask for the answers both ways, and end it."""
    engine = await start_engine(config)
    try:
        alone_config = replace(config, grpc=replace(config.grpc, grpc_buffer_size=1))
        # The first answers warm the engine up; they are not counted.
        await _pass(engine, alone_config, work, 1, 2, tick)
        figures = []
        for concurrency in work.concurrencies:
            requests = max(work.requests, concurrency)
            alone, alone_texts = await _pass(engine, alone_config, work, concurrency, requests, tick)
            joined, joined_texts = await _pass(engine, config, work, concurrency, requests, tick)
            figures.append(_figures(concurrency, alone, joined, same_text=alone_texts == joined_texts))
    finally:
        await engine.close()
    return RpcReport(
        model=engine.model.name,
        buffer_size=config.grpc.grpc_buffer_size,
        flush_interval_ms=config.grpc.grpc_flush_interval_ms,
        slowest_flush_ms=config.grpc.grpc_slowest_flush_ms,
        figures=figures,
        environment=environment(),
        work=work,
    )


def num_requests(work: RpcWork) -> int:
    return 2 + 2 * sum(max(work.requests, concurrency) for concurrency in work.concurrencies)


def _figures(concurrency: int, alone: Run, joined: Run, *, same_text: bool) -> RpcFigures:
    if not alone.messages or not alone.received_bytes:
        raise EngineFault(f"No answer came: {alone.failures}")
    return RpcFigures(
        concurrency=concurrency,
        alone=alone,
        joined=joined,
        fewer=1 - joined.messages / alone.messages,
        fewer_bytes=1 - joined.received_bytes / alone.received_bytes,
        first_text_ms=joined.first_token_ms.p50 - alone.first_token_ms.p50,
        same_text=same_text,
    )


async def _pass(
    engine: Engine, config: Config, work: RpcWork, concurrency: int, requests: int, tick: Tick
) -> tuple[Run, list[tuple[str, str]]]:
    chance = random.Random(work.seed)
    async with _served(engine, config) as address, open_channel(address) as channel:
        client = GrpcClient(channel, {"temperature": 0.0}, keeps_text=True)
        generator = Generator(client, dialogues(work.dataset, chance), chance)
        load = Load(requests=requests, connections=concurrency)
        run = await generator.run(load, lambda: tick(f"{concurrency} streams"))
    return run, sorted(client.texts)


@asynccontextmanager
async def _served(engine: Engine, config: Config) -> AsyncIterator[str]:
    """Serve an engine over gRPC alone, on a free port of this machine, and yield the address."""
    config = replace(
        config,
        server=replace(config.server, host="127.0.0.1", api_key=[], api_key_file=""),
        limits=LimitOptions(max_concurrent_per_key=0),
        grpc=replace(
            config.grpc, grpc_port=0, grpc_socket="", grpc_tls_cert="", grpc_tls_key="", grpc_tls_client_ca=""
        ),
    )
    admission = Admission(config)
    admission.open(engine)
    server = await serve_rpc(admission, config)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
