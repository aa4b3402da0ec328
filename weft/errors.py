"""The error tree. Every error says what was asked, what is possible, and what to change."""

from __future__ import annotations

import re
import reprlib
from decimal import Decimal


class WeftError(Exception):
    """An error meant for a user: `message` says what is wrong, `hint` what to do about it."""

    status = 500
    grpc_code = "INTERNAL"
    kind = "internal_error"

    def __init__(self, message: str, *, hint: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidRequest(WeftError, ValueError):
    """The request itself is wrong; sending it again unchanged cannot help.

    It is a ValueError too: callers of the CY-LLM Engine's contract catch that.
    """

    status = 400
    grpc_code = "INVALID_ARGUMENT"
    kind = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit in the model's context together."""

    kind = "context_length_exceeded"


class ModelNotFound(WeftError):
    status = 404
    grpc_code = "NOT_FOUND"
    kind = "model_not_found"


class Overloaded(WeftError):
    """The queue is full. `retry_after_s` estimates when a retry may succeed."""

    status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    kind = "overloaded"

    def __init__(self, message: str, *, retry_after_s: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class Unavailable(WeftError):
    """The server cannot take requests now. `retry_after_s` estimates when it can."""

    status = 503
    grpc_code = "UNAVAILABLE"
    kind = "unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1, hint: str = "", param: str | None = None) -> None:
        super().__init__(message, hint=hint, param=param)
        self.retry_after_s = retry_after_s


class RequestTimeout(WeftError):
    status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    kind = "timeout"


class EngineFault(WeftError):
    """The engine failed while it worked on this request."""

    kind = "engine_fault"


class ConfigError(WeftError):
    """A flag, an environment variable or a line of a file is wrong."""

    kind = "config_error"


class ModelError(WeftError):
    """A model cannot be found, is damaged, or is of a kind that Weft does not run."""

    kind = "model_error"


class OutOfMemory(WeftError):
    """The memory is too small for what was asked; the message holds the numbers, the hint the flag that would fit."""

    kind = "out_of_memory"


_PRIVATE = re.compile(r"\n|Traceback|0x[0-9a-fA-F]{4}|/[\w.-]++/[\w.-]|\w:\\|(?<!\d)\d++\.\d++\.\d++\.\d")
"""Matches tracebacks, addresses and paths, in linear time."""

ECHO_CHARS = 100


def shortened(text: str, length: int = ECHO_CHARS) -> str:
    """Return the beginning of a client's text, for an error to repeat."""
    return text if len(text) <= length else text[:length] + "…"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = ECHO_CHARS
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """Return the beginning of a client's value as Python writes it, whatever its size."""
    return _SHORT.repr(value)


def in_full(number: float) -> str:
    """Return a number without an exponent, and without a fraction that is nothing: 2147483647, 0.5."""
    if isinstance(number, int) or not abs(number) < 1e21:
        return str(number)
    return f"{Decimal(repr(number)):f}".removesuffix(".0")


def is_private(text: str) -> bool:
    """Return whether a text tells of this machine what a client must not learn."""
    return _PRIVATE.search(text) is not None


def public_reason(error: Exception) -> str:
    """Return why something failed, as far as a client may learn it."""
    text = str(error) if isinstance(error, WeftError) else ""
    return "the server's log says why." if not text or is_private(text) else text
