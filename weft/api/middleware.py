"""The layers before any endpoint: an id and a line in the log for every request, origins of pages in browsers, limits
of headers, keys, HEAD, what a key has left, compressed answers, and the shapes of errors for Anthropic's and Ollama's
clients."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta

import msgspec
from msgspec import UNSET
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft import logs
from weft.api.anthropic.messages_schema import AnthropicError, anthropic_error
from weft.api.content_encoding import Compressor, answer_encoding, compress, open_compressor
from weft.api.error_responses import (
    ErrorBody,
    ForeignOrigin,
    HeadTooLarge,
    NoKey,
    Unexpected,
    WrongHost,
    WrongKey,
    error_response,
)
from weft.api.openai.openai_schema import SANE_ID
from weft.api.page import ASSETS, PlaygroundPage
from weft.errors import ConfigError, InvalidRequest
from weft.observe import traces
from weft.observe.watchdog import name_task
from weft.options import LimitOptions, ServerOptions
from weft.serving.admission import Admission
from weft.serving.auth import HOW, presented
from weft.serving.rate_limits import RateLimitState

log = logging.getLogger(__name__)

HANGUP = 499
"""In the log: the client hung up before it had an answer."""

LIVE_PATH = "/live"
_QUIET_PATHS = frozenset({"/health", "/health/live", "/metrics", LIVE_PATH, *ASSETS})
_SANE_ID = re.compile(SANE_ID)

CORS_HEADERS = "weft.cors_headers"
"""The place in a request's scope of headers that every answer to it has, also one of 500, for its page to read it."""


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
                message["headers"] = [*message.get("headers", ()), *ids, taken, *scope.get(CORS_HEADERS, ())]
            await send(message)

        traces.take_in(
            ("traceparent", value.decode("latin-1")) for name, value in scope["headers"] if name == b"traceparent"
        )
        token = logs.request_id.set(request_id)
        name_task(f"{scope['method']} {scope['path']}")
        try:
            with logs.request_line() as line:
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
                **line.fields,
                "seconds": time.perf_counter() - began,
            }
            quiet = scope["path"] in _QUIET_PATHS and not 400 <= status < 500
            logs.event(log, logging.DEBUG if quiet else logging.INFO, "request", fields)
            logs.request_id.reset(token)


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text: str = value.decode("latin-1")
            return text if _SANE_ID.fullmatch(text) else None
    return None


COMMON_LOOPBACKS = frozenset({"localhost", "127.0.0.1", "::1"})
"""Nearly every request to this machine names one of these, and to parse an address takes long."""


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address of this machine that no other machine reaches."""
    try:
        return host in COMMON_LOOPBACKS or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HostCheck:
    def __init__(self, options: ServerOptions, *, keys_required: bool) -> None:
        self._is_guarded = is_loopback(options.host) and not keys_required and not options.insecure
        self._allowed: Collection[str] = {name.lower() for name in options.allowed_host}

    def refusal(self, hosts: list[bytes], http_version: str) -> InvalidRequest | None:
        """Return why a request with these Host headers is refused; None: it is not."""
        if len(hosts) > 1 or (not hosts and http_version not in ("0.9", "1.0")):
            return InvalidRequest("A request has one Host header.")
        if not self._is_guarded:
            return None
        name = _name(hosts[0].decode("latin-1")) if hosts else ""
        if is_loopback(name) or name in self._allowed:
            return None
        return WrongHost(
            "This server has no keys, and answers only to names of this machine.",
            hint="Call it localhost; or the operator adds the name with --allowed-host.",
        )


def _name(host: str) -> str:
    """Return the host without its port, as it is compared."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


ANY_ORIGIN = "*"

CORS_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
CORS_MAX_AGE_S = b"600"
CORS_EXPOSED = b"*"
"""Every header of an answer: credentials, for which this would be no wildcard, are never allowed."""

_BELOW_LOCALHOST = re.compile(r"[a-z0-9.-]+\.localhost")
"""Browsers take these names for this machine without asking a name server."""


def allowed_origins(options: ServerOptions) -> frozenset[str]:
    """Return the origins of --cors-origins, which is repeated or has commas. Raises ConfigError for one that no browser
    would send."""
    origins = [origin.strip().lower() for item in options.cors_origins for origin in item.split(",")]
    for origin in origins:
        scheme, _, host = origin.partition("://")
        if origin != ANY_ORIGIN and (not scheme or not host or "/" in host):
            raise ConfigError(
                f"--cors-origins {origin!r:.100} is no origin.",
                hint="It is as in https://chat.example.org:8443, or *.",
            )
    return frozenset(origins)


