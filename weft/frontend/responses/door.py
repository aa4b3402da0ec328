"""POST /v1/responses"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from weft.errors import InvalidRequest
from weft.frontend.blocks import Block
from weft.frontend.body import parse
from weft.frontend.exchange import Order
from weft.frontend.gate import Seat
from weft.frontend.responses.answers import ResponseAnswer
from weft.frontend.responses.schemas import ResponsesRequest
from weft.frontend.responses.shelf import Shelf
from weft.frontend.responses.store import Kept
from weft.frontend.responses.translation import (
    OWN_NAMES,
    ChatMessages,
    answer_message,
    chat_messages,
    chat_request,
    listed_items,
)
from weft.frontend.responses.writer import ResponsesWriter
from weft.frontend.schemas import Fields
from weft.frontend.service import Service
from weft.frontend.translate import ChatJob, chat_job


async def responses_door(body: bytes, seat: Seat, shelf: Shelf) -> Order:
    request = await parse(ResponsesRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    service.check_model(request.model)
    before = shelf.messages_of(request.previous_response_id) if request.previous_response_id else []
    conversation = [*before, *chat_messages(request.input)]
    chat = await _chat_job(request, conversation, service)
    begun = _begun(request)

    def keep(answer: bytes, blocks: Sequence[Block]) -> None:
        if request.store:
            items = listed_items(request.input, begun.id.removeprefix("resp_") + "1")
            shelf.put(begun.id, Kept(answer, items, [*conversation, answer_message(blocks)]))

    return Order(chat.job, ResponsesWriter(begun, chat, service.engine, keep))


async def _chat_job(request: ResponsesRequest, conversation: ChatMessages, service: Service) -> ChatJob:
    try:
        return await chat_job(chat_request(request, conversation), service)
    except InvalidRequest as error:
        error.param = OWN_NAMES.get(error.param or "", error.param)
        raise


def _begun(request: ResponsesRequest) -> ResponseAnswer:
    choice = request.tool_choice
    return ResponseAnswer(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=request.model,
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        max_output_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        # Clients expect `strict` even when nobody said anything about it.
        tools=[{"strict": None, **_dumped(tool)} for tool in request.tools],
        tool_choice=choice if isinstance(choice, str) else _dumped(choice),
        parallel_tool_calls=request.parallel_tool_calls,
        text={"format": _dumped(request.text.format) if request.text and request.text.format else {"type": "text"}},
        reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        truncation=request.truncation,
        store=request.store,
        metadata=request.metadata,
        user=request.user,
    )


def _dumped(fields: Fields) -> dict[str, Any]:
    return fields.model_dump(by_alias=True, exclude_none=True)
