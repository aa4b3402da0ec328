"""Measures what joining chunks saves over gRPC: how many messages and bytes answers take with it and without.

The same greedy answers are asked for twice, of a server that sends every chunk by itself and of one as it is set.
Messages and bytes are counted where they arrive, tokens where they are made; the texts are compared.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence

from msgspec import Struct

from weft.bench.arrivals import Load
from weft.bench.datasets import DatasetSpec, dialogues
from weft.bench.generator import Generator, Run
from weft.bench.grpc_load import GrpcClient, open_channel
from weft.bench.report import environment
from weft.bench.serve import own_server
from weft.errors import Unavailable

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
    per_token: float
    """Messages with text for every token, where chunks are joined."""
    first_text_ms: float
    """How much later the first text comes where chunks are joined, in the median."""
    same_text: bool


class RpcReport(Struct, frozen=True, kw_only=True):
    flags: list[str]
    figures: list[RpcFigures]
    environment: dict[str, object]
    work: RpcWork

    @property
    def num_failures(self) -> int:
        return sum(sum(run.errors.values()) for figures in self.figures for run in (figures.alone, figures.joined))

    @property
    def same_text(self) -> bool:
        return all(figures.same_text for figures in self.figures)


Texts = list[tuple[str, str]]


async def run_rpc(flags: Sequence[str], work: RpcWork, tick: Tick = lambda _: None) -> RpcReport:
    """Start a server both ways, one after the other, with these flags of `weft serve`, and ask each for the answers."""
    alone = await _asked([*flags, "--grpc-buffer-size", "1"], work, tick)
    joined = await _asked(flags, work, tick)
    figures = [
        _figures(concurrency, one, other)
        for concurrency, one, other in zip(work.concurrencies, alone, joined, strict=True)
    ]
    return RpcReport(flags=list(flags), figures=figures, environment=environment(), work=work)


def num_requests(work: RpcWork) -> int:
    return 2 * sum(max(work.requests, concurrency) for concurrency in work.concurrencies)


async def _asked(flags: Sequence[str], work: RpcWork, tick: Tick) -> list[tuple[Run, Texts]]:
    """Return how the answers came at each concurrency, and their texts."""
    found = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        socket = f"{folder}/grpc.sock"
        unlimited = ("--max-concurrent-per-key", "0")
        async with own_server([*flags, *unlimited], grpc_socket=socket), open_channel(f"unix:{socket}") as channel:
            await _run(GrpcClient(channel, {}), work, 1, 2, lambda _: None)
            for concurrency in work.concurrencies:
                client = GrpcClient(channel, {}, keeps_text=True)
                run = await _run(client, work, concurrency, max(work.requests, concurrency), tick)
                if not run.output_tokens:
                    raise Unavailable(f"No answer came: {', '.join(run.failures)}")
                found.append((run, sorted(client.texts)))
    return found


async def _run(client: GrpcClient, work: RpcWork, concurrency: int, requests: int, tick: Tick) -> Run:
    # Other prompts at every concurrency, so that no cache helps.
    chance = random.Random(f"{work.seed} {concurrency}")
    generator = Generator(client, dialogues(work.dataset, chance), chance)
    return await generator.run(Load(requests=requests, connections=concurrency), lambda: tick(f"{concurrency} streams"))


def _figures(concurrency: int, alone: tuple[Run, Texts], joined: tuple[Run, Texts]) -> RpcFigures:
    (before, before_texts), (after, after_texts) = alone, joined
    return RpcFigures(
        concurrency=concurrency,
        alone=before,
        joined=after,
        fewer=1 - after.messages / before.messages,
        fewer_bytes=1 - after.received_bytes / before.received_bytes,
        # The last message of an answer has no text.
        per_token=(after.messages - after.succeeded) / after.output_tokens,
        first_text_ms=after.first_token_ms.p50 - before.first_token_ms.p50,
        same_text=before_texts == after_texts,
    )
