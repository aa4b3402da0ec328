"""Errors of Anthropic's paths in Anthropic's shape, whoever refused: the lock, the router, a door or the engine."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.frontend.errors import ErrorBody

PATH = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(Struct, frozen=True):
    type: str
    message: str


class AnthropicError(Struct, frozen=True, kw_only=True):
    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET


def anthropic_error(status: int, message: str, request_id: str | UnsetType = UNSET) -> AnthropicError:
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return AnthropicError(error=AnthropicErrorDetail(kind, message), request_id=request_id)


class AnthropicErrors:
    """Writes anew what an answer with an error status says; all others pass as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == PATH or scope["path"].startswith(PATH + "/")):
            await self._app(scope, receive, send)
            return
        refusal: Message | None = None

        async def send_in_shape(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refusal = message
                return
            if refusal is not None:
                body = _body(refusal, message["body"])
                await send({**refusal, "headers": _headers(refusal, len(body))})
                message, refusal = {**message, "body": body}, None
            await send(message)

        await self._app(scope, receive, send_in_shape)


def _body(refusal: Message, body: bytes) -> bytes:
    said = msgspec.json.decode(body, type=ErrorBody).error.message
    request_id = dict(refusal["headers"]).get(b"x-request-id")
    return msgspec.json.encode(
        anthropic_error(refusal["status"], said, UNSET if request_id is None else request_id.decode())
    )


def _headers(refusal: Message, length: int) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in refusal["headers"] if name != b"content-length"]
    return [*others, (b"content-length", b"%d" % length)]
