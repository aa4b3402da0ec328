"""A request's body: read up to a limit, then one typed object or a refusal that names the place."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Struct
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope

from weft.api.error_responses import BodyTooLarge, BodyTooSlow
from weft.errors import InvalidRequest, shortened
from weft.options import LimitOptions
from weft.serving.admission import ClientGone


class TooDeep(InvalidRequest):
    kind = "json_too_deep"


class TooMany(InvalidRequest):
    kind = "too_many"


class Cap(Struct, frozen=True):
    field: str
    count: Callable[[Any], int]
    """Counts in the field's value, of whatever type it is; the schema refuses wrong types later."""
    limit: Callable[[LimitOptions], int]
    flag: str


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _prompts(value: Any) -> int:
    """Count the prompts; a list of numbers is one, in token ids."""
    return _length(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1


CAPS = (
    Cap("messages", _length, lambda limits: limits.max_messages, "--max-messages"),
    Cap("tools", _length, lambda limits: limits.max_tools, "--max-tools"),
    Cap("functions", _length, lambda limits: limits.max_tools, "--max-tools"),
    Cap("prompt", _prompts, lambda limits: limits.max_prompts, "--max-prompts"),
    Cap("input", _prompts, lambda limits: limits.max_messages, "--max-messages"),
    Cap("n", _number, lambda limits: limits.max_n, "--max-n"),
    Cap("best_of", _number, lambda limits: limits.max_n, "--max-n"),
    Cap("stop", _length, lambda limits: limits.max_stop, "--max-stop"),
    Cap("stop_sequences", _length, lambda limits: limits.max_stop, "--max-stop"),
    Cap("stop_token_ids", _length, lambda limits: limits.max_stop_token_ids, "--max-stop-token-ids"),
    Cap("logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("top_logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("prompt_logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("logit_bias", _length, lambda limits: limits.max_logit_bias, "--max-logit-bias"),
)


def check_caps(body: dict[str, Any], limits: LimitOptions) -> None:
    """Raise TooMany, with the limit and its flag, for a decoded body that has too much of something."""
    for cap in CAPS:
        if cap.field in body and (count := cap.count(body[cap.field])) > (limit := cap.limit(limits)):
            raise TooMany(
                f"{cap.field}: {count} in one request; at most {limit}.",
                hint=f"The operator's setting is {cap.flag}.",
                param=cap.field,
            )


MAX_KEY_CHARS = 1024
CONTAINER_VALUES = 4
"""An object or an array takes as much memory as so many numbers."""

_STRIDE = 1 << 18
"""The bytes that one step looks at, at most: other threads run in between."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+', re.DOTALL)
_INSIDE_STRING = re.compile(rb'(?:[^"\\]{1,1024}+|\\.){0,256}+', re.DOTALL)
"""All are possessive, and take linear time."""


def check_values(body: bytes, limits: LimitOptions) -> None:
    """Raise TooMany for JSON with too many values, before it is parsed: they take far more memory than their text."""
    most = limits.max_json_values
    # Those in strings count too at first. Few bodies have so many that it matters where they are.
    if _marks(body) > most and _num_values(body, most) > most:
        raise TooMany(
            f"The body's JSON has more than {most} values; an object or an array counts as {CONTAINER_VALUES}.",
            hint="The operator's setting is --max-json-values.",
        )


def _marks(text: bytes) -> int:
    return text.count(b",") + CONTAINER_VALUES * (text.count(b"[") + text.count(b"{"))


def _num_values(body: bytes, enough: int) -> int:
    """Count the values, up to `enough`, without what stands in strings."""
    count = at = 0
    while at < len(body) and count <= enough:
        window = body[at : at + _STRIDE]
        whole = _WHOLE_STRINGS.match(window)
        end = whole.end() if whole else 0
        count += _marks(_STRING.sub(b"", window[:end]))
        at += end
        if end < len(window):
            at = _behind_string(body, at + 1)
    return count


def _behind_string(body: bytes, at: int) -> int:
    """Return the position behind a string of any length that `at` stands in."""
    while at < len(body) and body[at] != ord('"'):
        inside = _INSIDE_STRING.match(body, at)
        at = max(at + 1, inside.end() if inside else 0)
    return at + 1


def check_nesting(value: Any, limits: LimitOptions) -> None:
    """Raise TooDeep for a value that is nested too deeply, and TooMany for a key that is too long."""
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > limits.max_json_depth:
            raise _too_deep(limits)
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                if (longest := max(map(len, part), default=0)) > MAX_KEY_CHARS:
                    raise TooMany(f"A key of the body's JSON has {longest} characters; at most {MAX_KEY_CHARS}.")
                part = part.values()
            below += [item for item in part if isinstance(item, dict | list)]
        level = below


def _too_deep(limits: LimitOptions) -> TooDeep:
    return TooDeep(
        f"The body's JSON is nested more than {limits.max_json_depth} deep.",
        hint="The operator's setting is --max-json-depth.",
    )


LONG_BODY_BYTES = 64 * 1024
"""Above this a body is parsed in a thread, so that the streams of others go on meanwhile."""

BODY_SECONDS = 120.0
"""A client must have sent all of a body by then."""

Schema = TypeVar("Schema", bound=BaseModel)
T = TypeVar("T")


async def answer_gone_client(request: Request, error: Exception) -> Response:
    return Response()


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read a body. Refuses it by the announced length, by what really comes, and by the time it takes."""
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
    return await off_loop(body, _parse, schema, body, limits)


async def off_loop(body: bytes, work: Callable[..., T], *arguments: Any) -> T:
    """Do work that grows with a body's length, in a thread where it is long."""
    return await asyncio.to_thread(work, *arguments) if len(body) > LONG_BODY_BYTES else work(*arguments)


def _parse(schema: type[Schema], body: bytes, limits: LimitOptions) -> Schema:
    check_values(body, limits)
    try:
        # msgspec refuses what JSON does not have (NaN, Infinity) and strings that are not text.
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    check_nesting(value, limits)
    check_caps(value, limits)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


MAX_REASON_CHARS = 500


def _refusal(error: ValidationError) -> InvalidRequest:
    """Return the first of the mistakes, with its place."""
    first: Any = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    location = [*first["loc"], *([context["field"]] if "field" in context else [])]
    steps = (f"[{step}]" if isinstance(step, int) else f".{shortened(step)}" for step in location)
    place = "".join(steps).lstrip(".")
    reason = shortened(first["msg"].removeprefix("Value error, "), MAX_REASON_CHARS)
    return InvalidRequest(f"{place}: {reason}" if place else reason, param=place or None)


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The body is larger than {limit_bytes >> 20} MiB.", hint="The operator's setting is --max-body-mb."
    )
