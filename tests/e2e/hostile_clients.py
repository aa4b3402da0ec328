"""The clients that send hostile requests, and what every answer to one must be."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import grpc.aio

from tests.api.grpc.calls import check_whole
from tests.e2e.connections import Connections
from tests.e2e.hostile import Asked
from tests.e2e.hostile_rpc import AskedRpc
from tests.waiting import PATIENCE
from weft.api.grpc.ai_service_pb2 import (
    ControlMessage,
    GenerateImageUpdate,
    StreamPredictResponse,
    WorkerHealthResponse,
)
from weft.bench.http import Address

DOCUMENTED = {200, 400, 404, 405, 409, 413, 429, 431, 503}
GOOD_CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
# An address has letters: 0x4294967295 may be the size of an image.
PRIVATE = re.compile(r"Traceback|0x(?=[0-9]*[a-fA-F])[0-9a-fA-F]{6,}|\.py\b|site-packages")
LAST_EVENTS = (
    "[DONE]",
    '"message_stop"',
    '"response.completed"',
    '"response.incomplete"',
    '"image_generation.completed"',
)


class Http(Connections):
    def __init__(self, url: str, key: str = "") -> None:
        super().__init__(Address.parse(url))
        self._headers = (("Authorization", f"Bearer {key}"),) if key else ()

    async def send(self, asked: Asked) -> tuple[int, str]:
        """Return the status and the body of the answer."""
        try:
            return await self.ask(self._request(asked))
        except (TimeoutError, ConnectionError) as error:
            raise AssertionError(f"{asked}\nbrought {error!r}") from error

    async def tear(self, asked: Asked, part: float) -> None:
        """Send the first part of a request, and hang up."""
        _, writer = await asyncio.open_connection(self.address.host, self.address.port)
        request = self._request(asked)
        writer.write(request[: int(part * len(request))])
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _request(self, asked: Asked) -> bytes:
        length = (("Content-Type", "application/json"), ("Content-Length", str(len(asked.body))))
        # Of two keys the first counts: the request's own.
        headers = (*asked.headers, *self._headers, *(length if asked.method == "POST" else ()))
        head = f"{asked.method} {asked.path} HTTP/1.1\r\nHost: {self.address.host}:{self.address.port}\r\n"
        return (head + "".join(f"{name}: {value}\r\n" for name, value in headers)).encode() + b"\r\n" + asked.body


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
    elif not asked.path.startswith("/metrics"):
        json.loads(body)


SERVICE = "/cy.llm.AiInference/"


class Rpc:
    def __init__(self, channel: grpc.aio.Channel, key: str = "") -> None:
        as_it_is: Any = bytes
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._streams = {
            "StreamPredict": channel.stream_stream(
                SERVICE + "StreamPredict", as_it_is, StreamPredictResponse.FromString
            ),
            "GenerateImage": channel.unary_stream(SERVICE + "GenerateImage", as_it_is, GenerateImageUpdate.FromString),
        }
        self._methods = {
            "Control": channel.unary_unary(SERVICE + "Control", as_it_is, ControlMessage.FromString),
            "Health": channel.unary_unary(SERVICE + "Health", as_it_is, WorkerHealthResponse.FromString),
        }

    async def ask(self, asked: AskedRpc) -> tuple[grpc.StatusCode, str]:
        """Return the code and its details. Raises AssertionError for an answer that is not whole."""
        options: dict[str, Any] = {"metadata": (*self._metadata, *asked.metadata), "timeout": PATIENCE}
        try:
            if asked.method == "StreamPredict":
                check_whole([one async for one in self._streams[asked.method](iter([asked.message]), **options)])
            elif asked.method == "GenerateImage":
                updates = [one async for one in self._streams[asked.method](asked.message, **options)]
                assert [one.end_of_stream for one in updates] == [False] * (len(updates) - 1) + [True], asked
            else:
                answer = await self._methods[asked.method](asked.message, **options)
                assert asked.method == "Health" or answer.payload["status"] in ("ok", "error"), asked
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""


def check_status(asked: AskedRpc, code: grpc.StatusCode, details: str) -> None:
    told = f"{asked}\n{code} {details[:1000]}"
    assert code in GOOD_CODES or code is grpc.StatusCode.OK, told
    assert not PRIVATE.search(details), told
