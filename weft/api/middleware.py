"""The layers before any endpoint: an id and a line in the log for every request, limits of headers, keys, HEAD, what a
key has left, and the shapes of errors for Anthropic's and Ollama's clients."""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import UNSET
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft import logs
from weft.api.anthropic.messages_schema import AnthropicError, anthropic_error
from weft.api.cross_origin import HostCheck
from weft.api.error_responses import ErrorBody, HeadTooLarge, NoKey, Unexpected, WrongKey, error_response
from weft.api.openai.openai_schema import SANE_ID
from weft.errors import InvalidRequest
from weft.observe import traces
from weft.observe.watchdog import name_task
from weft.options import LimitOptions
from weft.serving.admission import Admission
from weft.serving.auth import HOW, presented
from weft.serving.rate_limits import RateLimitState

log = logging.getLogger(__name__)

HANGUP = 499
"""In the log: the client hung up before it had an answer."""

_QUIET_PATHS = frozenset({"/health", "/health/live", "/metrics"})
_SANE_ID = re.compile(SANE_ID)


class RequestIdMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _client_id(scope) or uuid.uuid4().hex
        ids = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
        began = time.perf_counter()
        status = HANGUP

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                taken = (b"openai-processing-ms", b"%d" % ((time.perf_counter() - began) * 1000))
                message["headers"] = [*message.get("headers", ()), *ids, taken]
            await send(message)

        traces.take_in(
            ("traceparent", value.decode("latin-1")) for name, value in scope["headers"] if name == b"traceparent"
        )
        token = logs.request_id.set(request_id)
        name_task(f"{scope['method']} {scope['path']}")
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.exception("unexpected error")
            if status != HANGUP:
                raise
            await error_response(Unexpected(str(error)))(scope, receive, send_with_id)
        finally:
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": time.perf_counter() - began,
            }
            quiet = scope["path"] in _QUIET_PATHS
            logs.event(log, logging.DEBUG if quiet else logging.INFO, "request", fields)
            logs.request_id.reset(token)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _SANE_ID.fullmatch(text) else None
    return None


class HeaderLimits:
    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._limits = admission.config.limits
        self._hosts = HostCheck(admission.config.server, keys_required=admission.keys.required)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] != "http" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequest | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > self._limits.max_headers:
            return HeadTooLarge(
                f"The request has {len(headers)} headers; at most {self._limits.max_headers}.",
                hint="The operator's setting is --max-headers.",
            )
        size = len(scope["raw_path"] or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers)
        if size > self._limits.max_header_kb << 10:
            return too_large(self._limits)
        return self._hosts.refusal([value for name, value in headers if name == b"host"], scope["http_version"])


def too_large(limits: LimitOptions) -> HeadTooLarge:
    return HeadTooLarge(
        f"The request's head is larger than {limits.max_header_kb} KiB.",
        hint="The operator's setting is --max-header-kb.",
    )


OPEN_PATHS = frozenset({"/health/live"})
ROOT_PATH = "/"
"""Clients look with HEAD whether there is a server, before they have a key to send; the answer tells no more."""
ADMIN_PATH = "/admin"
VLLM_LOAD_PATH, VLLM_UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""The names that vLLM gives to two of the operator's routes."""
OLLAMA_PULL_PATH = "/api/pull"
_OPERATORS_PATHS = frozenset({ADMIN_PATH, VLLM_LOAD_PATH, VLLM_UNLOAD_PATH, OLLAMA_PULL_PATH})


class ApiKeyAuth:
    """Admin keys open the operator's routes and nothing else; other keys open everything else."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] != "http" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> NoKey | WrongKey | None:
        """Return why the request is refused; None: it is not, and the task is then that of the key's tenant."""
        path = scope["path"]
        # A pipelined request's task begins as a copy of the one before it.
        logs.tenant.set("")
        if path in OPEN_PATHS or (path == ROOT_PATH and scope["method"] == "HEAD"):
            return None
        for_admins = self._admission.admin_keys.required and _is_operators(path)
        keys = self._admission.admin_keys if for_admins else self._admission.keys
        if not keys.required:
            return None
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        owner = keys.owner(presented(headers))
        if owner is not None:
            logs.tenant.set(owner)
            return None
        if for_admins and self._admission.keys.owner(presented(headers)) is not None:
            return WrongKey("This wants an admin key, and the one shown is another.")
        return NoKey(f"This server wants an API key: {HOW}.")


