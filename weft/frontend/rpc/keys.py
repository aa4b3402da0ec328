"""API keys: who has one comes in. Every method is closed unless it is named here as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from weft.errors import ConfigError
from weft.frontend.rpc.status import Status, refuse

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Probes have no key, and learn nothing but whether the server is well."""

BEARER = "bearer "

NO_KEY = Status(
    grpc.StatusCode.UNAUTHENTICATED, "This server wants an API key: authorization: Bearer KEY, or x-api-key: KEY."
)


class Keys:
    """Digests of the keys. Whether a key is right takes the same time to say however wrong it is."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not all(key.strip() == key and key for key in keys):
            raise ConfigError("An API key is empty, or has space around it.", hint="Set --api-key or WEFT_API_KEY.")
        self._digests = [_digest(key) for key in keys]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def know(self, key: str) -> bool:
        presented = _digest(key)
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return any(matches)


class KeyCheck(grpc.aio.ServerInterceptor):
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # Whatever kind of method was called: this kind can end a call that sends nothing.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method in OPEN_METHODS:
            return await continuation(handler_call_details)
        if any(self._keys.know(key) for key in _presented(handler_call_details.invocation_metadata)):
            return await continuation(handler_call_details)
        return self._refusal


def _presented(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[str]:
    for name, value in metadata:
        if not isinstance(value, str):
            continue
        if name == "x-api-key":
            yield value
        elif name == "authorization" and value[: len(BEARER)].lower() == BEARER:
            yield value[len(BEARER) :]


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, NO_KEY)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
