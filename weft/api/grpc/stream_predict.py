"""The predictions of one call, side by side."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterable, Awaitable

import grpc

from weft import logs
from weft.api.grpc.ai_service_pb2 import StreamPredictRequest, StreamPredictResponse
from weft.api.grpc.prediction import Prediction, Send
from weft.api.grpc.status import MAX_TRACE_ID, RpcStatus, parse, status_of, take_up
from weft.errors import InvalidRequest, RequestTimeout, Unavailable
from weft.options import GrpcOptions
from weft.serving.admission import SHUTTING_DOWN, Admission


async def in_time(sending: Awaitable[None], patience_s: float) -> None:
    """Wait until gRPC has taken a message; raises RequestTimeout after so long (0: never)."""
    try:
        async with asyncio.timeout(patience_s or None):
            await sending
    except TimeoutError as error:
        raise RequestTimeout(f"The client read nothing for {patience_s:g} s (--slow-reader-timeout-s).") from error


log = logging.getLogger(__name__)

MAX_OPEN = 128
"""Predictions that run on one stream; the next request is read when one has ended."""

CLOSING = status_of(Unavailable(SHUTTING_DOWN))


class PredictionStream:
    """A failure ends the call, but not the predictions that were begun before it: they are finished first."""

    def __init__(self, admission: Admission, options: GrpcOptions, send: Send) -> None:
        self._admission = admission
        self._options = options
        self._send_now = send
        self._sending = asyncio.Lock()
        self._capacity = asyncio.Semaphore(MAX_OPEN)
        self._open: set[str] = set()
        self._num_begun = 0
        self._num_ended = 0
        self._failure: RpcStatus | None = None
        self._closing = False
        self._reading: asyncio.Task[None] | None = None

    async def run(self, requests: AsyncIterable[bytes]) -> RpcStatus | None:
        """Answer every request; returns how the first one failed, if one did."""
        async with asyncio.TaskGroup() as group:
            self._reading = group.create_task(self._read(requests, group))
        if not self._num_begun and self._failure is None:
            return status_of(InvalidRequest("The stream brought no request."))
        return self._failure

    def close(self) -> None:
        """Wait for no more requests; those already begun are finished, and are whole if the client sends no other."""
        self._closing = True
        self._stop_reading_when_done()

    def _end(self, status: RpcStatus) -> None:
        """Begin no more predictions, and end with this status when those already begun are done."""
        if self._failure is None:
            self._failure = status
        self._stop_reading_when_done()

    def _stop_reading_when_done(self) -> None:
        if self._num_ended < self._num_begun or self._reading is None or self._reading.done():
            return
        if self._closing and self._failure is None:
            self._failure = CLOSING
        if self._failure is not None:
            self._reading.cancel()

    async def _read(self, requests: AsyncIterable[bytes], group: asyncio.TaskGroup) -> None:
        async for message in requests:
            arrived = time.perf_counter()
            await self._capacity.acquire()
            if self._closing and self._failure is None:
                self._failure = CLOSING
            if self._failure is not None:
                # Read and let go: a client that cannot send might never look at the status.
                self._capacity.release()
                continue
            self._num_begun += 1
            group.create_task(self._predict(message, arrived), name="StreamPredict")

    async def _predict(self, message: bytes, arrived: float) -> None:
        with logs.request_line() as line:
            await self._predict_noted(message, arrived, line)

    async def _predict_noted(self, message: bytes, arrived: float, line: logs.RequestLine) -> None:
        trace_id = ""
        prediction: Prediction | None = None
        code = grpc.StatusCode.CANCELLED
        try:
            request = parse(StreamPredictRequest, message)
            trace_id = request.metadata.trace_id or uuid.uuid4().hex
            take_up(trace_id)
            if trace_id in self._open:
                raise InvalidRequest("There is a prediction with this trace_id on the stream already.")
            self._open.add(trace_id)
            try:
                with self._admission.admit() as context:
                    prediction = Prediction(trace_id, context, self._options, self._send, arrived)
                    await prediction.run(request)
            finally:
                self._open.discard(trace_id)
            code = grpc.StatusCode.OK
        except Exception as error:  # noqa: BLE001 - logged where it becomes a status
            status = status_of(error)
            code = status.code
            self._end(self._named(status, trace_id))
        finally:
            self._num_ended += 1
            self._stop_reading_when_done()
            self._capacity.release()
            line.fields.pop("answer_id", None)  # the trace_id, which may be any text
            fields = {
                "status": code.name,
                "tokens": 0 if prediction is None else prediction.num_tokens,
                **line.fields,
                "seconds": time.perf_counter() - arrived,
            }
            logs.event(log, logging.INFO, "prediction", fields)

    def _named(self, status: RpcStatus, trace_id: str) -> RpcStatus:
        """Name the prediction that a status belongs to, where there is more than one."""
        if self._num_begun == 1 or not trace_id:
            return status
        return RpcStatus(status.code, f"trace_id {trace_id[:MAX_TRACE_ID]!r}: {status.details}")

    async def _send(self, response: StreamPredictResponse) -> None:
        # gRPC takes one message at a time, and no other while the client does not read.
        async with self._sending:
            await in_time(self._send_now(response), self._admission.config.server.slow_reader_timeout_s)
