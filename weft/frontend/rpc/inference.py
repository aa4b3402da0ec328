"""cy.llm.AiInference: its methods."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from weft import logs
from weft.config import GrpcOptions
from weft.errors import Overloaded, WeftError
from weft.frontend.gate import Gate
from weft.frontend.keys import presented
from weft.frontend.rpc.ai_service_pb2 import (
    DESCRIPTOR,
    ControlMessage,
    GenerateImageRequest,
    GenerateImageUpdate,
    WorkerHealthRequest,
    WorkerHealthResponse,
)
from weft.frontend.rpc.commands import Commands
from weft.frontend.rpc.figures import figures
from weft.frontend.rpc.image import ImageCall
from weft.frontend.rpc.sending import in_time
from weft.frontend.rpc.status import Status, parse, refuse, status_of
from weft.frontend.rpc.stream import PredictionStream
from weft.frontend.rpc.trace import take_up

log = logging.getLogger(__name__)

SERVICE_NAME: str = DESCRIPTOR.services_by_name["AiInference"].full_name

Context = grpc.aio.ServicerContext[bytes, Message]


class Inference:
    def __init__(self, gate: Gate, options: GrpcOptions) -> None:
        self._gate = gate
        self._options = options
        self._commands = Commands(gate)
        self._streams: set[PredictionStream] = set()
        self._num_images = 0

    def handler(self) -> grpc.GenericRpcHandler:
        def unary(method: Callable[[bytes, Context], Awaitable[Message]]) -> grpc.RpcMethodHandler[Any, Any]:
            async def answer(message: bytes, context: Context) -> Message:
                try:
                    response = await method(message, context)
                except Exception as error:  # noqa: BLE001 - logged where it becomes a status
                    status = status_of(error)
                    await context.abort(status.code, status.details)
                return response

            return grpc.unary_unary_rpc_method_handler(answer, response_serializer=_serialized)

        methods = {
            "StreamPredict": grpc.stream_stream_rpc_method_handler(
                self._stream_predict, response_serializer=_serialized
            ),
            "GenerateImage": grpc.unary_stream_rpc_method_handler(
                self._generate_image, response_serializer=_serialized
            ),
            "Control": unary(self._control),
            "Health": unary(self._health),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def close(self) -> None:
        """End the streams that only wait for another request."""
        for stream in self._streams:
            stream.close()

    async def _stream_predict(self, requests: AsyncIterable[bytes], context: Context) -> None:
        if self._is_full:
            await refuse(context, self._full())
        stream = PredictionStream(self._gate, self._options, context.write)
        self._streams.add(stream)
        try:
            status = await stream.run(requests)
        except Exception as error:  # noqa: BLE001 - logged where it becomes a status
            status = status_of(error)
        finally:
            self._streams.discard(stream)
        if status is not None:
            await context.abort(status.code, status.details)

    async def _generate_image(self, message: bytes, context: Context) -> None:
        if self._is_full:
            status = self._full()
            await context.abort(status.code, status.details)
        arrived = time.perf_counter()
        code = grpc.StatusCode.CANCELLED
        self._num_images += 1
        try:
            await self._draw(message, context, arrived)
            code = grpc.StatusCode.OK
        except Exception as error:  # noqa: BLE001 - logged where it becomes a status
            status = status_of(error)
            code = status.code
            await context.abort(status.code, status.details)
        finally:
            self._num_images -= 1
            logs.event(log, logging.INFO, "image", {"status": code.name, "seconds": time.perf_counter() - arrived})

    async def _draw(self, message: bytes, context: Context, arrived: float) -> None:
        request = parse(GenerateImageRequest, message)
        trace_id = request.trace_id or uuid.uuid4().hex
        take_up(trace_id)

        async def send(update: GenerateImageUpdate) -> None:
            await in_time(context.write(update), self._gate.config.server.slow_reader_timeout_s)

        with self._gate.admit() as seat:
            await ImageCall(trace_id, seat, send, arrived).run(request)

    @property
    def _is_full(self) -> bool:
        return len(self._streams) + self._num_images >= self._options.grpc_max_streams

    def _full(self) -> Status:
        return status_of(
            Overloaded(
                f"{len(self._streams) + self._num_images} streams are open already.",
                hint="Try again later (--grpc-max-streams).",
            )
        )

    async def _control(self, message: bytes, context: Context) -> ControlMessage:
        request = parse(ControlMessage, message)
        keys = presented(context.invocation_metadata() or ())
        try:
            payload = {"status": "ok", **await self._commands.obey(request, keys)}
        except WeftError as error:
            payload = {"status": "error", "message": status_of(error).details}
        return ControlMessage(
            trace_id=request.trace_id or uuid.uuid4().hex, command=f"{request.command}_response", payload=payload
        )

    async def _health(self, message: bytes, context: Context) -> WorkerHealthResponse:
        parse(WorkerHealthRequest, message)
        state = self._gate.health()
        return WorkerHealthResponse(
            healthy=state.ready,
            metrics={"state": state.reason or "ready", **figures(self._gate.metrics())},
        )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
