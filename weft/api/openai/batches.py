"""/v1/batches: the lines of a file, answered when there is capacity, and their answers in a file."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace
from pydantic import Field
from starlette.datastructures import QueryParams

from weft import logs
from weft.api.body import Fields, parse
from weft.api.error_responses import Conflict
from weft.api.openai.openai_schema import Metadata, Name
from weft.api.paging import limit_of, page_after
from weft.errors import InvalidRequest
from weft.serving.admission import RequestContext
from weft.serving.batch_runner import BatchRunner
from weft.serving.data_store import (
    TTL_S,
    BatchRecord,
    DataStore,
    LineProblem,
    LineResult,
    Outcome,
    Status,
    new_id,
    read_results,
)

INTERFACE = "openai"
WINDOW_S = 24 * 3600
MAX_LISTED = 100

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class OutputExpiry(Fields):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=TTL_S)


class BatchRequest(Fields):
    """POST /v1/batches"""

    input_file_id: Name
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata = Field({}, description="Given back with the batch.")
    output_expires_after: OutputExpiry | None = None


class BatchError(Struct, frozen=True):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(Struct, frozen=True):
    total: int
    completed: int
    failed: int


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str = "24h"
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]


class BatchList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Answered(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class _OutputLine(Struct, frozen=True, kw_only=True):
    id: str
    custom_id: str
    response: _Answered | None = None
    error: dict[str, str] | None = None


_UNANSWERED = {
    Outcome.EXPIRED: {"code": "batch_expired", "message": "The batch's time was over before this line's turn came."},
    Outcome.CANCELED: {"code": "batch_cancelled", "message": "The batch was cancelled before this line's turn came."},
}


def batch_object(record: BatchRecord) -> BatchObject:
    times: dict[str, Any] = {f"{status}_at": record.times.get(status) for status in Status}
    del times["validating_at"]
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=[*map(_error, record.problems)]) if record.problems else None,
        input_file_id=record.input_file_id,
        status=record.status,
        output_file_id=record.output_file_id or None,
        error_file_id=record.error_file_id or None,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=RequestCounts(
            total=record.num_lines,
            completed=record.count(Outcome.SUCCEEDED),
            failed=sum(record.counts.values()) - record.count(Outcome.SUCCEEDED),
        ),
        metadata=record.metadata,
        **times,
    )


def _error(problem: LineProblem) -> BatchError:
    return BatchError(problem.code, problem.message, problem.line, problem.param)


async def finish(store: DataStore, record: BatchRecord) -> BatchRecord:
    """Write the files of a batch's results. Their ids follow from the batch's: a second call writes the same files."""
    ids: dict[str, str] = {}
    for kind, outcomes in (("output", {Outcome.SUCCEEDED}), ("error", {*Outcome} - {Outcome.SUCCEEDED})):
        file_id = "file-" + uuid.uuid5(uuid.NAMESPACE_OID, f"{record.id} {kind}").hex
        lines = _output_lines(store, record, outcomes)
        ids[kind] = await store.write_output(record, file_id, f"{record.id}_{kind}.jsonl", lines)
    return replace(record, output_file_id=ids["output"], error_file_id=ids["error"])


def _output_lines(store: DataStore, record: BatchRecord, outcomes: set[Outcome]) -> Iterator[bytes]:
    for result in read_results(store.results_path(record.id)):
        if result.outcome in outcomes:
            yield msgspec.json.encode(_output_line(result)) + b"\n"


def _output_line(result: LineResult) -> _OutputLine:
    line_id = result.request_id or new_id("batch_req_")
    if (error := _UNANSWERED.get(result.outcome)) is not None:
        return _OutputLine(id=line_id, custom_id=result.custom_id, error=error)
    answered = _Answered(result.status, result.request_id, Raw(result.body))
    return _OutputLine(id=line_id, custom_id=result.custom_id, response=answered)


class Batches:
    """The batches of the tenant that asks."""

    def __init__(self, store: DataStore, runner: BatchRunner) -> None:
        self._store = store
        self._runner = runner

    async def create(self, body: bytes, context: RequestContext) -> BatchObject:
        request = await parse(BatchRequest, body, context)
        await self._store.open()
        source = self._store.file(context.tenant, request.input_file_id)
        if source.purpose != "batch":
            raise InvalidRequest(f"The file's purpose is {source.purpose}; it must be batch.", param="input_file_id")
        now = int(self._store.clock())
        expiry = request.output_expires_after
        record = BatchRecord(
            id=new_id("batch_"),
            owner=context.tenant,
            interface=INTERFACE,
            endpoint=request.endpoint,
            created_at=now,
            expires_at=now + WINDOW_S,
            input_file_id=source.id,
            output_ttl_s=TTL_S if expiry is None else expiry.seconds,
            metadata=request.metadata,
        )
        await self._store.add_batch(record, source)
        self._runner.start(record)
        return batch_object(record)

    async def listed(self, query: QueryParams) -> BatchList:
        await self._store.open()
        records = self._store.batches(logs.tenant.get(), INTERFACE)[::-1]
        page, has_more = page_after(records, query.get("after"), limit_of(query, 20, MAX_LISTED))
        return BatchList(
            data=[*map(batch_object, page)],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=has_more,
        )

    async def found(self, batch_id: str) -> BatchObject:
        return batch_object(await self._record(batch_id))

    async def cancel(self, batch_id: str) -> BatchObject:
        record = await self._record(batch_id)
        if record.status.is_final:
            raise Conflict(f"The batch has ended already: it is {record.status}.", param="batch_id")
        return batch_object(await self._runner.cancel(record))

    async def _record(self, batch_id: str) -> BatchRecord:
        await self._store.open()
        return self._store.batch(logs.tenant.get(), batch_id, INTERFACE)
