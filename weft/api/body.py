"""A request's body: read up to a limit, then one typed object or a refusal that names the place.

A schema has the fields that are honoured, `field_rules` those that are known and not honoured. What stands in neither
is unknown, and refused with the nearest name that is known.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Request, Response
from msgspec import Struct
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError
from starlette.types import Receive, Scope

from weft.api.content_encoding import decompressed, encoding_of
from weft.api.error_responses import BodyTooLarge, BodyTooSlow, WrongContentType
from weft.api.field_rules import RULES, Rule
from weft.errors import InvalidRequest, shortened, shown
from weft.options import LimitOptions
from weft.serving.admission import ClientGone, RequestContext
from weft.serving.request import FieldReport


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


def _items(value: Any) -> int:
    """Count the items of a list; anything else is one."""
    return len(value) if isinstance(value, list) else 1


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _prompts(value: Any) -> int:
    """Count the prompts; a list of numbers, or of objects among them, is one, in token ids."""
    return _items(value) if isinstance(value, list) and value and not isinstance(value[0], int | dict) else 1


def _tools(value: Any) -> int:
    """Count tools, and those inside of namespaces."""
    inside = (tool.get("tools") for tool in value if isinstance(tool, dict)) if isinstance(value, list) else ()
    return _length(value) + sum(map(_length, inside))


CAPS = (
    Cap("messages", _length, lambda limits: limits.max_messages, "--max-messages"),
    Cap("tools", _tools, lambda limits: limits.max_tools, "--max-tools"),
    Cap("functions", _length, lambda limits: limits.max_tools, "--max-tools"),
    Cap("prompt", _prompts, lambda limits: limits.max_prompts, "--max-prompts"),
    Cap("prompt_embeds", _items, lambda limits: limits.max_prompts, "--max-prompts"),
    Cap("input", _prompts, lambda limits: limits.max_messages, "--max-messages"),
    *(
        Cap(field, _items, lambda limits: limits.max_messages, "--max-messages")
        for field in ("documents", "text_1", "text_2")
    ),
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


VALUES_PER_NAME = 5
"""An object, a list or a name in an object takes as long to parse as so many numbers."""
FLAG = "The operator's setting is --max-json-values."
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))


def check_structure(body: bytes, limits: LimitOptions) -> None:
    """Raise TooMany or TooDeep for JSON that would take long to parse, because parsing holds the interpreter: it is
    counted before, in linear time and with pauses in which other threads run."""
    _check_count("escapes", body.count(b"\\"), limits.max_json_values, FLAG)
    max_names = limits.max_json_values // VALUES_PER_NAME
    if body.count(b"[") + body.count(b"{") <= limits.max_json_depth and body.count(b",") < max_names:
        return
    _check_count("strings", (body.count(b'"') - body.count(b'\\"')) // 2, 2 * limits.max_json_values, FLAG)
    outside = _outside_strings(body)
    num_nested = outside.count(b"[") + outside.count(b"{")
    _check_count("values", outside.count(b",") + num_nested, limits.max_json_values, FLAG)
    _check_count("names, lists and objects", num_nested + outside.count(b":"), max_names, FLAG)
    _check_depth(outside.translate(None, _NO_BRACKET), limits.max_json_depth)


def _check_count(what: str, count: int, limit: int, hint: str = "") -> None:
    if count > limit:
        raise TooMany(f"The body's JSON has {count} {what}; at most {limit}.", hint=hint)


def _outside_strings(body: bytes) -> bytes:
    pieces: list[bytes] = []
    at = 0
    while (begin := body.find(b'"', at)) >= 0:
        pieces.append(body[at:begin])
        at = _string_end(body, begin + 1)
    pieces.append(body[at:])
    return b"".join(pieces)


def _string_end(body: bytes, begin: int) -> int:
    """Return where the string ends that begins here: behind a quote before which the backslashes are even in number."""
    at = begin
    while (quote := body.find(b'"', at)) >= 0:
        before = quote
        while before > begin and body[before - 1] == 0x5C:
            before -= 1
        if (quote - before) % 2 == 0:
            return quote + 1
        at = quote + 1
    return len(body)


def _check_depth(brackets: bytes, limit: int) -> None:
    depth = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            raise TooDeep(
                f"The body's JSON is nested more than {limit} deep.", hint="The operator's setting is --max-json-depth."
            )


MAX_KEY_CHARS = 1024
_NESTED = {dict, list}


def check_keys(value: Any) -> None:
    """Raise TooMany for a key that is too long, wherever it stands."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) is dict:
            if (longest := max(map(len, part), default=0)) > MAX_KEY_CHARS:
                raise TooMany(f"A key of the body's JSON has {longest} characters; at most {MAX_KEY_CHARS}.")
            part = part.values()
        waiting += [item for item in part if type(item) in _NESTED]


