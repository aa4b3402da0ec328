"""POST /v1/messages and POST /v1/messages/count_tokens"""

from __future__ import annotations

from weft.backends.contract import tokens_of, tokens_unknown
from weft.errors import InvalidRequest
from weft.frontend.body import parse
from weft.frontend.exchange import Order
from weft.frontend.gate import Seat
from weft.frontend.messages.answers import TokenCount
from weft.frontend.messages.schemas import CountTokensRequest, MessagesRequest
from weft.frontend.messages.translation import chat_request, counted_request
from weft.frontend.messages.writer import MessagesWriter
from weft.frontend.service import Service
from weft.frontend.translate import chat_job


async def messages_door(body: bytes, seat: Seat) -> Order:
    request = await parse(MessagesRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    _check(request, service)
    chat = await chat_job(chat_request(request), service)
    return Order(chat.job, MessagesWriter(chat))


async def count_tokens(body: bytes, seat: Seat) -> TokenCount:
    request = await parse(CountTokensRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    _check(request, service)
    if not service.engine.abilities.tokens:
        raise tokens_unknown(service.engine, "count_tokens")
    chat = await chat_job(counted_request(request), service)
    return TokenCount(len(tokens_of(chat.job.prompts[0])))


def _check(request: CountTokensRequest, service: Service) -> None:
    service.check_model(request.model)
    wants_thoughts = request.thinking is not None and request.thinking.type == "enabled"
    # An engine that is given text tells thoughts apart itself, where there are any.
    if wants_thoughts and service.engine.abilities.tokens and service.engine.styles.reasoning is None:
        raise InvalidRequest(
            "It is not known that this model thinks before it answers.",
            hint="The operator can say how with --reasoning-style.",
            param="thinking",
        )
