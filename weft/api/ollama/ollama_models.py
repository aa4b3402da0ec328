"""Ollama's routes: its endpoints, and what they tell of the models that are here."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from msgspec import UNSET, Struct
from starlette.types import Receive, Scope, Send

from weft.api.admin import read
from weft.api.body import checked, parse, read_body
from weft.api.error_responses import JsonResponse, WrongKey
from weft.api.handler import NDJSON_HEADERS, Handler, StreamedResponse, add_posts, fields_header
from weft.api.middleware import OLLAMA_PULL_PATH
from weft.api.ollama.ollama_chat import chosen, ollama_chat_endpoint, ollama_generate_endpoint, served_name
from weft.api.ollama.ollama_schema import (
    LATEST,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaModelRequest,
    OllamaOldEmbedRequest,
    nanoseconds,
    written_time,
)
from weft.api.openai.embeddings import EmbeddingsRequest, EmbeddingsWriter, parse_embeddings, written
from weft.api.openai.openai_answers import ModelCard, with_items
from weft.errors import InvalidRequest, ModelError, ModelNotFound, WeftError, public_reason
from weft.options import LimitOptions
from weft.serving.admission import Admission, ClientGone, RequestContext
from weft.serving.model_slot import ModelSlot
from weft.serving.output_reader import CollectedOutput
from weft.serving.served_model import ServedModel
from weft.types import GenerationRequest

RUNNING = "Ollama is running"
"""Clients look for these words at / before anything else."""
OLLAMA_VERSION = "0.12.6"
"""The version whose interface this is: clients refuse older ones."""
FAMILY = "weft"
"""The family of every model: what its files say of it stays with the engine."""
FAR_AWAY = "9999-12-31T23:59:59Z"
PROGRESS_S = 0.25
"""The time between two lines about a download."""

Cards = Callable[[], list[ModelCard]]


class OllamaDetails(Struct, frozen=True, kw_only=True):
    parent_model: str = ""
    format: str = ""
    family: str = FAMILY
    families: tuple[str, ...] = (FAMILY,)
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model, as tags and ps list it."""

    name: str
    model: str
    modified_at: str = ""
    size: int
    digest: str
    details: Any
    expires_at: str = ""
    size_vram: int = -1
    context_length: int = 0


def add_ollama(app: FastAPI, admission: Admission, cards: Cards) -> None:
    """Add the routes. `cards` lists the models."""
    generation = {
        "/api/chat": ollama_chat_endpoint,
        "/api/generate": ollama_generate_endpoint,
        "/api/embed": ollama_embed_endpoint,
        "/api/embeddings": ollama_old_embed_endpoint,
    }
    add_posts(app, {path: partial(Handler, admission, endpoint) for path, endpoint in generation.items()})
    _add_models(app, admission, cards)


def _add_models(app: FastAPI, admission: Admission, cards: Cards) -> None:
    pulls = ThreadPoolExecutor(1, "weft-pull")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        return PlainTextResponse(RUNNING)

    @app.get("/api/version", include_in_schema=False)
    async def version() -> Response:
        return JsonResponse({"version": OLLAMA_VERSION})

    @app.get("/api/tags", include_in_schema=False)
    async def tags() -> Response:
        return JsonResponse({"models": [_listed(card, admission) for card in cards() if _writes(card)]})

    @app.get("/api/ps", include_in_schema=False)
    async def running() -> Response:
        admission.check_open()
        return JsonResponse({"models": [_loaded(slot) for slot in admission.pool.slots if slot.served is not None]})

    @app.post("/api/show", include_in_schema=False)
    async def show(request: Request) -> Response:
        asked = _wanted(await read(request, OllamaModelRequest, admission), admission)
        for card in cards():
            if card.id == asked and _writes(card):
                return JsonResponse(_shown(card, admission))
        raise ModelNotFound(f"model {asked!r:.200} not found")

    @app.post(OLLAMA_PULL_PATH, include_in_schema=False)
    async def pull() -> Response:
        return PullHandler(admission, cards, pulls)


def _wanted(request: OllamaModelRequest, admission: Admission) -> str:
    return served_name(admission.pool, request.model or request.name)


def _writes(card: ModelCard) -> bool:
    return card.capabilities is UNSET or "chat" in card.capabilities


def _tagged(name: str) -> str:
    return name if ":" in name else name + LATEST


def _digest(name: str) -> str:
    """Return what tells models apart. It is of the name: files are not read again for it."""
    return hashlib.sha256(name.encode()).hexdigest()


def _details(served: ServedModel | None, parent: str = "") -> OllamaDetails:
    return OllamaDetails(parent_model=parent, quantization_level="" if served is None else served.engine.model.dtype)


