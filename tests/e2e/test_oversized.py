"""Requests that are too much in one field, from a tenant with an ordinary key: each is refused, and the stream of
another tenant beside it does not notice. `make test` tries a sample, `make fuzz` the whole corpus."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio
import pytest

from tests.e2e.canary import TRIES, Canary, Memory, noticed
from tests.e2e.hostile_clients import Http, Rpc, check_answer, check_status
from tests.e2e.oversized import UNKNOWN, TooMuch, TooMuchRpc, corpus, rpc_corpus
from tests.e2e.tiny_server import GuardedServer
from tests.effort import EFFORT
from tests.waiting import wait_until
from weft.api.field_rules import RULES

SIZES = (100_000, 2 << 20, 31 << 20)
RPC_SIZES = (300_000, 3 << 20)
SAMPLE = 5 * EFFORT
MAX_GROWTH_MB = 256
MAX_ERROR_BYTES = 4096
MAX_STALL_S = 1.0
"""Of the event loop, by the server's own watchdog."""
WITHOUT_EFFECT = {"user"} | {name for rules in RULES.values() for name, rule in rules.items() if rule.possible}
LARGE = {"regex", "chat_template_kwargs", "tokens"}
"""A grammar, a template's variables and tokens to be made text may be large; limits of their own bound them."""
WITHOUT_EFFECT_RPC = {UNKNOWN, "tenant", "player_id", "locale"}
TOLD_OTHERWISE = {("Control", ("command",)), ("Health", ("trace_id",))}
"""Control answers OK with an error inside, and Health does not look at what it is sent."""

NUM_WARM = 8
"""gRPC keeps the buffers of its first large messages."""

AnyTooMuch = TypeVar("AnyTooMuch", TooMuch, TooMuchRpc)


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tiny_image_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GuardedServer]:
    with GuardedServer(tiny_model, tiny_image_model, tmp_path_factory.mktemp("keys") / "keys") as server:
        yield server


@pytest.fixture(scope="module")
def canary(server: GuardedServer) -> Iterator[Canary]:
    with Canary(server.url, "good", server.process.pid) as canary:
        yield canary


async def check_unnoticed(
    whole: Sequence[AnyTooMuch],
    ask: Callable[[AnyTooMuch], Awaitable[None]],
    server: GuardedServer,
    canary: Canary,
) -> None:
    memory = Memory(server.process.pid)
    before = memory.now()
    for too_much in random.Random(15).sample(whole, min(SAMPLE, len(whole))):
        seen = await noticed(partial(ask, too_much), canary, memory)
        assert seen.is_short, (
            f"{too_much}: the server computed for {seen.computed_ms:.0f} ms between two pieces, {TRIES} times"
        )
        assert seen.growth_mb <= MAX_GROWTH_MB, f"{too_much}: {seen.growth_mb:.0f} MB more"
    wait_until(lambda: memory.now() <= 1.1 * before, "its memory comes back")
    assert server.longest_stall() < MAX_STALL_S, f"stalls of the event loop, by seconds: {server.stalls()}"
    server.check_alive()


def test_over_http(server: GuardedServer, canary: Canary) -> None:
    whole = corpus(server.get("/openapi.json").json(), SIZES)
    assert len(whole) > 20_000

    async def scenario() -> None:
        with Http(server.url, "bad") as http:

            async def ask(too_much: TooMuch) -> None:
                asked = too_much.asked()
                status, body = await http.send(asked)
                check_answer(asked, status, body)
                if status == 200:
                    assert (WITHOUT_EFFECT | LARGE) & {*too_much.place}, f"{too_much} was taken: {body[:300]}"
                else:
                    assert status < 500 and len(body) <= MAX_ERROR_BYTES, f"{too_much}: {status}, {len(body)} bytes"

            await check_unnoticed(whole, ask, server, canary)

    asyncio.run(scenario())


def test_over_grpc(server: GuardedServer, canary: Canary) -> None:
    whole = rpc_corpus(RPC_SIZES)

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel:
            rpc = Rpc(channel, "bad")

            async def ask(too_much: TooMuchRpc) -> None:
                asked = too_much.asked()
                code, details = await rpc.ask(asked)
                check_status(asked, code, details)
                if code is grpc.StatusCode.OK:
                    is_legal = too_much.place[-1] in WITHOUT_EFFECT_RPC
                    assert is_legal or (too_much.method, too_much.place) in TOLD_OTHERWISE, f"{too_much} was taken"
                else:
                    assert len(details) <= MAX_ERROR_BYTES, f"{too_much}: {len(details)} characters"

            for too_much in [one for one in whole if one.size == max(RPC_SIZES)][:NUM_WARM]:
                await ask(too_much)
            await check_unnoticed(whole, ask, server, canary)

    asyncio.run(scenario())
