"""The operator's routes for several models, below /admin/models."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request, Response
from msgspec import Struct

from weft.errors import ConfigError, InvalidRequest
from weft.frontend.admin import read
from weft.frontend.errors import Conflict
from weft.frontend.gate import Gate
from weft.frontend.json_response import JsonResponse
from weft.frontend.schemas import Fields
from weft.frontend.slot import Slot


class NamedModel(Fields):
    """POST /admin/models/load, …/unload, …/reload"""

    model: str = ""
    """Empty, to reload: all that the file names."""


class Resident(Struct, frozen=True, kw_only=True):
    """A model, as the operator sees it."""

    name: str
    state: str
    why: str
    """The last load failed."""
    stage: str
    """Of a load under way."""
    model: str
    engine: str
    """The one in use, or those that would be tried."""
    requests: int
    """Inside."""
    waiting: int
    memory_bytes: int
    """As measured or planned; 0: none."""
    idle_s: float | None


def add_model_admin(app: FastAPI, gate: Gate) -> None:
    fleet = gate.fleet

    @app.get("/admin/models", include_in_schema=False)
    async def models() -> Response:
        return _all(gate)

    @app.post("/admin/models/load", include_in_schema=False)
    async def load(request: Request) -> Response:
        slot = _slot(gate, (await read(request, NamedModel, gate)).model)
        slot.forgive()
        await fleet.load(slot)
        return JsonResponse(_shown(slot))

    @app.post("/admin/models/unload", include_in_schema=False)
    async def unload(request: Request) -> Response:
        slot = _slot(gate, (await read(request, NamedModel, gate)).model)
        await slot.unload()
        return JsonResponse(_shown(slot))

    @app.post("/admin/models/reload", include_in_schema=False)
    async def reload(request: Request) -> Response:
        name = (await read(request, NamedModel, gate)).model
        if name:
            slot = _slot(gate, name)
            await slot.unload()
            slot.forgive()
            await fleet.load(slot)
            return JsonResponse(_shown(slot))
        try:
            fleet.reload()
        except (ConfigError, InvalidRequest) as error:
            raise Conflict(f"The models stay as they were: {error}") from error
        return _all(gate)


def _slot(gate: Gate, name: str) -> Slot:
    try:
        return gate.fleet.named(name)
    except InvalidRequest as error:
        raise Conflict(str(error)) from error


def _all(gate: Gate) -> Response:
    return JsonResponse({"models": [_shown(slot) for slot in gate.fleet.slots]})


def _shown(slot: Slot) -> Resident:
    config = slot.entry.config
    is_used = slot.num_claims or slot.service is None
    return Resident(
        name=slot.name,
        state=slot.state,
        why=slot.failure.reason if slot.failure is not None else "",
        stage=slot.stage,
        model=config.model.model,
        engine=config.backend.engine if slot.service is None else slot.service.engine.name,
        requests=slot.num_inside,
        waiting=slot.num_claims - slot.num_inside,
        memory_bytes=slot.need.num_bytes if slot.holds_memory else 0,
        idle_s=None if is_used else round(time.monotonic() - slot.last_used, 3),
    )
