"""The operator's routes, below /admin, two of them under vLLM's names as well. They are there only when there are
admin keys, and `ApiKeyAuth` opens them to no other. Nothing here tells what a prompt says."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from msgspec import Struct
from pydantic import Field

from weft.api.body import LONG_BODY_BYTES, Fields, off_loop, parse_body, read_body
from weft.api.error_responses import Conflict, JsonResponse, NoRequest
from weft.api.middleware import VLLM_LOAD_PATH, VLLM_UNLOAD_PATH
from weft.errors import ConfigError, InvalidRequest, ModelError, ModelNotFound, Unavailable, WeftError
from weft.serving.admission import DRAINING, Admission, RequestContext
from weft.serving.model_slot import ModelSlot
from weft.serving.served_model import ServedModel
from weft.types import LoadLora, ResetPrefixCache, SetChunkSize, StartProfile, StopProfile, UnloadLora

ENDED = "The operator ended this request."

T = TypeVar("T", bound=Fields)


class AbortRequest(Fields):
    """POST /admin/abort"""

    request_id: str = Field(min_length=1)
    """A request's own id, or its answer's."""


class LoadAdapter(Fields):
    """POST /admin/lora/load"""

    lora_name: str
    lora_path: str
    """A directory of the engine's machine."""


class UnloadAdapter(Fields):
    """POST /admin/lora/unload"""

    lora_name: str


class StreamChunkSize(Fields):
    """POST /admin/stream-chunk-size"""

    tokens: int = Field(ge=0, le=1_000_000)
    """Tokens in a piece of an answer; 0: as they are made."""


class OpenRequest(Struct, frozen=True, kw_only=True):
    request_id: str
    answer_id: str
    """Empty until the request was understood."""
    tenant: str
    age_s: float
    tokens: int
    """Tokens that were generated so far."""


class CacheReset(Struct, frozen=True, omit_defaults=True):
    forgotten_blocks: int
    refused: dict[str, str] = {}
    """The reasons of models that refused, by their names."""


def add_admin(app: FastAPI, admission: Admission) -> None:
    _add_requests(app, admission)
    _add_engine(app, admission)
    _add_adapters(app, admission)


def _add_requests(app: FastAPI, admission: Admission) -> None:
    @app.post("/admin/drain", include_in_schema=False)
    async def drain() -> Response:
        admission.drain(DRAINING)
        return _state(admission)

    @app.post("/admin/resume", include_in_schema=False)
    async def resume() -> Response:
        if not admission.resume():
            raise Conflict("The server is shutting down, and cannot be resumed.")
        return _state(admission)

    @app.get("/admin/requests", include_in_schema=False)
    async def requests() -> Response:
        return JsonResponse({"requests": [_shown_request(context) for context in admission.contexts()]})

    @app.post("/admin/abort", include_in_schema=False)
    async def abort(request: Request) -> Response:
        wanted = (await read(request, AbortRequest, admission)).request_id
        found = [context for context in admission.contexts() if wanted in (context.request_id, context.answer_id)]
        if not found:
            raise NoRequest(f"No request {wanted!r:.200} is open.", param="request_id")
        for context in found:
            context.abort(ENDED)
        return JsonResponse({"aborted": len(found)})

    @app.post("/admin/keys/reload", include_in_schema=False)
    async def reload_keys() -> Response:
        try:
            return JsonResponse({"keys": admission.keys.reload(), "admin_keys": admission.admin_keys.reload()})
        except ConfigError as error:
            raise Conflict(f"The keys stay as they were: {error}") from error


def _add_engine(app: FastAPI, admission: Admission) -> None:
    @app.post("/admin/cache/reset", include_in_schema=False)
    async def reset_cache(model: str = "") -> Response:
        """Reset the cache of the model that is named, or of all loaded ones that can."""
        if model:
            return JsonResponse(CacheReset(int(await _served(admission, model).engine.control(ResetPrefixCache()))))
        num_blocks = 0
        refused: dict[str, str] = {}
        for served in admission.pool.served_models():
            try:
                num_blocks += int(await served.engine.control(ResetPrefixCache()))
            except WeftError as error:
                refused[served.model_name] = str(error)
        return JsonResponse(CacheReset(num_blocks, refused))

    @app.post("/admin/stream-chunk-size", include_in_schema=False)
    async def set_chunk_size(request: Request, model: str = "") -> Response:
        wanted = await read(request, StreamChunkSize, admission)
        await _served(admission, model).engine.control(SetChunkSize(wanted.tokens))
        return JsonResponse({"tokens": wanted.tokens})

    @app.post("/admin/profile/start", include_in_schema=False)
    async def start_profile(model: str = "") -> Response:
        folder = admission.config.server.profile_dir
        if not folder:
            raise Conflict("There is no folder for traces.", hint="Start the server with --profile-dir.")
        try:
            return JsonResponse({"file": await _served(admission, model).engine.control(StartProfile(folder))})
        except InvalidRequest as error:
            raise Conflict(str(error)) from error

    @app.post("/admin/profile/stop", include_in_schema=False)
    async def stop_profile(model: str = "") -> Response:
        try:
            return JsonResponse({"file": await _served(admission, model).engine.control(StopProfile())})
        except InvalidRequest as error:
            raise Conflict(str(error)) from error


