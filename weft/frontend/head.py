"""A request's head, looked at before its path or its keys are: how large it is, and whom it calls."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config import LimitOptions
from weft.errors import InvalidRequest
from weft.frontend.errors import HeadTooLarge, error_response
from weft.frontend.gate import Gate
from weft.frontend.hosts import HostCheck


class Head:
    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._limits = gate.config.limits
        self._hosts = HostCheck(gate.config.server, keys_required=gate.keys.required)

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
