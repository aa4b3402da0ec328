"""Bad requests over HTTP and gRPC, with a good one beside them all the time: it never notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from tests.e2e import hostile, hostile_rpc
from tests.e2e.hostile import Asked
from tests.e2e.hostile_clients import Http, Rpc, check_answer, check_status
from tests.e2e.hostile_rpc import AskedRpc
from tests.e2e.tiny_server import NAME, TinyServer
from tests.effort import EFFORT
from tests.fuzz import plan

AT_ONCE = 16

CANARY = {
    "model": NAME, "messages": [{"role": "user", "content": "Sing."}], "seed": 7, "max_tokens": 10, "ignore_eos": True,
    "logprobs": True,
}  # fmt: skip

T = TypeVar("T")


@pytest.fixture
def server(small_server: TinyServer) -> TinyServer:
    return small_server


class Canary:
    """The same good request again and again, for as long as the block lasts."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._song: list[Any] = []
        self.num_runs = 0

    async def __aenter__(self) -> Canary:
        self._song = await self._sing()
        assert len(self._song[0]["message"]["content"]) > 5
        self._singing = asyncio.create_task(self._sing_on())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._singing.cancel()
        (told,) = await asyncio.gather(self._singing, return_exceptions=True)
        if not isinstance(told, asyncio.CancelledError):
            raise told

    async def _sing(self) -> list[Any]:
        status, body = await self._http.send(Asked("/v1/chat/completions", json.dumps(CANARY).encode()))
        assert status == 200, body
        choices: list[Any] = json.loads(body)["choices"]
        return choices

    async def _sing_on(self) -> None:
        while True:
            assert await self._sing() == self._song
            self.num_runs += 1


async def each(work: Iterable[T], ask: Callable[[T], Awaitable[None]]) -> None:
    """Ask everything, some of it at the same time."""
    waiting = iter(work)

    async def ask_some() -> None:
        for one in waiting:
            await ask(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask_some())


def test_no_request_over_http_harms_the_server_or_its_neighbour(server: TinyServer) -> None:
    parameters = hostile.parameters_of(server.get("/openapi.json").json())
    assert parameters.keys() == hostile.BASES.keys(), "a route that takes a body must have its base"
    requests = [
        *hostile.alone(parameters),
        *hostile.in_pairs(parameters, random.Random(4)),
        *hostile.unreadable(),
    ]
    assert len(requests) > 5000
    requests = random.Random(4).sample(requests, min(900 * EFFORT, len(requests)))
    statuses: list[int] = []

    async def scenario() -> None:
        with Http(server.url) as http:

            async def ask(asked: Asked) -> None:
                status, body = await http.send(asked)
                check_answer(asked, status, body)
                statuses.append(status)

            async with Canary(http) as canary:
                await each(requests, ask)
            assert canary.num_runs > 5

    asyncio.run(scenario())
    assert len(statuses) == len(requests)
    assert statuses.count(200) > len(requests) / 12, "too few of them got as far as the engine"
    server.check_unharmed()


def test_no_message_over_grpc_harms_the_server_or_its_neighbour(server: TinyServer) -> None:
    rng = random.Random(4)
    messages = [*hostile_rpc.alone(), *hostile_rpc.in_pairs(rng)]
    messages += [hostile_rpc.broken(rng, method) for method in hostile_rpc.BASES for _ in range(50)]
    assert len(messages) > 700
    messages = rng.sample(messages, min(500 * EFFORT, len(messages)))
    codes: list[grpc.StatusCode] = []

    async def scenario() -> None:
        with Http(server.url) as http:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel, Canary(http) as canary:
                rpc = Rpc(channel)

                async def ask(asked: AskedRpc) -> None:
                    code, details = await rpc.ask(asked)
                    check_status(asked, code, details)
                    codes.append(code)

                await each(messages, ask)
            assert canary.num_runs > 2

    asyncio.run(scenario())
    assert codes.count(grpc.StatusCode.OK) > len(messages) / 6, "too few of them got as far as the engine"
    server.check_unharmed()


def test_a_request_can_be_sent_again_by_its_index_and_seed(server: TinyServer) -> None:
    openapi = server.get("/openapi.json").json()
    first, again = ([one.make() for one in itertools.islice(plan(openapi, 5), 15)] for _ in range(2))
    assert first == again
    assert {type(one) for one in first} == {Asked, AskedRpc}
