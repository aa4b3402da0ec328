"""The operator's routes, below /admin, two of them under vLLM's names as well. They are there only when there are
admin keys, and `lock` opens them to no other. Nothing here tells what a prompt says."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from msgspec import Struct

from weft.api.body import parse, read_body
from weft.api.error_responses import Conflict, JsonResponse, NoRequest
from weft.api.middleware import VLLM_LOAD_PATH, VLLM_UNLOAD_PATH
from weft.api.openai.openai_schema import Fields
from weft.errors import ConfigError, InvalidRequest, ModelError, ModelNotFound, Unavailable, WeftError
from weft.serving.admission import DRAINING, Admission, RequestContext
from weft.serving.model_slot import ModelSlot
from weft.serving.served_model import ServedModel

ENDED = "The operator ended this request."

T = TypeVar("T", bound=Fields)


class AbortRequest(Fields):
    """POST /admin/abort"""

    request_id: str
    """A request's own id, or its answer's."""


class LoadAdapter(Fields):
    """POST /admin/lora/load"""

    lora_name: str
    lora_path: str
    """A directory of the engine's machine."""


class UnloadAdapter(Fields):
    """POST /admin/lora/unload"""

    lora_name: str


class OpenRequest(Struct, frozen=True, kw_only=True):
    request_id: str
    answer_id: str
    """Empty until the request was understood."""
    tenant: str
    age_s: float
    tokens: int
    """Generated so far."""


class CacheReset(Struct, frozen=True, omit_defaults=True):
    forgotten_blocks: int
    refused: dict[str, str] = {}
    """Why models did not, by their names."""


def add_admin(app: FastAPI, gate: Admission) -> None:
    _add_requests(app, gate)
    _add_engine(app, gate)
    _add_adapters(app, gate)


def _add_requests(app: FastAPI, gate: Admission) -> None:
    @app.post("/admin/drain", include_in_schema=False)
    async def drain() -> Response:
        gate.drain(DRAINING)
        return _state(gate)

    @app.post("/admin/resume", include_in_schema=False)
    async def resume() -> Response:
        if not gate.resume():
            raise Conflict("The server is shutting down, and cannot be resumed.")
        return _state(gate)

    @app.get("/admin/requests", include_in_schema=False)
    async def requests() -> Response:
        return JsonResponse({"requests": [_shown_request(seat) for seat in gate.seats()]})

    @app.post("/admin/abort", include_in_schema=False)
    async def abort(request: Request) -> Response:
        wanted = (await read(request, AbortRequest, gate)).request_id
        found = [seat for seat in gate.seats() if wanted in (seat.request_id, seat.answer_id)]
        if not found:
            raise NoRequest(f"No request {wanted!r:.200} is open.", param="request_id")
        for seat in found:
            seat.abort(ENDED)
        return JsonResponse({"aborted": len(found)})

    @app.post("/admin/keys/reload", include_in_schema=False)
    async def reload_keys() -> Response:
        try:
            return JsonResponse({"keys": gate.keys.reload(), "admin_keys": gate.admin_keys.reload()})
        except ConfigError as error:
            raise Conflict(f"The keys stay as they were: {error}") from error


def _add_engine(app: FastAPI, gate: Admission) -> None:
    @app.post("/admin/cache/reset", include_in_schema=False)
    async def reset_cache(model: str = "") -> Response:
        """Of the model that is named, or of all loaded ones that can."""
        if model:
            return JsonResponse(CacheReset(await _service(gate, model).engine.reset_cache()))
        num_blocks = 0
        refused: dict[str, str] = {}
        for service in gate.fleet.services():
            try:
                num_blocks += await service.engine.reset_cache()
            except WeftError as error:
                refused[service.model_name] = str(error)
        return JsonResponse(CacheReset(num_blocks, refused))

    @app.post("/admin/profile/start", include_in_schema=False)
    async def start_profile(model: str = "") -> Response:
        folder = gate.config.server.profile_dir
        if not folder:
            raise Conflict("There is no folder for traces.", hint="Start the server with --profile-dir.")
        try:
            return JsonResponse({"file": await _service(gate, model).engine.start_profile(folder)})
        except InvalidRequest as error:
            raise Conflict(str(error)) from error

    @app.post("/admin/profile/stop", include_in_schema=False)
    async def stop_profile(model: str = "") -> Response:
        try:
            return JsonResponse({"file": await _service(gate, model).engine.stop_profile()})
        except InvalidRequest as error:
            raise Conflict(str(error)) from error


