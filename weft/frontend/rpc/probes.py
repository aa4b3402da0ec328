"""grpc.health.v1.Health: what probes and balancers ask. It reads the gate when it is asked, and keeps no state."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import (  # type: ignore[attr-defined]
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListResponse,
)

from weft.frontend.gate import Gate
from weft.frontend.rpc.inference import SERVICE_NAME

READY = ("", SERVICE_NAME)
"""The names under which the server is well while it takes predictions."""

LIVE = "live"
"""The name under which a server that only starts or drains is well too: it must not be killed for that."""

POLL_S = 0.5

Context = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class Probes(health_pb2_grpc.HealthServicer):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the calls that watch."""
        self._closing.set()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"There is no service {request.service!r:.200} here.")
        return HealthCheckResponse(status=status)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:
        told = None
        while not self._closing.is_set():
            status = self._status(request.service)
            if status != told:
                told = status
                await context.write(HealthCheckResponse(status=status))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._closing.wait()

    async def List(self, _: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in (*READY, LIVE)}
        )

    def _status(self, service: str) -> int:
        if service == LIVE:
            return HealthCheckResponse.SERVING
        if service not in READY:
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._gate.health().ready else HealthCheckResponse.NOT_SERVING