def _listed(card: ModelCard, admission: Admission) -> OllamaModel:
    slot = admission.pool.find(card.id)
    parent = card.parent if card.parent is not UNSET else ""
    return OllamaModel(
        name=_tagged(card.id),
        model=_tagged(card.id),
        modified_at=_modified(card),
        size=slot.need.num_bytes,
        digest=_digest(card.id),
        details=_details(slot.served, parent),
    )


def _loaded(slot: ModelSlot) -> OllamaModel:
    assert slot.served is not None
    model = slot.served.engine.model
    return OllamaModel(
        name=_tagged(slot.name),
        model=_tagged(slot.name),
        size=slot.need.num_bytes,
        digest=_digest(slot.name),
        details=_details(slot.served),
        expires_at=FAR_AWAY,
        size_vram=0 if model.device == "cpu" else slot.need.num_bytes,
        context_length=model.max_model_len,
    )


def _modified(card: ModelCard) -> str:
    return written_time(datetime.datetime.fromtimestamp(card.created, datetime.UTC))


def _shown(card: ModelCard, admission: Admission) -> dict[str, Any]:
    """Tell of one model; what only a loaded one knows is missing from others, and none is loaded for it."""
    served = admission.pool.find(card.id).served
    info: dict[str, Any] = {"general.architecture": FAMILY, "general.basename": card.id}
    capabilities, template, parameters = ["completion"], "", ""
    if served is not None:
        engine = served.engine
        if engine.model.max_model_len:
            info[f"{FAMILY}.context_length"] = engine.model.max_model_len
        if engine.model.embeds_width:
            info[f"{FAMILY}.embedding_length"] = engine.model.embeds_width
        styles, usual = engine.text.styles, engine.text.sampling_defaults
        template = styles.template
        settings = {
            "temperature": usual.temperature,
            "top_p": usual.top_p,
            "top_k": usual.top_k,
            "min_p": usual.min_p,
            "repeat_penalty": usual.repetition_penalty,
            "num_ctx": engine.model.max_model_len,
        }
        parameters = "\n".join(f"{name} {value:g}" for name, value in settings.items())
        abilities = {
            "tools": styles.tools is not None,
            "thinking": styles.reasoning is not None,
            "insert": engine.abilities.tokens and engine.text.tokenizer.fill_in_middle is not None,
            "embedding": engine.abilities.embeddings,
        }
        capabilities += [name for name, is_there in abilities.items() if is_there]
    return {
        "modelfile": f"FROM {card.id}\n",
        "parameters": parameters,
        "template": template,
        "details": _details(served, card.parent if card.parent is not UNSET else ""),
        "model_info": info,
        "capabilities": capabilities,
        "modified_at": _modified(card),
    }


async def ollama_embed_endpoint(
    body: bytes, context: RequestContext
) -> tuple[Sequence[GenerationRequest], OllamaEmbedWriter]:
    request = await parse(OllamaEmbedRequest, body, context)
    inputs = [request.input] if isinstance(request.input, str) and request.input else [*request.input]
    return await _embed(request, inputs, context, is_old=False)


async def ollama_old_embed_endpoint(
    body: bytes, context: RequestContext
) -> tuple[Sequence[GenerationRequest], OllamaEmbedWriter]:
    request = await parse(OllamaOldEmbedRequest, body, context)
    inputs = [request.prompt] if request.prompt else []
    return await _embed(OllamaEmbedRequest.model_validate({"model": request.model}), inputs, context, is_old=True)


async def _embed(
    request: OllamaEmbedRequest, inputs: list[str], context: RequestContext, *, is_old: bool
) -> tuple[Sequence[GenerationRequest], OllamaEmbedWriter]:
    model, served, load_s = await chosen(context, request.model)
    limits = context.config.limits
    fields: dict[str, Any] = {"model": model, "input": inputs or [""], "dimensions": request.dimensions}
    if request.truncate and served.engine.abilities.tokens:
        fields["truncate_prompt_tokens"] = -1
    asked = checked(EmbeddingsRequest, fields, limits)
    writer = OllamaEmbedWriter(asked, limits, request.model, load_s, is_old=is_old)
    if not inputs:
        return [], writer
    return await parse_embeddings(asked, served, request_id=writer.answer_id, tenant=context.tenant), writer


