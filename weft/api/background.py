"""Work of the server that no client waits for: batches, and the answers that are kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import msgspec
from msgspec import Raw
from msgspec.structs import replace
from starlette.types import Message

from weft import logs
from weft.api.anthropic import message_batches
from weft.api.anthropic.messages import messages_endpoint
from weft.api.body import check_structure
from weft.api.error_responses import Unexpected, error_body
from weft.api.handler import Endpoint, Handler, Writer
from weft.api.openai import batches
from weft.api.openai.chat import chat_endpoint
from weft.api.openai.completions import completions_endpoint
from weft.api.openai.embeddings import embeddings_endpoint
from weft.api.openai.response_store import ResponseStore, StoredResponse, TenantStore
from weft.api.openai.responses import responses_endpoint
from weft.api.openai.responses_schema import ResponseFailure
from weft.errors import InvalidRequest, Overloaded, Unavailable, WeftError
from weft.serving.admission import Admission, RequestContext, no_hang_up
from weft.serving.batch_runner import BatchRunner, LineAnswer
from weft.serving.data_store import BatchRecord, DataStore, NoStore
from weft.types import GenerationRequest

log = logging.getLogger(__name__)

INTERRUPTED = ResponseFailure("server_error", "The server was stopped before the response was complete; ask again.")

ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": chat_endpoint,
    "/v1/completions": completions_endpoint,
    "/v1/embeddings": embeddings_endpoint,
    message_batches.ENDPOINT: messages_endpoint,
}


class BackgroundWork:
    def __init__(self, admission: Admission) -> None:
        options = admission.config.server
        self._admission = admission
        self.data = DataStore(options.data_dir, admission.config.limits)
        self.responses = ResponseStore(
            options.responses_store_entries, options.responses_store_mb << 20, on_drop=self.data.drop_response
        )
        self.batches = BatchRunner(
            self.data,
            admission.config,
            partial(check_structure, limits=admission.config.limits),
            self._answer,
            {batches.INTERFACE: partial(batches.finish, self.data), message_batches.INTERFACE: _as_it_is},
        )

    async def start(self) -> None:
        """Go on with the batches of the server that was here before, and keep its responses in the background."""
        if self.data.exists:
            try:
                await self.data.open()
            except NoStore:
                return
            self.batches.resume()
            await self._restore_responses()

    async def stop(self) -> None:
        """Leave batches as they are, for the next server."""
        await self.batches.stop()
        self.data.close()

    def tenant_responses(self) -> TenantStore:
        return TenantStore(self.responses, logs.tenant.get(), self.data)

    async def _restore_responses(self) -> None:
        """Take up the responses in the background that are on disk. One that had not ended has failed."""
        for record in await self.data.responses():
            answer = msgspec.json.decode(record.answer)
            if answer["status"] in ("queued", "in_progress"):
                answer |= {"status": "failed", "error": INTERRUPTED}
                record = replace(record, answer=Raw(msgspec.json.encode(answer)))
                await self.data.keep_response(record)
            kept = StoredResponse(bytes(record.answer), record.input_items, record.messages, is_on_disk=True)
            self.responses.put(record.owner, record.id, kept, self.data.clock() - record.created_at)

    async def _answer(self, path: str, body: bytes) -> LineAnswer:
        endpoint = ENDPOINTS.get(path) or partial(responses_endpoint, store=self.tenant_responses())
        try:
            self.data.check_quota(logs.tenant.get())
            handler = Handler(self._admission, partial(_in_one_piece, endpoint), is_batch=True)
            return LineAnswer(200, await _answer_of(handler, body))
        except (Overloaded, Unavailable):
            raise
        except WeftError as error:
            return LineAnswer(error.status, msgspec.json.encode(error_body(error)))
        except Exception as error:
            log.exception("a line of a batch failed")
            return LineAnswer(Unexpected.status, msgspec.json.encode(error_body(Unexpected(str(error)))))


async def _as_it_is(record: BatchRecord) -> BatchRecord:
    """Leave results where they are: they are written in the words of the interface when they are read."""
    return record


async def _in_one_piece(
    endpoint: Endpoint, body: bytes, context: RequestContext
) -> tuple[list[GenerationRequest], Writer]:
    requests, writer = await endpoint(body, context)
    if writer.stream or writer.background is not None:
        field = "stream" if writer.stream else "background"
        raise InvalidRequest(f"{field}: a line of a batch is answered in one piece.", param=field)
    return [*requests], writer


async def _answer_of(handler: Handler, body: bytes) -> bytes:
    """Return what a handler answers, as if a client had sent the body."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    pieces: list[bytes] = []

    async def receive() -> Message:
        return waiting.pop() if waiting else await no_hang_up()

    async def send(message: Message) -> None:
        pieces.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await handler({"type": "http", "path": "", "headers": headers}, receive, send)
    return b"".join(pieces)
