"""The errors that a peer's refusals and broken connections become on this side."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from weft.errors import (
    ContextTooLong,
    EngineFault,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    Unavailable,
    WeftError,
)
from weft.types import FinishReason

log = logging.getLogger(__name__)

MAX_READ, MAX_SAID = 2000, 500
"""The most characters of a peer's message that are read, for the log, and that are passed on to a client."""

_PRIVATE_PARTS = {
    "(address)": (
        r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,15}://[^\s'\"<>)\]]+|host=['\"][^'\"]{1,255}['\"]|0x[0-9a-fA-F]{4,}"
        r"|\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b(?::[0-9]{1,5})?|\[[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}\](?::[0-9]{1,5})?"
        r"|\b(?:localhost|[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}):[0-9]{2,5}\b"
    ),
    "(key)": r"\b(?:sk|pk|rk|hf|nvapi|gh[opsu])[-_][\w*.-]{4,}|\b[Bb]earer\s+\S+|[A-Za-z0-9_+-]{40,}",
    "(path)": r"(?<![\w/.])~?(?:/[\w.@+~-]{1,255}){2,}/?|\b[A-Za-z]:\\\S+",
}
"""The parts of a peer's message that tell of its machine, or of its keys, and what a client reads in their place."""
_PATTERNS = {shown: re.compile(pattern) for shown, pattern in _PRIVATE_PARTS.items()}
_FIELD = re.compile(r"[\w.\[\]-]{1,100}")


def public_words(said: str) -> str:
    """Return of a peer's message what a client may read, on one line."""
    said = " ".join(said.partition("Traceback (most")[0].split())
    for shown, pattern in _PATTERNS.items():
        said = pattern.sub(shown, said)
    return said if len(said) <= MAX_SAID else f"{said[:MAX_SAID]} ..."


INVALID = frozenset({400, 413, 415, 422, 501})
KEY_REFUSED = frozenset({401, 403})

STATUS_BY_WORD = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "unavailable": 503,
    "timeout": 504,
}
"""The status of errors in a stream, which have none of their own, by their code or their type."""


TOO_LONG = frozenset({"context_length_exceeded", "exceed_context_size_error"})
"""The codes of OpenAI and of llama.cpp for it."""


class Detail(Struct, frozen=True, kw_only=True):
    """The message, the field and the codes of an error."""

    said: str
    param: str | None = None
    code: int | None = None
    words: tuple[str, ...] = ()
    """The error's code and its type."""


class PeerLost(Exception):
    """The connection broke, or what came over it made no sense. Asking again may help."""


class PeerRefused(PeerLost):
    """The error for a peer that cannot be connected to: no server listens at its address."""


def error_of(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> WeftError:
    """Return the error that a refusal stands for, with the peer's own message."""
    detail = _detail(body)
    return _error(status, detail, detail.said or f"it answered with status {status}", headers or {})


def error_in_stream(body: bytes) -> WeftError | None:
    """The error that an event tells of; None for an event that is no error."""
    # Most events are no errors, and need not be read twice.
    value = _decoded(body) if b'"error"' in body else None
    if not isinstance(value, dict) or not (value.get("error") or value.get("object") == "error"):
        return None
    detail = _detail(body)
    by_word = next((STATUS_BY_WORD[word] for word in detail.words if word in STATUS_BY_WORD), 500)
    return _error(detail.code or by_word, detail, detail.said or "it ended the answer with an error", {})


def finish_of(error: WeftError) -> FinishReason:
    """Return the finish reason of a request that has begun when this error comes."""
    match error:
        case RequestTimeout():
            return FinishReason.TIMEOUT
        case InvalidRequest():
            return FinishReason.REJECTED
        case Unavailable():
            return FinishReason.ABORT
        case _:
            return FinishReason.ERROR


def _error(status: int, detail: Detail, said: str, headers: Mapping[str, str]) -> WeftError:
    shown = public_words(said)
    if shown != said or status in KEY_REFUSED:
        log.warning("the remote engine says (status %d): %r", status, said)
    message = f"The remote engine says: {shown or 'it failed'}"
    if status in INVALID:
        kind = ContextTooLong if TOO_LONG & set(detail.words) else InvalidRequest
        return kind(message, param=detail.param)
    if status in KEY_REFUSED:
        return EngineFault("The remote engine refuses this server's key.", hint="The operator sets --engine-api-key.")
    match status:
        case 404:
            return ModelNotFound(message)
        case 408 | 504:
            return RequestTimeout(message)
        case 429:
            return Overloaded(message, retry_after_s=_seconds(headers.get("retry-after", "")))
        case 503:
            return Unavailable(message)
        case _:
            return EngineFault(message)


def _seconds(retry_after: str) -> int:
    """The header may also be a date; then soon is as good a guess as any."""
    return int(retry_after) if retry_after.isascii() and retry_after.isdigit() else 1


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None


def _detail(body: bytes) -> Detail:
    """Read an error body, which has one of three shapes: an object `error`, a text `error`, or the message itself."""
    value = _decoded(body)
    if isinstance(value, dict) and isinstance(value.get("error"), dict):
        value = value["error"]
    if not isinstance(value, dict):
        return Detail(said=body[: 4 * MAX_READ].decode(errors="replace").strip()[:MAX_READ])
    param, code = value.get("param"), value.get("code")
    return Detail(
        said=str(value.get("message") or value.get("error") or value.get("detail") or "")[:MAX_READ],
        param=param if isinstance(param, str) and _FIELD.fullmatch(param) else None,
        code=code if isinstance(code, int) else None,
        words=(str(code), str(value.get("type"))),
    )