class AllowedOrigins:
    """The pages that may use the server from a browser: those of this machine, and those that the operator allowed."""

    def __init__(self, options: ServerOptions) -> None:
        self._allowed = allowed_origins(options)

    def __contains__(self, origin: bytes) -> bool:
        page = origin.decode("latin-1").lower()
        name = _name(page.partition("://")[2])
        is_of_this_machine = is_loopback(name) or _BELOW_LOCALHOST.fullmatch(name) is not None
        return is_of_this_machine or page in self._allowed or ANY_ORIGIN in self._allowed


class CrossOrigin:
    """Lets pages of this machine and of allowed origins use the server from a browser (CORS). Without keys it refuses
    the pages of other sites: they would come in with the rights of the user who looks at them."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._has_keys = admission.keys.required
        self._allowed = AllowedOrigins(admission.config.server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        asks = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        site = origin.decode("latin-1").lower().partition("://")[2]
        if origin in self._allowed:
            if asks:
                await _answer_preflight(origin, headers, send)
                return
            scope[CORS_HEADERS] = readable_by(origin)
            await self._app(scope, receive, send)
        elif (asks or not self._has_keys) and site != headers.get(b"host", b"").decode("latin-1").lower():
            why = "does not answer" if self._has_keys else "has no keys, and refuses"
            refusal = ForeignOrigin(
                f"This server {why} pages of {origin.decode('latin-1')!r:.100}.",
                hint="The operator can allow them with --cors-origins.",
            )
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _leave(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]


def readable_by(origin: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers by which a page of an allowed origin can read an answer."""
    return [*_leave(origin), (b"access-control-expose-headers", CORS_EXPOSED)]


async def _answer_preflight(origin: bytes, asked: dict[bytes, bytes], send: Send) -> None:
    """Answer what a browser asks before a page's request. It has no key, whatever the request will have."""
    headers = [
        *_leave(origin),
        (b"access-control-allow-methods", CORS_METHODS),
        (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
        (b"access-control-max-age", CORS_MAX_AGE_S),
    ]
    if asked.get(b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body"})


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
    """Admin keys open the operator's routes and nothing else; other keys open everything else but the page, which is
    open."""

    def __init__(self, app: ASGIApp, admission: Admission, page: PlaygroundPage | None = None) -> None:
        self._app = app
        self._admission = admission
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http, page = scope["type"] == "http", self._page
        if page is not None and is_http and scope["path"] in page.files and page.is_asked_for(scope):
            await page(scope, receive, send)
            return
        refusal = self._refusal(scope) if is_http else None
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


MIN_ANSWER_BYTES = 1024
"""A smaller answer is sent as it is."""
LONG_ANSWER_BYTES = 16 * 1024
"""Above this an answer is compressed in a thread."""
_COMPRESSIBLE = re.compile(rb"application/json|text/(?!event-stream)")


class CompressedAnswers:
    """Compresses answers of a known length for clients that accept it: streams and errors pass as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # An answer in several pieces is sent in chunks, which HTTP 1.0 does not have.
        is_able = scope["type"] == "http" and scope["http_version"] != "1.0"
        accepted = [value for name, value in scope["headers"] if name == b"accept-encoding"] if is_able else []
        if not accepted:
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        encoding = ""
        compressor: Compressor | None = None

        async def send_compressed(message: Message) -> None:
            nonlocal start, encoding, compressor
            if message["type"] == "http.response.start" and _is_compressible(message):
                encoding = answer_encoding(b",".join(accepted))
            if encoding and compressor is None:
                start, compressor = message, open_compressor(encoding)
                return
            if compressor is not None:
                body, is_last = message.get("body", b""), not message.get("more_body", False)
                if len(body) > LONG_ANSWER_BYTES:
                    body = await asyncio.to_thread(compress, compressor, body, is_last)
                else:
                    body = compress(compressor, body, is_last)
                if start is not None:
                    await send({**start, "headers": _headers(start, encoding, len(body) if is_last else None)})
                    start = None
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, send_compressed)


def _is_compressible(start: Message) -> bool:
    headers = dict(start["headers"])
    return (
        start["status"] == 200
        and int(headers.get(b"content-length", b"0")) >= MIN_ANSWER_BYTES
        and b"content-encoding" not in headers
        and _COMPRESSIBLE.match(headers.get(b"content-type", b"")) is not None
    )


def _headers(start: Message, encoding: str, length: int | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a compressed answer; without a length it is sent in chunks."""
    kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
    kept += [(b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]
    return kept if length is None else [*kept, (b"content-length", b"%d" % length)]
