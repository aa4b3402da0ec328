"""/v1/messages/batches: many messages in one request, answered when there is capacity."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from msgspec import Raw, Struct

from weft import logs
from weft.api.anthropic.listing import page_of, timestamp
from weft.api.anthropic.messages_schema import AnthropicError, anthropic_error
from weft.api.body import LONG_BODY_BYTES, check_structure, off_loop
from weft.api.error_responses import Conflict, ErrorBody
from weft.errors import InvalidRequest
from weft.options import LimitOptions
from weft.serving.admission import RequestContext
from weft.serving.batch_runner import BatchRunner
from weft.serving.data_store import (
    BatchLine,
    BatchRecord,
    DataStore,
    LineResult,
    Outcome,
    RecordNotFound,
    Status,
    new_id,
    read_results,
)

INTERFACE = "anthropic"
ENDPOINT = "/v1/messages"
WINDOW_S = 24 * 3600
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class BatchedMessage(Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    params: Raw
    """The body of a request to /v1/messages, which is looked at when it is run."""


class MessageBatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/messages/batches"""

    requests: list[BatchedMessage]


class MessageBatchCounts(Struct, frozen=True, kw_only=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_batch"):
    id: str
    processing_status: str
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    archived_at: str | None = None
    cancel_initiated_at: str | None
    results_url: str | None


class MessageBatchList(Struct, frozen=True, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(Struct, frozen=True, kw_only=True, tag_field="type", tag="message_batch_deleted"):
    id: str


class _Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    message: Raw | None = None
    error: AnthropicError | None = None


class _ResultLine(Struct, frozen=True):
    custom_id: str
    result: _Result


def message_batch(record: BatchRecord, base_url: str) -> MessageBatch:
    ended = next((record.times[status] for status in Status if status.is_final and status in record.times), None)
    cancelling = record.times.get(Status.CANCELLING)
    done = {outcome: record.count(outcome) for outcome in Outcome}
    left = record.num_lines - sum(done.values())
    if ended is not None:
        # Only where the server has failed are there any left then.
        state, left, done[Outcome.ERRORED] = "ended", 0, done[Outcome.ERRORED] + left
    else:
        state = "in_progress" if cancelling is None else "canceling"
    return MessageBatch(
        id=record.id,
        processing_status=state,
        request_counts=MessageBatchCounts(
            processing=left,
            succeeded=done[Outcome.SUCCEEDED],
            errored=done[Outcome.ERRORED],
            canceled=done[Outcome.CANCELED],
            expired=done[Outcome.EXPIRED],
        ),
        created_at=timestamp(record.created_at),
        expires_at=timestamp(record.expires_at),
        ended_at=None if ended is None else timestamp(ended),
        cancel_initiated_at=None if cancelling is None else timestamp(cancelling),
        results_url=None if ended is None else f"{base_url}{ENDPOINT}/batches/{record.id}/results",
    )


def _lines(body: bytes, limits: LimitOptions) -> list[bytes]:
    """Return the lines of a batch. Raises InvalidRequest. What each asks for is read when its turn comes."""
    check_structure(body, limits)
    max_requests = limits.max_batch_lines
    if (count := body.count(b'"custom_id"')) > max_requests:
        raise InvalidRequest(
            f"The batch has {count} requests; at most {max_requests}.",
            hint="The operator's setting is --max-batch-lines.",
            param="requests",
        )
    try:
        requests = msgspec.json.decode(body, type=MessageBatchRequest).requests
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The body is not a batch of messages: {error}."[:500]) from error
    if not requests:
        raise InvalidRequest("A batch has at least one request.", param="requests")
    seen: set[str] = set()
    lines: list[bytes] = []
    for index, request in enumerate(requests):
        place = f"requests[{index}]"
        if not CUSTOM_ID.fullmatch(request.custom_id):
            raise InvalidRequest(
                f"{place}.custom_id: it is 1 to 64 letters, digits, dashes and underscores.", param=f"{place}.custom_id"
            )
        if request.custom_id in seen:
            raise InvalidRequest(f"{place}.custom_id: {request.custom_id!r} is there twice.", param="requests")
        if not bytes(request.params).startswith(b"{"):
            raise InvalidRequest(f"{place}.params must be an object.", param=f"{place}.params")
        seen.add(request.custom_id)
        # Line ends within JSON are only between its values.
        params = Raw(bytes(request.params).replace(b"\n", b" ").replace(b"\r", b" "))
        lines.append(msgspec.json.encode(BatchLine(request.custom_id, params, ENDPOINT)) + b"\n")
    return lines


class MessageBatches:
    """The batches of the tenant that asks."""

    def __init__(self, store: DataStore, runner: BatchRunner, base_url: str = "") -> None:
        self._store = store
        self._runner = runner
        self._base_url = base_url

    async def create(self, body: bytes, context: RequestContext) -> MessageBatch:
        lines = await off_loop(len(body) > LONG_BODY_BYTES, _lines, body, context.config.limits)
        await self._store.open()
        self._store.check_quota(context.tenant, sum(map(len, lines)))
        now = int(self._store.clock())
        record = BatchRecord(
            id=new_id("msgbatch_"),
            owner=context.tenant,
            interface=INTERFACE,
            endpoint=ENDPOINT,
            created_at=now,
            expires_at=now + WINDOW_S,
            num_lines=len(lines),
        )
        await self._store.add_batch(record, lines)
        self._runner.start(record)
        return self._shown(record)

    async def listed(self, request: Request) -> MessageBatchList:
        await self._store.open()
        records = self._store.batches(logs.tenant.get(), INTERFACE)[::-1]
        page, has_more = page_of(records, request.query_params)
        return MessageBatchList(
            data=[*map(self._shown, page)],
            has_more=has_more,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )

    async def found(self, batch_id: str) -> MessageBatch:
        return self._shown(await self._record(batch_id))

    async def cancel(self, batch_id: str) -> MessageBatch:
        return self._shown(await self._runner.cancel(await self._record(batch_id)))

    async def delete(self, batch_id: str) -> DeletedMessageBatch:
        record = await self._record(batch_id)
        if not record.status.is_final:
            raise Conflict("The batch has not ended; cancel it first.", param="message_batch_id")
        await self._store.delete_batch(record)
        return DeletedMessageBatch(id=batch_id)

    async def results(self, batch_id: str) -> Response:
        record = await self._record(batch_id)
        if not record.status.is_final:
            raise RecordNotFound("The batch has no results yet: it has not ended.", param="message_batch_id")
        lines = _result_lines(read_results(self._store.results_path(record.id)))
        return StreamingResponse(lines, media_type="application/x-jsonl")

    async def _record(self, batch_id: str) -> BatchRecord:
        await self._store.open()
        return self._store.batch(logs.tenant.get(), batch_id, INTERFACE)

    def _shown(self, record: BatchRecord) -> MessageBatch:
        return message_batch(record, self._base_url)


def _result_lines(results: Iterator[LineResult]) -> Iterator[bytes]:
    for result in results:
        yield msgspec.json.encode(_ResultLine(result.custom_id, _result(result))) + b"\n"


def _result(result: LineResult) -> _Result:
    if result.outcome is Outcome.SUCCEEDED:
        return _Result(type="succeeded", message=Raw(result.body))
    if result.outcome is Outcome.ERRORED:
        said = msgspec.json.decode(result.body, type=ErrorBody).error.message
        return _Result(type="errored", error=anthropic_error(result.status, said))
    return _Result(type=result.outcome)