class OllamaEmbedWriter(EmbeddingsWriter):
    """Writes the vectors of all inputs, or in the old shape that of the only one."""

    def __init__(
        self, request: EmbeddingsRequest, limits: LimitOptions, model_name: str, load_s: float, *, is_old: bool
    ) -> None:
        super().__init__(request, limits)
        self.model_name = model_name
        self._is_old = is_old
        self._load_s = load_s
        self._began = time.perf_counter()

    async def whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        return await super().whole(outputs) if outputs else self._whole([], 0)

    def _whole(self, vectors: Sequence[bytes], num_tokens: int) -> list[bytes]:
        floats = (written(vector, "float") for vector in vectors)
        if self._is_old:
            return [msgspec.json.encode({"embedding": next(floats, [])})]
        answer = OllamaEmbeddings(
            model=self.model_name,
            total_duration=nanoseconds(self._load_s + time.perf_counter() - self._began),
            load_duration=nanoseconds(self._load_s),
            prompt_eval_count=num_tokens,
            embeddings=[],
        )
        return with_items(answer, "embeddings", floats)


class PullHandler(Response):
    """Fetches a model of the catalogue or of a hub, and tells how far it has come. One is fetched at a time."""

    def __init__(self, admission: Admission, cards: Cards, pulls: ThreadPoolExecutor) -> None:
        super().__init__()
        self._admission = admission
        self._cards = cards
        self._pulls = pulls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admission = self._admission
        with admission.admit(receive) as context:
            try:
                body = await read_body(scope, receive, admission.config.server.max_body_mb << 20, context.hold_body)
                request = await parse(OllamaModelRequest, body, context)
                name = _wanted(request, admission)
                is_here = any(card.id == name for card in self._cards())
                if not is_here:
                    self._check_leave()
                response = StreamedResponse(send, None, fields_header(context))
                work = _Pull(name, is_here, self._pulls, self._others(name))
                await context.guard(work.stream(response) if request.stream else work.wait(response))
            except ClientGone:
                return

    def _check_leave(self) -> None:
        """Raise WrongKey where clients have keys and no one is the operator: a client could fill the disk."""
        if self._admission.keys.required and not self._admission.admin_keys.required:
            raise WrongKey(
                "Models are pulled by the operator, whose key this server does not have.",
                hint="The operator sets --admin-key, or runs `weft pull`.",
            )

    def _others(self, name: str) -> str:
        return f"{name} is on this machine; this server serves {', '.join(card.id for card in self._cards())}"


class _Pull:
    """One model on its way. A client that hangs up ends it; what has come stays, for the next try."""

    def __init__(self, name: str, is_here: bool, pulls: ThreadPoolExecutor, note: str) -> None:
        """`is_here`: it is served already. `note`: what is said of one that is fetched and not served."""
        self._name = name
        self._is_here = is_here
        self._pulls = pulls
        self._note = note
        self._status: dict[str, Any] = {"status": "pulling manifest"}
        self._is_given_up = False

    async def wait(self, response: StreamedResponse) -> None:
        try:
            await self._fetched()
        except ModelError as error:
            raise InvalidRequest(public_reason(error), param="model") from error
        await response.answer(msgspec.json.encode({"status": "success"}))

    async def stream(self, response: StreamedResponse) -> None:
        await response.start(NDJSON_HEADERS)
        fetching = asyncio.create_task(self._fetched())
        told: dict[str, Any] | None = None
        try:
            while True:
                if told != self._status:
                    told = self._status
                    await _send_line(response, told)
                done, _ = await asyncio.wait({fetching}, timeout=PROGRESS_S)
                if done:
                    break
            fetching.result()
            lines = [{"status": "success"}] if self._is_here else [{"status": self._note}, {"status": "success"}]
        except WeftError as error:
            lines = [{"error": public_reason(error)}]
        finally:
            self._is_given_up = True
            fetching.cancel()
        await response.end(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    async def _fetched(self) -> None:
        if not self._is_here:
            try:
                await asyncio.get_running_loop().run_in_executor(self._pulls, self._fetch)
            finally:
                self._is_given_up = True

    def _fetch(self) -> None:
        from weft.hub.progress import Progress  # The server loads nothing of the hub before it is needed.
        from weft.hub.resolve import pull_by_name

        def report(progress: Progress) -> None:
            if self._is_given_up:
                raise ClientGone
            match progress.stage:
                case "download":
                    digest = f"sha256:{_digest(self._name)}"
                    counts = {"total": progress.total, "completed": progress.done}
                    self._status = {"status": f"pulling {digest[7:19]}", "digest": digest, **counts}
                case "verify":
                    self._status = {"status": "verifying sha256 digest"}
                case "resolve":
                    self._status = {"status": "pulling manifest"}

        report(Progress("resolve"))
        pull_by_name(self._name, report)


async def _send_line(response: StreamedResponse, line: dict[str, Any]) -> None:
    if (writing := response.write(msgspec.json.encode(line) + b"\n")) is not None:
        await writing
