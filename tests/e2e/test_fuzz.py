"""Bad requests over both doors, with a good one beside them all the time: it never notices."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from tests.api.grpc.calls import CONTROL, STREAM_PREDICT, check_whole
from tests.e2e import hostile, hostile_rpc
from tests.e2e.hostile import Asked
from tests.e2e.tiny_server import NAME, TinyServer
from tests.effort import EFFORT
from tests.waiting import PATIENCE
from weft.api.grpc.ai_service_pb2 import ControlMessage, StreamPredictResponse
from weft.bench.http import Address, Connection

AT_ONCE = 16

CANARY = {
    "model": NAME, "messages": [{"role": "user", "content": "Sing."}], "seed": 7, "max_tokens": 20, "ignore_eos": True,
    "logprobs": True,
}  # fmt: skip

DOCUMENTED = {200, 400, 404, 413, 429, 503}
GOOD_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
PRIVATE = re.compile(r"Traceback|0x[0-9a-fA-F]{6,}|\.py\b|site-packages")
LAST_EVENTS = (
    "[DONE]",
    '"message_stop"',
    '"response.completed"',
    '"response.incomplete"',
    '"image_generation.completed"',
)

T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[TinyServer]:
    """`python -O`: no check may be an assert."""
    flags = ("--max-model-len", "128", "--kv-cache-memory-mb", "8", "--tool-style", "hermes")
    with TinyServer(tiny_model, *flags, env={"PYTHONOPTIMIZE": "1"}) as server:
        yield server
        server.check_unharmed()


class Http:
    def __init__(self, server: TinyServer) -> None:
        self._address = Address.parse(server.url)
        self._idle: list[Connection] = []

    async def post(self, asked: Asked) -> tuple[int, str]:
        connection = self._idle.pop() if self._idle else await Connection.open(self._address)
        pieces: list[bytes] = []
        try:
            status = await asyncio.wait_for(
                connection.ask(self._address.request("POST", asked.path, asked.body), pieces.append), PATIENCE
            )
        except (TimeoutError, ConnectionError) as error:
            raise AssertionError(f"{asked}\nbrought {error!r}") from error
        if connection.is_open:
            self._idle.append(connection)
        return status, b"".join(pieces).decode()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


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
        status, body = await self._http.post(Asked("/v1/chat/completions", json.dumps(CANARY).encode()))
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


def check_answer(asked: Asked, status: int, body: str) -> None:
    told = f"{asked}\n{status} {body[:1000]!r}"
    assert status in DOCUMENTED, told
    if status != 200:
        assert not PRIVATE.search(body), told
        assert json.loads(body)["error"]["message"], told
    elif body.startswith(("data:", "event:")):
        last = [line for line in body.splitlines() if line.startswith("data:")][-1]
        assert any(end in last for end in LAST_EVENTS), told
        assert "server_error" not in body and "api_error" not in body, told
    else:
        json.loads(body)


def test_no_request_over_http_harms_the_server_or_its_neighbour(server: TinyServer) -> None:
    parameters = hostile.parameters_of(server.get("/openapi.json").json())
    assert parameters.keys() == hostile.BASES.keys(), "a route that takes a body must have its base"
    requests = [
        *hostile.alone(parameters),
        *hostile.in_pairs(parameters, random.Random(4)),
        *hostile.unreadable(),
    ]
    assert len(requests) > 5000
    requests = random.Random(4).sample(requests, min(2500 * EFFORT, len(requests)))
    statuses: list[int] = []

    async def scenario() -> None:
        http = Http(server)

        async def ask(asked: Asked) -> None:
            status, body = await http.post(asked)
            check_answer(asked, status, body)
            statuses.append(status)

        async with Canary(http) as canary:
            await each(requests, ask)
        assert canary.num_runs > 5
        http.close()

    asyncio.run(scenario())
    assert len(statuses) == len(requests)
    assert statuses.count(200) > len(requests) / 12, "too few of them got as far as the engine"
    server.check_unharmed()


def test_no_message_over_grpc_harms_the_server_or_its_neighbour(server: TinyServer) -> None:
    rng = random.Random(4)
    predictions = [*hostile_rpc.alone(), *hostile_rpc.in_pairs(rng, 4), *hostile_rpc.broken(rng, 50)]
    commands = [*hostile_rpc.commands(), *hostile_rpc.broken(rng, 20)]
    assert len(predictions) + len(commands) > 500
    num_whole = 0

    async def scenario(channel: grpc.aio.Channel) -> None:
        as_it_is: Callable[[bytes], bytes] = bytes
        predict = channel.stream_stream(STREAM_PREDICT, as_it_is, StreamPredictResponse.FromString)
        control = channel.unary_unary(CONTROL, as_it_is, ControlMessage.FromString)

        async def ask(message: bytes) -> None:
            nonlocal num_whole
            try:
                check_whole([response async for response in predict(iter([message]), timeout=PATIENCE)])
                num_whole += 1
            except grpc.aio.AioRpcError as error:
                check_status(message, error)

        async def command(message: bytes) -> None:
            try:
                answer = await control(message, timeout=PATIENCE)
                assert answer.payload["status"] in ("ok", "error")
            except grpc.aio.AioRpcError as error:
                check_status(message, error)

        http = Http(server)
        async with Canary(http) as canary:
            await each(predictions, ask)
            await each(commands, command)
        assert canary.num_runs > 2
        http.close()

    async def connected() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel:
            await scenario(channel)

    asyncio.run(connected())
    assert num_whole > 200, "too few of them got as far as the engine"
    server.check_unharmed()


def check_status(message: bytes, error: grpc.aio.AioRpcError) -> None:
    told = f"{message[:600]!r}\n{error.code()} {error.details()}"
    assert error.code() in GOOD_CODES, told
    assert not PRIVATE.search(error.details() or ""), told
