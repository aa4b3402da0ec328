"""The gRPC door's lock. Every method is closed unless it is named here as open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from weft.frontend.keys import HOW, Keys, presented
from weft.frontend.rpc.status import Status, refuse

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Probes have no key, and learn nothing but whether the server is well."""

NO_KEY = Status(grpc.StatusCode.UNAUTHENTICATED, f"This server wants an API key: {HOW}.")


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
        if any(self._keys.know(key) for key in presented(handler_call_details.invocation_metadata)):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, NO_KEY)
