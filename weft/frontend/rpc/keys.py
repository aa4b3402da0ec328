"""The gRPC door's lock. Every method is closed unless it is named here as open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from weft import logs
from weft.frontend.gate import Gate
from weft.frontend.keys import HOW, presented
from weft.frontend.rpc.status import Status, refuse
from weft.observe import traces

OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check"})
"""Probes have no key, and learn nothing but whether the server is well."""

CONTROL = "/cy.llm.AiInference/Control"
"""Admin keys open it as well: what it may be told to do depends on the key."""

NO_KEY = Status(grpc.StatusCode.UNAUTHENTICATED, f"This server wants an API key: {HOW}.")


class KeyCheck(grpc.aio.ServerInterceptor):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        # Whatever kind of method was called: this kind can end a call that sends nothing.
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = handler_call_details.invocation_metadata
        traces.take_in(metadata)
        if handler_call_details.method in OPEN_METHODS or not self._gate.keys.required:
            return await continuation(handler_call_details)
        shown = [*presented(metadata)]
        owner = self._gate.keys.owner(shown)
        if owner is None and handler_call_details.method == CONTROL:
            owner = self._gate.admin_keys.owner(shown)
        if owner is None:
            return self._refusal
        # The call goes on in this task, and is the key's owner's.
        logs.tenant.set(owner)
        return await continuation(handler_call_details)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await refuse(context, NO_KEY)
