"""An answer in one piece of JSON, of what msgspec can write."""

from __future__ import annotations

import msgspec
from fastapi import Response


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)