def _add_adapters(app: FastAPI, gate: Admission) -> None:
    @app.post("/admin/lora/load", include_in_schema=False)
    @app.post(VLLM_LOAD_PATH, include_in_schema=False)
    async def load(request: Request, model: str = "") -> Response:
        wanted = await read(request, LoadAdapter, gate)
        service = _service(gate, model)
        try:
            await service.engine.load_adapter(wanted.lora_name, wanted.lora_path)
        except ModelError as error:
            raise InvalidRequest(error.message, hint=error.hint, param="lora_path") from error
        return JsonResponse({"adapters": service.adapter_names})

    @app.post("/admin/lora/unload", include_in_schema=False)
    @app.post(VLLM_UNLOAD_PATH, include_in_schema=False)
    async def unload(request: Request, model: str = "") -> Response:
        name = (await read(request, UnloadAdapter, gate)).lora_name
        service = _service(gate, model)
        if name not in service.adapter_names:
            raise ModelNotFound(f"There is no adapter {name!r:.200} here.", param="lora_name")
        await service.engine.unload_adapter(name)
        return JsonResponse({"adapters": service.adapter_names})


async def read(request: Request, kind: type[T], gate: Admission) -> T:
    body = await read_body(request.scope, request.receive, gate.config.server.max_body_mb << 20)
    return await parse(kind, body or b"{}", gate.config.limits)


def _service(gate: Admission, model: str) -> ServedModel:
    """Of a loaded model, even while the server drains; without a name the default one's."""
    slot = gate.fleet.find(model)
    if slot.service is None:
        raise Unavailable(f"The model {slot.name!r} is not loaded.")
    if model and not slot.answers_to(model):
        slot.service.check_model(model)
    return slot.service


def _state(gate: Admission) -> Response:
    return JsonResponse({"state": gate.health().reason or "ready", "open_requests": len(gate.seats())})


def _shown_request(seat: RequestContext) -> OpenRequest:
    return OpenRequest(
        request_id=seat.request_id,
        answer_id=seat.answer_id,
        tenant=seat.tenant,
        age_s=round(time.monotonic() - seat.began, 3),
        tokens=seat.num_tokens,
    )


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


def add_model_admin(app: FastAPI, gate: Admission) -> None:
    fleet = gate.fleet

    @app.get("/admin/models", include_in_schema=False)
    async def models() -> Response:
        return _all(gate)

    @app.post("/admin/models/load", include_in_schema=False)
    async def load(request: Request) -> Response:
        slot = _slot(gate, (await read(request, NamedModel, gate)).model)
        slot.forgive()
        await fleet.load(slot)
        return JsonResponse(_shown_model(slot))

    @app.post("/admin/models/unload", include_in_schema=False)
    async def unload(request: Request) -> Response:
        slot = _slot(gate, (await read(request, NamedModel, gate)).model)
        await slot.unload()
        return JsonResponse(_shown_model(slot))

    @app.post("/admin/models/reload", include_in_schema=False)
    async def reload(request: Request) -> Response:
        name = (await read(request, NamedModel, gate)).model
        if name:
            slot = _slot(gate, name)
            await slot.unload()
            slot.forgive()
            await fleet.load(slot)
            return JsonResponse(_shown_model(slot))
        try:
            fleet.reload()
        except (ConfigError, InvalidRequest) as error:
            raise Conflict(f"The models stay as they were: {error}") from error
        return _all(gate)


def _slot(gate: Admission, name: str) -> ModelSlot:
    try:
        return gate.fleet.named(name)
    except InvalidRequest as error:
        raise Conflict(str(error)) from error


def _all(gate: Admission) -> Response:
    return JsonResponse({"models": [_shown_model(slot) for slot in gate.fleet.slots]})


def _shown_model(slot: ModelSlot) -> Resident:
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