LONG_BODY_BYTES = 16 * 1024
"""Above this a body is parsed in a thread."""

BODY_SECONDS = 120.0
"""A client must have sent all of a body by then."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some clients put it before their JSON."""

Schema = TypeVar("Schema", bound=BaseModel)
T = TypeVar("T")


async def answer_gone_client(request: Request, error: Exception) -> Response:
    return Response()


async def read_body(
    scope: Scope, receive: Receive, limit_bytes: int, hold: Callable[[int], None] = lambda _: None
) -> bytes:
    """Read a body, and decompress it. Refuses it by the announced length, by what really comes, by what that becomes,
    and by the time it takes. `hold` counts what has come, and may refuse more."""
    headers = dict(scope["headers"])
    encoding = encoding_of(scope["headers"]) if b"content-encoding" in headers else ""
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    if length != b"0" or b"transfer-encoding" in headers:
        check_content_type(scope["path"], headers)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _received(receive, limit_bytes, hold)
    except TimeoutError:
        raise BodyTooSlow(f"The body was not complete after {BODY_SECONDS:g} s.") from None
    if encoding and body:
        body = await _decompressed(encoding, body, limit_bytes, hold)
    return body.removeprefix(BYTE_ORDER_MARK)


OLLAMA_PATHS = "/api/"
_OF_BROWSERS = (b"origin", b"sec-fetch-site")
"""Headers that browsers put into every request of a page to another site, and that no page can leave out."""