def _add_adapters(app: FastAPI, admission: Admission) -> None:
    @app.post("/admin/lora/load", include_in_schema=False)
    @app.post(VLLM_LOAD_PATH, include_in_schema=False)
    async def load(request: Request, model: str = "") -> Response:
        wanted = await read(request, LoadAdapter, admission)
        served = _served(admission, model)
        try:
            await served.engine.control(LoadLora(wanted.lora_name, wanted.lora_path, within_roots=True))
        except ModelError as error:
            raise InvalidRequest(error.message, hint=error.hint, param="lora_path") from error
        return JsonResponse({"adapters": served.adapter_names})

    @app.post("/admin/lora/unload", include_in_schema=False)
    @app.post(VLLM_UNLOAD_PATH, include_in_schema=False)
    async def unload(request: Request, model: str = "") -> Response:
        name = (await read(request, UnloadAdapter, admission)).lora_name
        served = _served(admission, model)
        if name not in served.adapter_names:
            raise ModelNotFound(f"There is no adapter {name!r:.200} here.", param="lora_name")
        await served.engine.control(UnloadLora(name))
        return JsonResponse({"adapters": served.adapter_names})


async def read(request: Request, kind: type[T], admission: Admission) -> T:
    body = await read_body(request.scope, request.receive, admission.config.server.max_body_mb << 20)
    is_long = len(body) > LONG_BODY_BYTES
    return await off_loop(is_long, parse_body, kind, body or b"{}", admission.config.limits)


def _served(admission: Admission, model: str) -> ServedModel:
    """Return a loaded model, even while the server drains; without a name the default one."""
    slot = admission.pool.find(model)
    if slot.served is None:
        raise Unavailable(f"The model {slot.name!r} is not loaded.")
    if model and not slot.answers_to(model):
        slot.served.check_model(model)
    return slot.served


def _state(admission: Admission) -> Response:
    return JsonResponse({"state": admission.health().reason or "ready", "open_requests": len(admission.contexts())})


def _shown_request(context: RequestContext) -> OpenRequest:
    return OpenRequest(
        request_id=context.request_id,
        answer_id=context.answer_id,
        tenant=context.tenant,
        age_s=round(time.monotonic() - context.began, 3),
        tokens=context.num_tokens,
    )


class NamedModel(Fields):
    """POST /admin/models/load, …/unload, …/reload"""

    model: str = ""
    """Empty: the only one; of several, to reload, all that the file names."""


class Resident(Struct, frozen=True, kw_only=True):
    """A model, as the operator sees it."""

    name: str
    state: str
    why: str
    """The reason why the last load failed."""
    stage: str
    """The stage of a load under way."""
    model: str
    engine: str
    """The one in use, or those that would be tried."""
    requests: int
    """Requests that are inside."""
    waiting: int
    memory_bytes: int
    """Bytes as measured or planned; 0: none."""
    idle_s: float | None


def add_model_admin(app: FastAPI, admission: Admission) -> None:
    pool = admission.pool

    @app.get("/admin/models", include_in_schema=False)
    async def models() -> Response:
        return _all(admission)

    @app.post("/admin/models/load", include_in_schema=False)
    async def load(request: Request) -> Response:
        slot = _slot(admission, (await read(request, NamedModel, admission)).model)
        slot.forgive()
        await pool.load(slot)
        return JsonResponse(_shown_model(slot))

    @app.post("/admin/models/unload", include_in_schema=False)
    async def unload(request: Request) -> Response:
        slot = _slot(admission, (await read(request, NamedModel, admission)).model)
        await slot.unload()
        return JsonResponse(_shown_model(slot))

    @app.post("/admin/models/reload", include_in_schema=False)
    async def reload(request: Request) -> Response:
        name = (await read(request, NamedModel, admission)).model
        if name or not pool.has_many:
            slot = _slot(admission, name)
            await pool.load_anew(slot)
            return JsonResponse(_shown_model(slot))
        try:
            pool.reload()
        except ConfigError as error:
            raise Conflict(f"The models stay as they were: {error}") from error
        return _all(admission)


def _slot(admission: Admission, name: str) -> ModelSlot:
    try:
        return admission.pool.named(name)
    except InvalidRequest as error:
        raise Conflict(str(error)) from error


def _all(admission: Admission) -> Response:
    return JsonResponse({"models": [_shown_model(slot) for slot in admission.pool.slots]})


def _shown_model(slot: ModelSlot) -> Resident:
    config = slot.entry.config
    is_used = slot.num_claims or slot.served is None
    return Resident(
        name=slot.name,
        state=slot.state,
        why=slot.failure.reason if slot.failure is not None else "",
        stage=slot.stage,
        model=config.model.model,
        engine=config.backend.engine if slot.served is None else slot.served.engine.name,
        requests=slot.num_inside,
        waiting=slot.num_claims - slot.num_inside,
        memory_bytes=slot.need.num_bytes if slot.holds_memory else 0,
        idle_s=None if is_used else round(time.monotonic() - slot.last_used, 3),
    )
