"""A request's body: read up to a limit, then one typed object or a refusal that names the place."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from weft.config import LimitOptions
from weft.errors import InvalidRequest
from weft.frontend.caps import check_caps, check_depth
from weft.frontend.errors import BodyTooLarge, BodyTooSlow

LONG_BODY_BYTES = 64 * 1024
"""Above this a body is parsed in a thread, so that the streams of others go on meanwhile."""

BODY_SECONDS = 120.0
"""A client must have sent all of a body by then."""

Schema = TypeVar("Schema", bound=BaseModel)


class ClientGone(Exception):
    """The client has hung up; there is nobody to answer."""


async def answer_nobody(request: Request, error: Exception) -> Response:
    return Response()


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Refuses by the announced length, by what really comes, and by the time it takes."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _too_large(limit_bytes)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _received(receive, limit_bytes)
    except TimeoutError:
        raise BodyTooSlow(f"The body was not complete after {BODY_SECONDS:g} s.") from None


async def _received(receive: Receive, limit_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit_bytes:
            raise _too_large(limit_bytes)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def parse(schema: type[Schema], body: bytes, limits: LimitOptions) -> Schema:
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(_parse, schema, body, limits)
    return _parse(schema, body, limits)


def _parse(schema: type[Schema], body: bytes, limits: LimitOptions) -> Schema:
    check_depth(body, limits)
    try:
        # msgspec refuses what JSON does not have (NaN, Infinity) and strings that are not text.
        value = msgspec.json.decode(body)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    check_caps(value, limits)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> InvalidRequest:
    """The first of the mistakes, with its place."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    location = [*first["loc"], *([context["field"]] if "field" in context else [])]
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{place}: {reason}" if place else reason, param=place or None)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than {limit_bytes >> 20} MiB.", hint="The operator's setting is --max-body-mb."
    )
