"""The outermost layer: every request has an id, a line in the log, and an answer even when Weft has a defect."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft import logs
from weft.frontend.errors import Unexpected, error_response
from weft.frontend.schemas import SANE_ID
from weft.observe import traces

log = logging.getLogger(__name__)

HANGUP = 499
"""In the log: the client hung up before it had an answer."""

_QUIET_PATHS = frozenset({"/health", "/health/live", "/metrics"})
_SANE_ID = re.compile(SANE_ID)


class Shell:
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