def _is_operators(path: str) -> bool:
    return path in _OPERATORS_PATHS or path.startswith(ADMIN_PATH + "/")


class HeadRequests:
    """Answers HEAD as GET is answered, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"
"""The header that Anthropic's clients send, by which a list of models is in their shape."""


def _is_below(path: str, place: str) -> bool:
    return path == place or path.startswith(place + "/")


class RateLimitHeaders:
    """Tells with every answer to a request that counts what its key has left of this minute, in OpenAI's headers, and
    below Anthropic's path in Anthropic's."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _is_operators(scope["path"]):
            await self._app(scope, receive, send)
            return
        written = _anthropic_limits if _is_below(scope["path"], MESSAGES_PATH) else _openai_limits

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                states = self._admission.rate_limits(logs.tenant.get())
                limits = [(name.encode(), value.encode()) for state in states for name, value in written(state)]
                message["headers"] = [*message.get("headers", ()), *limits]
            await send(message)

        await self._app(scope, receive, send_with_limits)


def _openai_limits(state: RateLimitState) -> Iterator[tuple[str, str]]:
    yield f"x-ratelimit-limit-{state.unit}", str(state.limit)
    yield f"x-ratelimit-remaining-{state.unit}", str(state.remaining)
    yield f"x-ratelimit-reset-{state.unit}", duration(state.reset_s)


def _anthropic_limits(state: RateLimitState) -> Iterator[tuple[str, str]]:
    reset_at = datetime.now(UTC) + timedelta(seconds=math.ceil(state.reset_s))
    yield f"anthropic-ratelimit-{state.unit}-limit", str(state.limit)
    yield f"anthropic-ratelimit-{state.unit}-remaining", str(state.remaining)
    yield f"anthropic-ratelimit-{state.unit}-reset", reset_at.strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 6m0s, 1.5s, 20ms."""
    minutes, milliseconds = divmod(math.ceil(seconds * 1000), 60_000)
    if minutes:
        return f"{minutes}m{milliseconds / 1000:g}s"
    return f"{milliseconds / 1000:g}s" if milliseconds >= 1000 or not milliseconds else f"{milliseconds}ms"


ErrorShape = Callable[[Message, str], object]
"""Returns the body of a refusal, whose status and headers are in the message, with what it says."""


class ErrorShapes:
    """Writes answers with an error status in the shape that clients of a path read; all others pass as they are."""

    def __init__(self, app: ASGIApp, shapes: Mapping[str, ErrorShape]) -> None:
        """`shapes`: by the paths at and below which they hold."""
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The answer to HEAD has no body to write in another shape.
        path = scope["path"] if scope["type"] == "http" and scope["method"] != "HEAD" else ""
        shape = next((shape for at, shape in self._shapes.items() if _is_below(path, at)), None)
        if _is_below(path, MODELS_PATH) and any(name == ANTHROPIC_VERSION.encode() for name, _ in scope["headers"]):
            shape = anthropic_shape
        if shape is None:
            await self._app(scope, receive, send)
            return
        refusal: Message | None = None

        async def send_in_shape(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refusal = message
                return
            if refusal is not None:
                said = msgspec.json.decode(message["body"], type=ErrorBody).error.message
                body = msgspec.json.encode(shape(refusal, said))
                await send({**refusal, "headers": _with_length(refusal, len(body))})
                message, refusal = {**message, "body": body}, None
            await send(message)

        await self._app(scope, receive, send_in_shape)


def anthropic_shape(refusal: Message, said: str) -> AnthropicError:
    request_id = dict(refusal["headers"]).get(b"x-request-id")
    return anthropic_error(refusal["status"], said, UNSET if request_id is None else request_id.decode())


def ollama_shape(refusal: Message, said: str) -> dict[str, str]:
    return {"error": said}


def _with_length(refusal: Message, length: int) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in refusal["headers"] if name != b"content-length"]
    return [*others, (b"content-length", b"%d" % length)]
