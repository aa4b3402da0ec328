"""Every error that HTTP answers, in OpenAI's shape."""

from __future__ import annotations

import logging
import re

import msgspec
from fastapi import Request, Response
from msgspec import Struct
from starlette.exceptions import HTTPException

from weft import logs
from weft.errors import InvalidRequest, Overloaded, Unavailable, WeftError, is_private, shortened
from weft.serving.data_store import QuotaExceeded
from weft.serving.rate_limits import BodiesOfAll, BodiesOfKey


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


log = logging.getLogger(__name__)


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


class BodyTooLarge(InvalidRequest):
    status = 413
    kind = "body_too_large"


class BodyTooSlow(InvalidRequest):
    status = 408
    kind = "body_timeout"


class NoKey(InvalidRequest):
    status = 401
    kind = "invalid_api_key"


class WrongKey(InvalidRequest):
    status = 403
    kind = "permission_denied"


class HeadTooLarge(InvalidRequest):
    status = 431
    kind = "headers_too_large"


class WrongHost(InvalidRequest):
    status = 421
    kind = "misdirected_request"


class ForeignOrigin(InvalidRequest):
    status = 403
    kind = "foreign_origin"


class WrongContentType(InvalidRequest):
    status = 415
    kind = "unsupported_media_type"


class WrongEncoding(WrongContentType):
    def __init__(self, message: str, *, accepted: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.accepted = accepted
        """The encodings that are read, as in Accept-Encoding."""


class UploadRefused(InvalidRequest):
    """A form with a file is not as it must be."""


BODY_UNREAD = (
    UploadRefused, QuotaExceeded,
    BodyTooLarge, BodyTooSlow, BodiesOfKey, BodiesOfAll, NoKey, WrongKey, HeadTooLarge, WrongHost, ForeignOrigin,
    WrongContentType,
)  # fmt: skip
"""The errors that are answered before the whole body was read."""


class Conflict(InvalidRequest):
    status = 409
    kind = "conflict"


class NoRequest(InvalidRequest):
    status = 404
    kind = "request_not_found"


class NoRoute(InvalidRequest):
    status = 404
    kind = "unknown_url"


class WrongMethod(InvalidRequest):
    status = 405
    kind = "method_not_allowed"


class Unexpected(WeftError):
    """A defect of Weft's own; what it was is in the log."""


def error_body(error: WeftError) -> ErrorBody:
    kind = _type(error.status)
    return ErrorBody(
        ErrorDetail(
            message=_public_message(error),
            type=kind,
            param=error.param,
            code=None if error.kind == kind else error.kind,
        )
    )


_QUOTED = re.compile(r"""(?<!\w)(['"])(?:\\.|(?!\1).)*(?:\1|$)""", re.DOTALL)
"""A text in quotation marks; where it was cut, to the end."""


_FIELD = re.compile(r"[\w.\[\]-]{1,100}")


def reason_of(error: WeftError) -> str:
    """Return why a request was refused, for the log: what the message quotes may be of a prompt and is left out, but
    for the name of a model; so is a field whose name is a text."""
    text = error.message
    if error.param is not None and not _FIELD.fullmatch(error.param):
        text = text.replace(error.param, "…")
    return shortened(text if error.param == "model" else _QUOTED.sub("'…'", text), MAX_REASON_CHARS)


def error_response(error: WeftError) -> Response:
    logs.note({"reason": reason_of(error), "code": error.kind})
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, NoKey):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, WrongEncoding):
        headers["Accept-Encoding"] = error.accepted
    if isinstance(error, BODY_UNREAD):
        # The rest of the body is not read, so the connection cannot carry another request.
        headers["Connection"] = "close"
    return JsonResponse(error_body(error), error.status, headers=headers)


async def answer_weft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeftError)
    if error.status >= 500 and not isinstance(error, Unavailable):
        log.error("%s: %s", type(error).__name__, error)
    return error_response(error)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own refusals: no such route, no such method on it."""
    assert isinstance(error, HTTPException)
    if error.status_code == WrongMethod.status:
        response = error_response(WrongMethod(f"{request.url.path} does not answer {request.method}."))
        allowed = (error.headers or {}).get("Allow", "")
        response.headers["Allow"] = f"{allowed}, HEAD" if allowed == "GET" else allowed
        return response
    return error_response(
        NoRoute(f"There is no {request.method} {request.url.path}.", hint="GET /openapi.json lists what there is.")
    )


MAX_MESSAGE_CHARS = 2000
MAX_REASON_CHARS = 300


def _type(status: int) -> str:
    if status == NoKey.status:
        return "authentication_error"
    if status == WrongKey.status:
        return "permission_error"
    if status == Overloaded.status:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _public_message(error: WeftError) -> str:
    """Tell a client's own mistakes in full; of the server's, only what holds nothing private."""
    text = shortened(str(error), MAX_MESSAGE_CHARS)
    if error.status < 500:
        return text
    if is_private(text) or isinstance(error, Unexpected):
        text = "The server failed while it worked on this request; its log says how."
    current = logs.request_id.get()
    return f"{text} (request id {current})" if error.status == 500 and current else text
