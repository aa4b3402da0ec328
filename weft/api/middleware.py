"""The layers before any endpoint: an id and a line in the log for every request, limits of headers, origins of pages in
browsers, keys, and the shape of errors for Anthropic's clients."""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection

import msgspec
from msgspec import UNSET
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft import logs
from weft.api.anthropic.messages_schema import anthropic_error
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
from weft.errors import ConfigError, InvalidRequest
from weft.observe import traces
from weft.observe.watchdog import name_task
from weft.options import LimitOptions, ServerOptions
from weft.serving.admission import Admission
from weft.serving.auth import HOW, presented

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
        header = (b"x-request-id", request_id.encode())
        began = time.perf_counter()
        status = HANGUP

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
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


ANY_ORIGIN = "*"

CORS_METHODS = b"GET, POST, DELETE"
CORS_EXPOSED = b"x-request-id, retry-after"
CORS_MAX_AGE_S = b"600"


def check_origins(options: ServerOptions) -> None:
    """Raise ConfigError for an --allowed-origin that no browser would send."""
    for origin in options.allowed_origin:
        scheme, _, host = origin.partition("://")
        if origin != ANY_ORIGIN and (not scheme or not host or "/" in host):
            raise ConfigError(
                f"--allowed-origin {origin!r:.100} is no origin.",
                hint="It is as in https://chat.example.org:8443, or *.",
            )


class CrossOrigin:
    """Lets pages of allowed origins use the server from a browser (CORS). Without keys it refuses the pages of other
    sites: they would come in with the rights of the user who looks at them."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._refuses = not admission.keys.required
        self._allowed = {origin.lower() for origin in admission.config.server.allowed_origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif ANY_ORIGIN in self._allowed or origin.decode("latin-1").lower() in self._allowed:
            await self._answer(origin, headers, scope, receive, send)
        elif self._refuses and _is_foreign(origin, headers.get(b"host", b"")):
            refusal = ForeignOrigin(
                f"This server has no keys, and refuses pages of {origin.decode('latin-1')!r:.100}.",
                hint="The operator can allow them with --allowed-origin, or require keys with --api-key.",
            )
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(
        self, origin: bytes, asked: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        leave = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in asked:
            leave += [
                (b"access-control-allow-methods", CORS_METHODS),
                (b"access-control-allow-headers", asked.get(b"access-control-request-headers", b"*")),
                (b"access-control-max-age", CORS_MAX_AGE_S),
            ]
            if asked.get(b"access-control-request-private-network") == b"true":
                leave.append((b"access-control-allow-private-network", b"true"))
            await send({"type": "http.response.start", "status": 204, "headers": leave})
            await send({"type": "http.response.body"})
            return
        leave.append((b"access-control-expose-headers", CORS_EXPOSED))

        async def send_with_leave(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *leave]
            await send(message)

        await self._app(scope, receive, send_with_leave)


def _is_foreign(origin: bytes, host: bytes) -> bool:
    """Return whether a page is neither of this server nor of this machine."""
    site = origin.decode("latin-1").lower().partition("://")[2]
    return site != host.decode("latin-1").lower() and not is_loopback(_name(site))


OPEN_PATHS = frozenset({"/health/live"})
ADMIN_PATH = "/admin"
VLLM_LOAD_PATH, VLLM_UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""The names that vLLM gives to two of the operator's routes."""


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
        if path in OPEN_PATHS:
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
    return path in (ADMIN_PATH, VLLM_LOAD_PATH, VLLM_UNLOAD_PATH) or path.startswith(ADMIN_PATH + "/")


MESSAGES_PATH = "/v1/messages"
MODELS_PATH = "/v1/models"
ANTHROPIC_VERSION = "anthropic-version"
"""The header that Anthropic's clients send, by which a list of models is in their shape."""


class AnthropicErrors:
    """Writes answers with an error status in Anthropic's shape, below its path, and of the models to its clients; all
    others pass as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_anthropic(scope):
            await self._app(scope, receive, send)
            return
        refusal: Message | None = None

        async def send_in_shape(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refusal = message
                return
            if refusal is not None:
                body = _anthropic_body(refusal, message["body"])
                await send({**refusal, "headers": _with_length(refusal, len(body))})
                message, refusal = {**message, "body": body}, None
            await send(message)

        await self._app(scope, receive, send_in_shape)


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    if path == MODELS_PATH or path.startswith(MODELS_PATH + "/"):
        return any(name == ANTHROPIC_VERSION.encode() for name, _ in scope["headers"])
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")


def _anthropic_body(refusal: Message, body: bytes) -> bytes:
    said = msgspec.json.decode(body, type=ErrorBody).error.message
    request_id = dict(refusal["headers"]).get(b"x-request-id")
    return msgspec.json.encode(
        anthropic_error(refusal["status"], said, UNSET if request_id is None else request_id.decode())
    )


def _with_length(refusal: Message, length: int) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in refusal["headers"] if name != b"content-length"]
    return [*others, (b"content-length", b"%d" % length)]
