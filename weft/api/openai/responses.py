"""POST /v1/responses"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.api.body import LONG_BODY_BYTES, Fields, off_loop, parse
from weft.api.error_responses import error_body
from weft.api.event_log import EventLog
from weft.api.handler import Writer, named_event
from weft.api.openai.logprobs import MANY_FIGURES, chat_logprobs, num_figures
from weft.api.openai.openai_schema import NO_PARAMETERS, ChatRequest
from weft.api.openai.response_store import StoredResponse, TenantStore
from weft.api.openai.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseFailure,
    ResponsesRequest,
    ResponsesTool,
    ResponseUsage,
    offered_name,
    output_item,
    part_of,
)
from weft.api.openai.responses_translate import (
    OWN_NAMES,
    ChatMessages,
    answer_message,
    chat_messages,
    chat_request,
    listed_items,
)
from weft.api.translate import ParsedRequest, parse_chat
from weft.backends.contract import Engine
from weft.errors import InvalidRequest, Overloaded, WeftError
from weft.serving.admission import RequestContext
from weft.serving.output_reader import (
    AnswerToken,
    BlockKind,
    Change,
    Closed,
    CollectedOutput,
    Grown,
    Opened,
    OutputBlock,
    OutputBlocks,
    TokenTexts,
)
from weft.serving.request import unique_id
from weft.types import FinishReason, GenerationRequest, Output, SamplingDefaults, Usage

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.THINKING: "rs", BlockKind.CALL: "fc"}


class ResponsesWriter(Writer):
    def __init__(
        self,
        begun: ResponseAnswer,
        request: ResponsesRequest,
        chat: ParsedRequest,
        engine: Engine,
        store: TenantStore,
        kept: StoredResponse,
    ) -> None:
        """`kept`: what the store gets, but for the answer."""
        super().__init__(begun.id, begun.model, stream=request.stream)
        self._tools = {offered_name(tool.name, tool.namespace): tool for tool in request.tools}
        self._begun = begun
        self._engine = engine
        self._store = store
        self._kept = kept
        params = chat.params
        tokens = None if params.logprobs is None else TokenTexts(engine.text.tokenizer.token_bytes)
        self._blocks = OutputBlocks(chat.reader_options.reader(), tokens)
        self._finish: FinishReason | None = None
        self._last = b""
        """The answer in JSON, as it was last."""
        self._num_events = 0
        self._num_figures = 0
        # Numbered before all others, although the first output is written before the opening is asked for.
        if begun.background:
            queued = replace(begun, status="queued")
            self._last = msgspec.json.encode(queued)
            self.background = EventLog(
                b"" if request.stream else self._last, keeps_events=request.stream, save=self._save_last
            )
            self.background.write(self._event("response.created", response=queued))
            self.background.write(self._event("response.queued", response=queued))
            self._opening = b""
        else:
            self._opening = self._event("response.created", response=begun)
        self._opening += self._event("response.in_progress", response=begun)

    def opening(self) -> bytes:
        if self.background is not None:
            self._store.put(self.answer_id, self._stored(msgspec.json.encode(self._begun)))
        return self._opening

    async def _save_last(self) -> None:
        """Keep an answer in the background as it was last, for a later server as well."""
        await self._store.save(self.answer_id, self._begun.created_at, self._stored(self._last))

    def _keep(self, answer: bytes) -> None:
        if self._begun.store and self.background is None:
            self._store.put(self.answer_id, self._stored(answer))

    def _stored(self, answer: bytes) -> StoredResponse:
        messages, log = [*self._kept.messages, answer_message(self._blocks.all)], self.background
        return replace(self._kept, answer=answer, messages=messages, log=log, is_on_disk=log is not None)

    def chunks(self, index: int, output: Output) -> bytes | Awaitable[bytes]:
        self._finish = output.finish
        self._num_figures += num_figures(output) if output.logprobs else 0
        # The last output repeats all of them.
        if self._num_figures > MANY_FIGURES and (output.finish or num_figures(output) > MANY_FIGURES):
            return asyncio.to_thread(self._chunks, output)
        return self._chunks(output)

    def _chunks(self, output: Output) -> bytes:
        return b"".join([self._event_of(change) for change in self._blocks.push(output)])

    async def closing(self, usages: Sequence[Usage]) -> bytes:
        usage = await self._usage(usages[0])

        def last_event() -> tuple[bytes, bytes]:
            answer = self._finished(usage)
            return msgspec.json.encode(answer), self._event(f"response.{answer.status}", response=answer)

        self._last, event = await off_loop(self._num_figures > MANY_FIGURES, last_event)
        self._keep(self._last)
        return event

    def failure(self, error: WeftError) -> bytes:
        said = error_body(error).error
        failed = replace(self._begun, status="failed", error=ResponseFailure(_failure_code(error), said.message))
        self._last = msgspec.json.encode(failed)
        return self._event("error", code=said.code, message=said.message, param=said.param) + self._event(
            "response.failed", response=failed
        )

    def cancelled(self) -> bytes:
        answer = replace(self._begun, status="cancelled")
        self._last = msgspec.json.encode(answer)
        return self._event("response.incomplete", response=answer)

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        [output] = outputs
        self._finish = output.finish
        is_long = num_figures(output) > MANY_FIGURES
        await off_loop(is_long, self._blocks.push, output.whole)
        usage = await self._usage(output.usage)
        body = await off_loop(is_long, lambda: msgspec.json.encode(self._finished(usage)))
        self._keep(body)
        return body

    def _event_of(self, change: Change) -> bytes:
        block = change.block
        match change:
            case Opened():
                return self._item_event("response.output_item.added", block, "in_progress") + self._part_event(
                    "response.content_part.added", block, ""
                )
            case Grown(_, text, tokens) if block.kind is BlockKind.TEXT:
                logprobs = self._logprobs(tokens)
                return self._block_event(
                    "response.output_text.delta", block, delta=text, logprobs=logprobs, content_index=0
                )
            case Grown(_, text) if block.kind is BlockKind.THINKING:
                return self._block_event("response.reasoning_text.delta", block, delta=text, content_index=0)
            case Grown(_, text) if block.is_custom:
                return self._block_event("response.custom_tool_call_input.delta", block, delta=text)
            case Grown(_, text):
                return self._block_event("response.function_call_arguments.delta", block, delta=text)
            case Closed():
                return (
                    self._done_event(block)
                    + self._part_event("response.content_part.done", block, block.text)
                    + self._item_event("response.output_item.done", block, self._status(block))
                )

    def _done_event(self, block: OutputBlock) -> bytes:
        match block.kind:
            case BlockKind.TEXT:
                logprobs = self._logprobs(block.tokens)
                return self._block_event(
                    "response.output_text.done", block, text=block.text, logprobs=logprobs, content_index=0
                )
            case BlockKind.THINKING:
                return self._block_event("response.reasoning_text.done", block, text=block.text, content_index=0)
            case BlockKind.CALL if block.is_custom:
                return self._block_event("response.custom_tool_call_input.done", block, input=block.text)
            case BlockKind.CALL:
                name = self._tools[block.name].name if block.name in self._tools else block.name
                return self._block_event(
                    "response.function_call_arguments.done", block, name=name, arguments=block.text
                )

    def _item_event(self, name: str, block: OutputBlock, status: str) -> bytes:
        return self._event(name, output_index=block.index, item=self._item(block, status))

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> list[Any]:
        if not tokens:
            return []
        token_ids, figures = zip(*tokens, strict=True)
        return chat_logprobs(self._engine.text.tokenizer, token_ids, figures).content

    def _part_event(self, name: str, block: OutputBlock, text: str) -> bytes:
        """Return the event of a block's part; a call has no parts."""
        if block.kind is BlockKind.CALL:
            return b""
        part = part_of(block, text, self._logprobs(block.tokens))
        return self._block_event(name, block, part=part, content_index=0)

    def _block_event(self, event: str, block: OutputBlock, /, **fields: object) -> bytes:
        return self._event(event, item_id=self._item_id(block), output_index=block.index, **fields)

    def _event(self, event: str, /, **fields: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(event, {"type": event, "sequence_number": number, **fields})

    def _item(self, block: OutputBlock, status: str) -> OutputItem:
        tool, logprobs = self._tools.get(block.name), self._logprobs(block.tokens)
        return output_item(block, self._item_id(block), status, tool, logprobs)

    def _item_id(self, block: OutputBlock) -> str:
        prefix = "ctc" if block.is_custom else _PREFIXES[block.kind]
        return f"{prefix}_{self.answer_id.removeprefix('resp_')}{block.index:04x}"

    def _status(self, block: OutputBlock) -> str:
        """Return the status of a block that is closed: only the last one can have been cut off."""
        is_cut = self._finish is FinishReason.LENGTH and block is self._blocks.all[-1]
        return "incomplete" if is_cut else "completed"

    def _finished(self, usage: ResponseUsage) -> ResponseAnswer:
        is_cut = self._finish is FinishReason.LENGTH
        return replace(
            self._begun,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            output=[self._item(block, self._status(block)) for block in self._blocks.all],
            usage=usage,
        )

    async def _count(self, text: str) -> int:
        """Count the tokens of a text of the model's; 0 where tokens are not known."""
        if not text or not self._engine.abilities.tokens:
            return 0
        return len(await asyncio.to_thread(self._engine.text.tokenizer.encode, text, add_special_tokens=False))

    async def _usage(self, usage: Usage) -> ResponseUsage:
        thoughts = "".join(block.text for block in self._blocks.all if block.kind is BlockKind.THINKING)
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(await self._count(thoughts)),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


def _failure_code(error: WeftError) -> str:
    """Return the nearest of the codes that there are."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


async def responses_endpoint(
    body: bytes, context: RequestContext, store: TenantStore
) -> tuple[list[GenerationRequest], ResponsesWriter]:
    request = await parse(ResponsesRequest, body, context)
    if request.background and not (request.store and store.keeps):
        raise InvalidRequest("background: what is not kept cannot be asked for later.", param="background")
    served = await context.choose(request.model)
    served.check_model(request.model)
    before = store.messages_of(request.previous_response_id) if request.previous_response_id else []
    if not store.keeps and request.store and "store" in request.model_fields_set:
        context.fields.ignore("responses", "store", "this server keeps no answers")
    begun = _begun(request, served.engine.text.sampling_defaults, is_kept=request.store and store.keeps)

    def read() -> tuple[ChatMessages, ChatRequest, list[dict[str, Any]]]:
        conversation = [*before, *chat_messages(request.input)]
        items = listed_items(request.input, begun.id.removeprefix("resp_") + "1") if request.store else []
        return conversation, chat_request(request, conversation), items

    conversation, asked, items = await off_loop(len(body) > LONG_BODY_BYTES, read)
    try:
        chat = await parse_chat(asked, served, context.fields, request_id=unique_id(begun.id), tenant=context.tenant)
    except InvalidRequest as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise
    context.fields.rename("responses", OWN_NAMES)

    kept = StoredResponse(b"", items, conversation)
    return chat.requests, ResponsesWriter(begun, request, chat, served.engine, store, kept)


def _begun(request: ResponsesRequest, usual: SamplingDefaults, *, is_kept: bool) -> ResponseAnswer:
    choice = request.tool_choice
    return ResponseAnswer(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=request.model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        max_output_tokens=request.max_output_tokens,
        temperature=usual.temperature if request.temperature is None else request.temperature,
        top_p=usual.top_p if request.top_p is None else request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        tools=[_shown(tool) for tool in request.tools],
        tool_choice=choice if isinstance(choice, str) else _dumped(choice),
        parallel_tool_calls=request.parallel_tool_calls,
        max_tool_calls=request.max_tool_calls,
        top_logprobs=request.top_logprobs or 0,
        text={"format": _dumped(request.text.format) if request.text and request.text.format else {"type": "text"}},
        reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        truncation=request.truncation,
        store=is_kept,
        background=request.background,
        metadata=request.metadata,
        user=request.user,
        prompt_cache_key=request.prompt_cache_key,
    )


def _shown(tool: ResponsesTool) -> dict[str, Any]:
    """Return a tool as answers show it. Clients expect some fields even when the request did not give them."""
    function = {"description": None, "strict": None, "parameters": NO_PARAMETERS}
    return (function if tool.type == "function" else {"format": {"type": "text"}}) | _dumped(tool)


def _dumped(fields: Fields) -> dict[str, Any]:
    return fields.model_dump(by_alias=True, exclude_none=True)
