"""The HTTP door's lock: without a key every path is closed, known or not, but the one that says this process lives."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from weft import logs
from weft.frontend.errors import NoKey, WrongKey, error_response
from weft.frontend.gate import Gate
from weft.frontend.keys import HOW, presented

OPEN_PATHS = frozenset({"/health/live"})
ADMIN_PATH = "/admin"
VLLM_LOAD_PATH, VLLM_UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
"""What vLLM calls two of the operator's routes."""


class Lock:
    """Admin keys open the operator's routes and nothing else; other keys open everything else."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] != "http" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> NoKey | WrongKey | None:
        """None when the door opens; the task is then the key's owner's."""
        path = scope["path"]
        # A pipelined request's task begins as a copy of the one before it.
        logs.tenant.set("")
        if path in OPEN_PATHS:
            return None
        for_admins = self._gate.admin_keys.required and _is_operators(path)
        keys = self._gate.admin_keys if for_admins else self._gate.keys
        if not keys.required:
            return None
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        owner = keys.owner(presented(headers))
        if owner is not None:
            logs.tenant.set(owner)
            return None
        if for_admins and self._gate.keys.owner(presented(headers)) is not None:
            return WrongKey("This wants an admin key, and the one shown is another.")
        return NoKey(f"This server wants an API key: {HOW}.")


def _is_operators(path: str) -> bool:
    return path in (ADMIN_PATH, VLLM_LOAD_PATH, VLLM_UNLOAD_PATH) or path.startswith(ADMIN_PATH + "/")
