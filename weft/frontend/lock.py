"""The HTTP door's lock: without a key every path is closed, known or not, but the one that says this process lives."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.frontend.errors import NoKey, error_response
from weft.frontend.keys import HOW, Keys, presented

OPEN_PATHS = frozenset({"/health/live"})


class Lock:
    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
        else:
            await error_response(NoKey(f"This server wants an API key: {HOW}."))(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        return any(self._keys.know(key) for key in presented(headers))
