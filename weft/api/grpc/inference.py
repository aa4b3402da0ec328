"""cy.llm.AiInference: its methods."""

from __future__ import annotations

import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from weft import logs
from weft.api.error_responses import WrongKey
from weft.api.grpc.ai_service_pb2 import (
    DESCRIPTOR,
    ControlMessage,
    GenerateImageRequest,
    GenerateImageUpdate,
    WorkerHealthRequest,
    WorkerHealthResponse,
)
from weft.api.grpc.image import ImageCall
from weft.api.grpc.prediction import SERVED_MODEL
from weft.api.grpc.status import RpcStatus, parse, refuse, status_of, take_up
from weft.api.grpc.stream_predict import PredictionStream, in_time
from weft.errors import InvalidRequest, Overloaded, WeftError, shortened
from weft.observe.metrics import Metrics
from weft.options import GrpcOptions
from weft.serving.admission import Admission
from weft.serving.auth import presented
from weft.serving.model_slot import ModelSlot
from weft.types import FinishReason


class Commands:
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def obey(self, request: ControlMessage, keys: Iterable[str]) -> dict[str, str]:
        """Carry out a command, and return the payload of the answer. `keys` are those that the caller showed."""
        pool = self._admission.pool
        match request.command:
            case "ping":
                return {"message": "pong"}
            case "list_models":
                return self._list()
            case "load_model":
                slot = self._slot(request, keys)
                slot.forgive()
                await pool.load(slot)
                return {"state": slot.state}
            case "unload_model":
                slot = self._slot(request, keys)
                await slot.unload()
                return {"state": slot.state}
            case "reload" | "reload_registry" if request.payload.get("model_id") or not pool.has_many:
                slot = self._slot(request, keys)
                await pool.load_anew(slot)
                return {"state": slot.state}
            case "reload" | "reload_registry":
                self._check_admin(keys)
                pool.reload()
                return self._list()
            case command:
                raise InvalidRequest(f"There is no command {command!r:.200}.")

    def _list(self) -> dict[str, str]:
        self._admission.check_open()
        slots = self._admission.pool.slots
        every = [name for slot in slots for name in (slot.name, *slot.adapter_names, slot.image_model_name) if name]
        return {"models": ",".join(every), "loaded": ",".join(slot.name for slot in slots if slot.is_open)}

    def _slot(self, request: ControlMessage, keys: Iterable[str]) -> ModelSlot:
        self._check_admin(keys)
        name, pool = request.payload.get("model_id", ""), self._admission.pool
        return pool.named("" if name in SERVED_MODEL and not pool.has_many else name)

    def _check_admin(self, keys: Iterable[str]) -> None:
        """Raise WrongKey unless an admin key was shown."""
        admins = self._admission.admin_keys
        if not admins.required or admins.owner(keys) is None:
            raise WrongKey("This command wants one of the operator's keys (--admin-key).")


_FAILED = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.REJECTED)


def figures(models: Sequence[Metrics]) -> dict[str, str]:
    """Return the figures of /metrics as text, of all models together; none until one is loaded."""
    if not models:
        return {}
    samples = [sample for metrics in models for family in metrics.collect() for sample in family.samples]
    value: defaultdict[str, float] = defaultdict(float)
    ended: defaultdict[str, float] = defaultdict(float)
    for sample in samples:
        value[sample.name] += sample.value
        if sample.name == "weft_request_success_total":
            ended[sample.labels["finished_reason"]] += sample.value
    running, waiting = value["weft_num_requests_running"], value["weft_num_requests_waiting"]
    told = {
        "requests_inflight": running + waiting,
        "requests_running": running,
        "requests_waiting": waiting,
        "requests_success": ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
        "requests_failed": sum(ended[reason] for reason in _FAILED),
        "requests_aborted": ended[FinishReason.ABORT],
        "requests_rejected": value["weft_num_requests_rejected_total"],
        "prompt_tokens": value["weft_prompt_tokens_total"],
        "generation_tokens": value["weft_generation_tokens_total"],
        "kv_cache_usage": max(sample.value for sample in samples if sample.name == "weft_kv_cache_usage_perc"),
        "engine_restarts": value["weft_engine_restarts_total"],
    }
    return {name: f"{figure:.15g}" for name, figure in told.items()}


log = logging.getLogger(__name__)

SERVICE_NAME: str = DESCRIPTOR.services_by_name["AiInference"].full_name

Context = grpc.aio.ServicerContext[bytes, Message]


class Inference:
    def __init__(self, admission: Admission, options: GrpcOptions) -> None:
        self._admission = admission
        self._options = options
        self._commands = Commands(admission)
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
        stream = PredictionStream(self._admission, self._options, context.write)
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
        with logs.request_line() as line:
            try:
                await self._draw(message, context, arrived)
                code = grpc.StatusCode.OK
            except Exception as error:  # noqa: BLE001 - logged where it becomes a status
                status = status_of(error)
                code = status.code
                await context.abort(status.code, status.details)
            finally:
                self._num_images -= 1
                line.fields.pop("answer_id", None)  # the trace_id, which may be any text
                fields = {"status": code.name, **line.fields, "seconds": time.perf_counter() - arrived}
                logs.event(log, logging.INFO, "image", fields)

    async def _draw(self, message: bytes, context: Context, arrived: float) -> None:
        request = parse(GenerateImageRequest, message)
        trace_id = request.trace_id or uuid.uuid4().hex
        take_up(trace_id)

        async def send(update: GenerateImageUpdate) -> None:
            await in_time(context.write(update), self._admission.config.server.slow_reader_timeout_s)

        with self._admission.admit() as request_context:
            await ImageCall(trace_id, request_context, send, arrived).run(request)

    @property
    def _is_full(self) -> bool:
        return len(self._streams) + self._num_images >= self._options.grpc_max_streams

    def _full(self) -> RpcStatus:
        return status_of(
            Overloaded(
                f"{len(self._streams) + self._num_images} streams are open already.",
                hint="Try again later (--grpc-max-streams).",
            )
        )

    async def _control(self, message: bytes, context: Context) -> ControlMessage:
        request = parse(ControlMessage, message)
        trace_id = request.trace_id or uuid.uuid4().hex
        take_up(trace_id)
        keys = presented(context.invocation_metadata() or ())
        try:
            payload = {"status": "ok", **await self._commands.obey(request, keys)}
        except WeftError as error:
            payload = {"status": "error", "message": status_of(error).details}
        return ControlMessage(trace_id=trace_id, command=f"{shortened(request.command)}_response", payload=payload)

    async def _health(self, message: bytes, context: Context) -> WorkerHealthResponse:
        parse(WorkerHealthRequest, message)
        state = self._admission.health()
        return WorkerHealthResponse(
            healthy=state.ready,
            metrics={"state": state.reason or "ready", **figures(self._admission.metrics())},
        )


def _serialized(message: Message) -> bytes:
    return message.SerializeToString()
