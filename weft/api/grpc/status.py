"""The status and the details that a gRPC client gets when a call fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from typing import Any, Never, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from weft import logs
from weft.api.error_responses import Unexpected, error_body, reason_of
from weft.api.openai.openai_schema import SANE_ID
from weft.errors import InvalidRequest, Unavailable, WeftError

log = logging.getLogger(__name__)

AMessage = TypeVar("AMessage", bound=Message)

HEARING_S = 1.0


class RpcStatus(Struct, frozen=True):
    code: grpc.StatusCode
    details: str


def status_of(error: Exception) -> RpcStatus:
    """Return the status that an error stands for. What is the server's own fault is logged; of a defect of Weft's own,
    the client learns no more than that."""
    if not isinstance(error, WeftError):
        log.error("unexpected error", exc_info=error)
        error = Unexpected(str(error))
    elif error.status >= 500 and not isinstance(error, Unavailable):
        log.error("%s: %s", type(error).__name__, error)
    logs.note({"reason": reason_of(error)})
    return RpcStatus(grpc.StatusCode[error.grpc_code], error_body(error).error.message)


async def refuse(context: grpc.aio.ServicerContext[Any, Any], status: RpcStatus) -> Never:
    """End a call of which nothing was read yet. Its first message is waited for, though not for long: a client that
    is interrupted while it sends may take that for the error, and never look at the status."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEARING_S):
            await context.read()
    await context.abort(status.code, status.details)


MAX_FIELDS = 10_000
MANY_FIELDS_BYTES = 256 * 1024
"""A shorter message is parsed in some 20 ms, whatever it has."""


def parse(kind: type[AMessage], message: bytes) -> AMessage:
    """Parse a message, here and not by gRPC, which would call a client's mistake an error of the server's."""
    if len(message) > MANY_FIELDS_BYTES:
        check_fields(kind, message)
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise InvalidRequest(f"What was sent is not a {kind.DESCRIPTOR.name}.") from error


def check_fields(kind: type[Message], message: bytes) -> None:
    """Raise InvalidRequest for a message that would take long to parse, because parsing holds the interpreter: fields
    are counted before, entries of maps and fields of messages inside too."""
    waiting: list[tuple[Any, int, int]] = [(kind.DESCRIPTOR, 0, len(message))]
    count = 0
    while waiting:
        descriptor, at, end = waiting.pop()
        while at < end:
            count += 1
            if count > MAX_FIELDS:
                raise InvalidRequest(f"The {kind.DESCRIPTOR.name} has more than {MAX_FIELDS} fields and entries.")
            tag, at = _varint(message, at)
            match tag & 7:
                case 0:
                    _, at = _varint(message, at)
                case 1:
                    at += 8
                case 2:
                    length, begin = _varint(message, at)
                    at = begin + length
                    field = descriptor.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None and at <= end:
                        waiting.append((field.message_type, begin, at))
                case 5:
                    at += 4


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins here and the place behind it; the message's end if it is none."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    return 0, len(message)


MAX_TRACE_ID = 256

_SANE_ID = re.compile(SANE_ID)


def take_up(trace_id: str) -> None:
    """Log under this id from here on; raises InvalidRequest when it is too long."""
    logs.request_id.set(trace_id if _SANE_ID.fullmatch(trace_id) else uuid.uuid4().hex)
    if len(trace_id) > MAX_TRACE_ID:
        raise InvalidRequest(f"The trace_id has {len(trace_id)} characters; at most {MAX_TRACE_ID}.")