def check_content_type(path: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise WrongContentType unless a body is said to be JSON. Pages in a browser may send other types to any server,
    in the name of the browser's user, without that server's leave. Clients of Ollama's that are no pages say what they
    like: its server looks at no type."""
    if path.startswith(OLLAMA_PATHS) and not any(name in headers for name in _OF_BROWSERS):
        return
    content_type = headers.get(b"content-type", b"")
    media_type = content_type.partition(b";")[0].strip().lower()
    if media_type == b"application/json" or (media_type.startswith(b"application/") and media_type.endswith(b"+json")):
        return
    said = f"is {content_type.decode('latin-1')!r:.100}" if content_type else "is not said"
    raise WrongContentType(
        f"The body's type {said}; it must be JSON.",
        hint="Send the header Content-Type: application/json; curl does with --json instead of -d.",
    )


async def _received(receive: Receive, limit_bytes: int, hold: Callable[[int], None]) -> bytes:
    # One growing piece of memory, which goes back to the system; many small ones would stay with the process. It
    # becomes bytes without a copy, which of a large body would hold the loop for long.
    body = io.BytesIO()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        if body.tell() + len(piece) > limit_bytes:
            raise _too_large(limit_bytes)
        hold(len(piece))
        body.write(piece)
        if not message.get("more_body", False):
            return body.getvalue()


async def _decompressed(encoding: str, body: bytes, limit_bytes: int, hold: Callable[[int], None]) -> bytes:
    # What it becomes counts, and not both: the largest body that is allowed must fit in its budget when it is alone.
    hold(-len(body))
    whole = io.BytesIO()
    pieces = decompressed(encoding, body)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        if whole.tell() + len(piece) > limit_bytes:
            raise _too_large(limit_bytes)
        hold(len(piece))
        whole.write(piece)
    return whole.getvalue()


async def parse(schema: type[Schema], body: bytes, context: RequestContext) -> Schema:
    """Return a body as the schema has it. What it has and is not honoured goes into the context's report of fields."""
    limits, is_long = context.config.limits, len(body) > LONG_BODY_BYTES
    return await off_loop(is_long, parse_body, schema, body, limits, context.fields, context.pool.only_name)


async def off_loop(is_long: bool, work: Callable[..., T], *arguments: Any) -> T:
    """Do work in a thread where it is long, so that the streams of others go on meanwhile."""
    return await asyncio.to_thread(work, *arguments) if is_long else work(*arguments)


def parse_body(
    schema: type[Schema], body: bytes, limits: LimitOptions, report: FieldReport | None = None, model: str = ""
) -> Schema:
    """`model`: the one that is meant where the body names none; empty: it must name one."""
    check_structure(body, limits)
    try:
        # msgspec refuses what JSON does not have (NaN, Infinity) and strings that are not text.
        value = msgspec.json.decode(body)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    check_keys(value)
    named = schema.model_fields.get("model")
    if model and value.get("model") is None and named is not None and named.is_required():
        value["model"] = model
    return checked(schema, value, limits, report)


def checked(
    schema: type[Schema], fields: dict[str, Any], limits: LimitOptions, report: FieldReport | None = None
) -> Schema:
    """Return the fields as the schema has them. Raises InvalidRequest for the first that is wrong."""
    check_caps(fields, limits)
    try:
        return schema.model_validate(fields, context=report)
    except ValidationError as error:
        raise _refusal(error) from error


MAX_NAME_CHARS = 64
"""No field has a longer name."""


VENDOR_TOOLS = re.compile(
    r"(advisor|apply_patch|bash|code_execution|code_interpreter|computer|computer_use|file_search|"
    r"image_generation|local_shell|mcp|mcp_toolset|memory|namespace|shell|text_editor|tool_search(_tool\w{0,40})?|"
    r"web_fetch|web_search)(_preview)?(_[0-9]{4}_?[0-9]{2}_?[0-9]{2})?"
)
"""Types of tools that OpenAI and Anthropic publish beside functions: what they do is known to their models alone."""


def client_tools(*own: str) -> Callable[[object, ValidationInfo], object]:
    """Return what takes the tools of a request that clients run, by their types, from those that only a vendor's model
    or server can use."""

    def is_left_aside(tool: object, report: FieldReport) -> bool:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind in own or len(kind) > MAX_NAME_CHARS:
            return False
        is_known = VENDOR_TOOLS.fullmatch(kind) is not None
        if report.mode == "strict" or not (is_known or report.mode == "tolerant"):
            return False
        report.leave_aside(f"tools.tools.{kind}", known=is_known)
        return True

    def taken(value: object, info: ValidationInfo) -> object:
        report: FieldReport = info.context or FieldReport()
        return [tool for tool in value if not is_left_aside(tool, report)] if isinstance(value, list) else value

    return taken


class Fields(BaseModel):
    """An object of a request: types are strict, null means absent, and every field has a rule."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    place: ClassVar[str] = ""
    """Its place in `RULES`; empty: an object that no client sends by itself."""

    @model_validator(mode="before")
    @classmethod
    def _by_the_rules(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return honoured_fields(value, known, cls.place, info.context or FieldReport())

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        _describe(handler.resolve_ref_schema(schema), RULES.get(cls.place, {}))
        return schema


def honoured_fields(
    value: Mapping[str, Any], known: Collection[str], place: str, report: FieldReport
) -> dict[str, Any]:
    """Return an object's fields without its nulls and hints. Raises for what is impossible or unknown."""
    rules = RULES.get(place, {})
    kept = {}
    for name, item in value.items():
        if name in known:
            if item is not None:
                kept[name] = item
            continue
        rule = rules.get(name)
        if rule is None:
            if report.mode != "tolerant":
                refusal = {"field": name, "hint": nearest(name, [*known, *rules])}
                raise PydanticCustomError("unknown_field", "there is no such field.{hint}", refusal)
            report.leave_aside(f"{place}.{name}", known=False)
        elif item is not None and not rule.passes(item):
            if not rule.possible or report.mode == "strict":
                refusal = {"field": name, "said": _said(item), "why": rule.why}
                raise PydanticCustomError("not_supported", "{said} is not supported: {why}.", refusal)
            report.leave_aside(f"{place}.{name}")
    return kept


def nearest(name: str, known: Collection[str]) -> str:
    # The matcher takes quadratic time.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5) if len(name) <= MAX_NAME_CHARS else ()
    return f" Did you mean {close[0]!r}?" if close else ""


def _describe(schema: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Let an object's description say that null is taken for a field that may be absent, and which fields are hints. A
    request need not name the model where there is one."""
    fields = schema.setdefault("properties", {})
    if "model" in (required := schema.get("required", [])):
        required.remove("model")
    for name in fields.keys() - schema.get("required", ()):
        field = fields[name]
        if {"type": "null"} not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            fields[name] = {"anyOf": [field, {"type": "null"}], **about}
    for name, rule in rules.items():
        if rule.possible:
            fields.setdefault(name, {"description": f"Accepted without effect: {rule.why}."})
        else:
            fields.setdefault(name, {"enum": [None, *rule.neutral], "description": f"Not supported: {rule.why}."})


def _said(value: object) -> str:
    """Return the value when it is short enough to name."""
    return said if isinstance(value, str | int | float) and len(said := shown(value)) < 40 else "it"


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
