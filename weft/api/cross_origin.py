"""Browsers: the names that this server is called by, and the pages that may use it (CORS)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.api.error_responses import ForeignOrigin, WrongHost, error_response
from weft.errors import ConfigError, InvalidRequest
from weft.options import ServerOptions
from weft.serving.admission import Admission

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


class CrossOrigin:
    """Lets pages of this machine and of allowed origins use the server from a browser (CORS). Without keys it refuses
    the pages of other sites: they would come in with the rights of the user who looks at them."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._has_keys = admission.keys.required
        self._allowed = allowed_origins(admission.config.server)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        asks = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        page = origin.decode("latin-1").lower()
        site = page.partition("://")[2]
        if self._allows(page, site):
            await (_answer_preflight(origin, headers, send) if asks else self._pass(origin, scope, receive, send))
        elif (asks or not self._has_keys) and site != headers.get(b"host", b"").decode("latin-1").lower():
            why = "does not answer" if self._has_keys else "has no keys, and refuses"
            refusal = ForeignOrigin(
                f"This server {why} pages of {origin.decode('latin-1')!r:.100}.",
                hint="The operator can allow them with --cors-origins.",
            )
            await error_response(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allows(self, page: str, site: str) -> bool:
        name = _name(site)
        is_of_this_machine = is_loopback(name) or _BELOW_LOCALHOST.fullmatch(name) is not None
        return is_of_this_machine or page in self._allowed or ANY_ORIGIN in self._allowed

    async def _pass(self, origin: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                exposed = (b"access-control-expose-headers", CORS_EXPOSED)
                message["headers"] = [*message.get("headers", ()), *_leave(origin), exposed]
            await send(message)

        await self._app(scope, receive, send_readable)


def _leave(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]


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
