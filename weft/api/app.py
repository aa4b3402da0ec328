"""The HTTP application: its routes, and nothing of how they work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from msgspec import UNSET, Struct
from msgspec.structs import replace
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft import __version__, logs
from weft.api.admin import add_admin, add_model_admin
from weft.api.anthropic.listing import AnthropicModelList, ModelEntryInfo, model_info, model_list
from weft.api.anthropic.message_batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatches,
    MessageBatchList,
    MessageBatchRequest,
)
from weft.api.anthropic.messages import count_tokens, messages_endpoint
from weft.api.anthropic.messages_schema import (
    AnthropicError,
    CountTokensRequest,
    MessageAnswer,
    MessagesRequest,
    TokenCount,
)
from weft.api.background import BackgroundWork
from weft.api.body import answer_gone_client
from weft.api.error_responses import ErrorBody, JsonResponse, answer_http_exception, answer_weft_error
from weft.api.handler import SSE_HEADERS, Handler, streamed
from weft.api.middleware import (
    ADMIN_PATH,
    ANTHROPIC_VERSION,
    LIVE_PATH,
    ROOT_PATH,
    ApiKeyAuth,
    CompressedAnswers,
    CrossOrigin,
    ErrorShape,
    ErrorShapes,
    HeaderLimits,
    HeadRequests,
    RateLimitHeaders,
    RequestIdMiddleware,
    anthropic_shape,
    ollama_shape,
)
from weft.api.openai.batches import Batches, BatchList, BatchObject, BatchRequest
from weft.api.openai.chat import chat_endpoint
from weft.api.openai.completions import completions_endpoint
from weft.api.openai.embeddings import EmbeddingList, EmbeddingsRequest, embeddings_endpoint
from weft.api.openai.files import PURPOSES, DeletedFile, FileList, FileObject, Files, UploadHandler
from weft.api.openai.images import images_endpoint
from weft.api.openai.images_schema import ImagesAnswer, ImagesRequest
from weft.api.openai.openai_answers import (
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    ServerCard,
    Version,
)
from weft.api.openai.openai_schema import ChatRequest, CompletionRequest
from weft.api.openai.rerank import (
    RerankAnswer,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    rerank_endpoint,
    score_endpoint,
)
from weft.api.openai.responses import responses_endpoint
from weft.api.openai.responses_schema import DeletedResponse, InputItemList, ResponseAnswer, ResponsesRequest
from weft.api.openai.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeHandler,
    TokenizeRequest,
    TokenizerInfo,
    detokenize,
    tokenize,
    tokenizer_info,
)
from weft.api.page import PlaygroundPage
from weft.backends.contract import Engine
from weft.errors import ConfigError, ModelNotFound, Unavailable, WeftError, public_reason
from weft.observe.metrics import CONTENT_TYPE, Residence, exposition
from weft.options import Config, ServerOptions
from weft.serving.admission import Admission, ClientGone
from weft.serving.model_slot import ModelSlot
from weft.serving.served_model import ServedModel

REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, MessagesRequest, CountTokensRequest,
    ResponsesRequest, EmbeddingsRequest, ImagesRequest, BatchRequest, ScoreRequest, RerankRequest,
)  # fmt: skip
ANSWERS: tuple[type[Struct], ...] = (
    ChatCompletion, Completion, ModelCard, ModelList, Tokenized, Detokenized, ServerCard, Version, ErrorBody,
    MessageAnswer, TokenCount, AnthropicError, ResponseAnswer, DeletedResponse, InputItemList, EmbeddingList,
    ImagesAnswer, FileObject, FileList, DeletedFile, BatchObject, BatchList, MessageBatchRequest, MessageBatch,
    MessageBatchList, DeletedMessageBatch, ModelEntryInfo, AnthropicModelList, ScoreList, RerankAnswer, TokenizerInfo,
)  # fmt: skip
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(PURPOSES)},
                    },
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                }
            }
        },
    }
}

COMPAT_APIS = ("ollama", "llamacpp")

Responses = dict[int | str, dict[str, Any]]


def takes(request: type[BaseModel] | type[Struct]) -> dict[str, Any]:
    """Describe the body of a route that reads its own bytes."""
    return {"requestBody": {"required": True, "content": {"application/json": _reference(request)}}}


def gives(answer: type[Struct], *, streamed: bool = False, error: type[Struct] = ErrorBody) -> Responses:
    """Describe the answers of a route that writes its own bytes."""
    content = {"application/json": _reference(answer)}
    if streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    about = "With `stream`: server-sent events." if streamed else "Found."
    return {200: {"description": about, "content": content}, **errors(error)}


def gives_either(answer: type[Struct], anthropic: type[Struct]) -> Responses:
    """Describe the answers of a route in two shapes."""
    shapes = [_reference(shape)["schema"] for shape in (answer, anthropic)]
    return {200: {"description": "Found.", "content": {"application/json": {"schema": {"anyOf": shapes}}}}, **errors()}


def errors(error: type[Struct] = ErrorBody) -> Responses:
    return {"default": {"description": "An error.", "content": {"application/json": _reference(error)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        routes = [route.described() for route in app.routes if isinstance(route, DirectRoute)]
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=routes)
        _, requests = models_json_schema(
            [(request, "validation") for request in REQUESTS], ref_template="#/components/schemas/{model}"
        )
        _, answers = msgspec.json.schema_components(ANSWERS, ref_template="#/components/schemas/{name}")
        document["components"] = {"schemas": {**requests["$defs"], **answers}}
        app.openapi_schema = document
    return app.openapi_schema


def _reference(schema: type[Struct] | type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}


class DirectRoute(Route):
    """A route whose function gets those parameters of the path and of the query that it names, as text, and the request
    where it names that. FastAPI describes the route; its own reading of a request takes longer than to refuse one when
    the queue is full."""

    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: set[str] | list[str], **about: Any) -> None:
        super().__init__(path, endpoint, methods=[*methods])
        self.methods = set(methods)  # without the HEAD that Starlette puts beside GET
        self._about = about
        code = endpoint.__code__
        self._names = code.co_varnames[: code.co_argcount]

    def described(self) -> APIRoute:
        return APIRoute(self.path, self.endpoint, methods=self.methods, **self._about)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        given = self._given(Request(scope, receive, send)) if self._names else {}
        response = await self.endpoint(**given)
        await response(scope, receive, send)

    def _given(self, request: Request) -> dict[str, Any]:
        found = {**request.query_params, **request.path_params, "request": request}
        return {name: found[name] for name in self._names if name in found}


def build_app(engine: Engine, config: Config) -> FastAPI:
    """Return the application over an engine that is ready."""
    admission = Admission(config)
    admission.open(engine)
    return admission_app(admission)


def admission_app(admission: Admission, background: BackgroundWork | None = None) -> FastAPI:
    """Return the application of an admission that may open later. `background`: the work that its server starts and
    stops; without it, work that begins when a client asks for it."""
    background = background or BackgroundWork(admission)
    app = FastAPI(
        title="Weft", version=__version__, summary="OpenAI's interface, served by Weft.", docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.router.route_class = DirectRoute  # type: ignore[assignment]  # it is made as theirs are
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    app.add_exception_handler(WeftError, answer_weft_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(ClientGone, answer_gone_client)
    app.add_middleware(CompressedAnswers)
    limits = admission.config.limits
    if limits.max_requests_per_minute_per_key or limits.max_tokens_per_minute_per_key:
        app.add_middleware(RateLimitHeaders, admission=admission)
    app.add_middleware(HeadRequests)
    page = PlaygroundPage() if admission.config.server.page else None
    app.add_middleware(ApiKeyAuth, admission=admission, page=page)
    app.add_middleware(HeaderLimits, admission=admission)
    # Around all that refuses: without its headers a page cannot read why.
    app.add_middleware(CrossOrigin, admission=admission)
    app.add_middleware(RequestIdMiddleware)
    apis = compat_apis(admission.config.server)
    shapes: dict[str, ErrorShape] = {"/v1/messages": anthropic_shape}
    if "ollama" in apis:
        shapes["/api"] = ollama_shape
    app.add_middleware(ErrorShapes, shapes=shapes)
    # First: llama.cpp's /tokenize takes more than Weft's, and Ollama's clients look for its name at /.
    if "llamacpp" in apis:
        from weft.api.llamacpp.llamacpp_server import add_llamacpp  # few servers have it

        add_llamacpp(app, admission)
    if "ollama" in apis:
        from weft.api.ollama.ollama_models import add_ollama

        add_ollama(app, admission, partial(_all_cards, admission))
    _add_generation(app, admission)
    _add_messages(app, admission)
    _add_message_batches(app, admission, background)
    _add_responses(app, admission, background)
    _add_files(app, admission, background)
    _add_batches(app, admission, background)
    _add_embeddings(app, admission)
    _add_images(app, admission)
    _add_tokens(app, admission)
    _add_models(app, admission)
    _add_health(app, admission)
    if admission.config.server.live:
        _add_live(app, admission)
    if admission.admin_keys.required:
        add_admin(app, admission)
        add_model_admin(app, admission)
    return app


def compat_apis(options: ServerOptions) -> frozenset[str]:
    """Return the interfaces of other servers that are answered. Raises ConfigError for one that is not known."""
    asked = frozenset(name.strip() for text in options.compat_api for name in text.split(","))
    if unknown := sorted(asked - set(COMPAT_APIS)):
        raise ConfigError(f"--compat-api {unknown[0]!r:.100}: there are {' and '.join(COMPAT_APIS)}.")
    return asked


def _add_generation(app: FastAPI, admission: Admission) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=gives(ChatCompletion, streamed=True))
    async def chat_completions() -> Response:
        """Answer a conversation: OpenAI's chat completions, whole or streamed."""
        return Handler(admission, chat_endpoint)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=gives(Completion, streamed=True))
    async def completions() -> Response:
        """Continue a prompt: OpenAI's completions, whole or streamed."""
        return Handler(admission, completions_endpoint)


def _add_messages(app: FastAPI, admission: Admission) -> None:
    @app.post(
        "/v1/messages",
        openapi_extra=takes(MessagesRequest),
        responses=gives(MessageAnswer, streamed=True, error=AnthropicError),
    )
    async def messages() -> Response:
        """Answer a conversation: Anthropic's messages, whole or streamed."""
        return Handler(admission, messages_endpoint)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=takes(CountTokensRequest),
        responses=gives(TokenCount, error=AnthropicError),
    )
    async def messages_count_tokens() -> Response:
        """Count the tokens that a conversation of Anthropic's messages has."""
        return TokenizeHandler(admission, count_tokens)


def _add_message_batches(app: FastAPI, admission: Admission, background: BackgroundWork) -> None:
    def of(request: Request) -> MessageBatches:
        # A proxy may have taken the client's TLS off.
        scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
        base_url = f"{scheme}://{request.headers.get('host', 'localhost')}"
        return MessageBatches(background.data, background.batches, base_url)

    def shown(answer: type[Struct]) -> Responses:
        return gives(answer, error=AnthropicError)

    @app.post("/v1/messages/batches", openapi_extra=takes(MessageBatchRequest), responses=shown(MessageBatch))
    async def create_message_batch(request: Request) -> Response:
        """Begin a batch of messages."""
        return TokenizeHandler(admission, of(request).create)

    @app.get("/v1/messages/batches", responses=shown(MessageBatchList))
    async def message_batches(request: Request) -> Response:
        """List the batches of messages."""
        return JsonResponse(await of(request).listed(request))

    @app.get("/v1/messages/batches/{message_batch_id}", responses=shown(MessageBatch))
    async def message_batch(message_batch_id: str, request: Request) -> Response:
        """Show one batch of messages."""
        return JsonResponse(await of(request).found(message_batch_id))

    @app.post("/v1/messages/batches/{message_batch_id}/cancel", responses=shown(MessageBatch))
    async def cancel_message_batch(message_batch_id: str, request: Request) -> Response:
        """Cancel a batch of messages."""
        return JsonResponse(await of(request).cancel(message_batch_id))

    @app.delete("/v1/messages/batches/{message_batch_id}", responses=shown(DeletedMessageBatch))
    async def delete_message_batch(message_batch_id: str, request: Request) -> Response:
        """Delete a batch of messages that has ended."""
        return JsonResponse(await of(request).delete(message_batch_id))

    @app.get("/v1/messages/batches/{message_batch_id}/results", responses=errors(AnthropicError))
    async def message_batch_results(message_batch_id: str, request: Request) -> Response:
        """Give the results of a batch of messages, one a line."""
        return await of(request).results(message_batch_id)


def _add_files(app: FastAPI, admission: Admission, background: BackgroundWork) -> None:
    files = Files(background.data)

    @app.post("/v1/files", openapi_extra=FORM, responses=gives(FileObject))
    async def upload_file() -> Response:
        """Upload a file: the requests of a batch."""
        return UploadHandler(admission, background.data)

    @app.get("/v1/files", responses=gives(FileList))
    async def list_files(request: Request) -> Response:
        """List the files."""
        return JsonResponse(await files.listed(request.query_params))

    @app.get("/v1/files/{file_id}", responses=gives(FileObject))
    async def file(file_id: str) -> Response:
        """Show one file."""
        return JsonResponse(await files.found(file_id))

    @app.get("/v1/files/{file_id}/content", responses=errors())
    async def file_content(file_id: str) -> Response:
        """Give the contents of a file."""
        return await files.content(file_id)

    @app.delete("/v1/files/{file_id}", responses=gives(DeletedFile))
    async def delete_file(file_id: str) -> Response:
        """Delete a file."""
        return JsonResponse(await files.delete(file_id))


def _add_batches(app: FastAPI, admission: Admission, background: BackgroundWork) -> None:
    batches = Batches(background.data, background.batches)

    @app.post("/v1/batches", openapi_extra=takes(BatchRequest), responses=gives(BatchObject))
    async def create_batch() -> Response:
        """Begin a batch of the requests of an uploaded file."""
        return TokenizeHandler(admission, batches.create)

    @app.get("/v1/batches", responses=gives(BatchList))
    async def list_batches(request: Request) -> Response:
        """List the batches."""
        return JsonResponse(await batches.listed(request.query_params))

    @app.get("/v1/batches/{batch_id}", responses=gives(BatchObject))
    async def batch(batch_id: str) -> Response:
        """Show one batch."""
        return JsonResponse(await batches.found(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel", responses=gives(BatchObject))
    async def cancel_batch(batch_id: str) -> Response:
        """Cancel a batch."""
        return JsonResponse(await batches.cancel(batch_id))


def _add_responses(app: FastAPI, admission: Admission, background: BackgroundWork) -> None:
    options = admission.config.server
    tenant_store = background.tenant_responses

    @app.post("/v1/responses", openapi_extra=takes(ResponsesRequest), responses=gives(ResponseAnswer, streamed=True))
    async def responses() -> Response:
        """Answer a conversation: OpenAI's responses, whole, streamed or in the background."""
        return Handler(admission, partial(responses_endpoint, store=tenant_store()))

    @app.get("/v1/responses/{response_id}", responses=gives(ResponseAnswer, streamed=True))
    async def response(response_id: str, request: Request) -> Response:
        """Give a stored response, or go on with its stream."""
        store, query = tenant_store(), request.query_params
        if query.get("stream", "false") != "false":
            return streamed(*store.events(response_id, query), options.keep_alive_s)
        return Response(store.answer(response_id), media_type="application/json")

    @app.post("/v1/responses/{response_id}/cancel", responses=gives(ResponseAnswer))
    async def cancel_response(response_id: str) -> Response:
        """Cancel a response that is made in the background."""
        return Response(await tenant_store().cancel(response_id), media_type="application/json")

    @app.delete("/v1/responses/{response_id}", responses=gives(DeletedResponse))
    async def delete_response(response_id: str) -> Response:
        """Delete a stored response."""
        return JsonResponse(await tenant_store().delete(response_id))

    @app.get("/v1/responses/{response_id}/input_items", responses=gives(InputItemList))
    async def input_items(response_id: str, request: Request) -> Response:
        """List the items that a stored response was asked with."""
        return JsonResponse(tenant_store().input_items(response_id, request.query_params))


def _add_embeddings(app: FastAPI, admission: Admission) -> None:
    @app.post("/v1/embeddings", openapi_extra=takes(EmbeddingsRequest), responses=gives(EmbeddingList))
    async def embeddings() -> Response:
        """Give the embedding vectors of texts."""
        return Handler(admission, embeddings_endpoint)

    @app.post("/v1/score", openapi_extra=takes(ScoreRequest), responses=gives(ScoreList))
    @app.post("/score", include_in_schema=False)
    async def score() -> Response:
        """Tell how similar pairs of texts are."""
        return Handler(admission, score_endpoint)

    @app.post("/v1/rerank", openapi_extra=takes(RerankRequest), responses=gives(RerankAnswer))
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/rerank", include_in_schema=False)
    async def rerank() -> Response:
        """Order documents by how well they fit a query."""
        return Handler(admission, rerank_endpoint)


def _add_images(app: FastAPI, admission: Admission) -> None:
    @app.post(
        "/v1/images/generations", openapi_extra=takes(ImagesRequest), responses=gives(ImagesAnswer, streamed=True)
    )
    async def image_generations() -> Response:
        """Generate images from a prompt, whole or streamed step by step."""
        return Handler(admission, images_endpoint)


def _add_tokens(app: FastAPI, admission: Admission) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=gives(Tokenized))
    async def to_tokens() -> Response:
        """Give the tokens of a text or a conversation."""
        return TokenizeHandler(admission, tokenize)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=gives(Detokenized))
    async def from_tokens() -> Response:
        """Give the text of tokens."""
        return TokenizeHandler(admission, detokenize)

    @app.get("/tokenizer_info", responses=gives(TokenizerInfo))
    async def about_tokenizer(request: Request) -> Response:
        """Tell which tokenizer and chat template the model has."""
        with admission.admit() as context:
            return JsonResponse(await tokenizer_info(request.query_params.get("model"), context))


def _add_models(app: FastAPI, admission: Admission) -> None:
    @app.get(ROOT_PATH, responses=gives(ServerCard))
    async def server() -> Response:
        """Tell what this server is; browsers get the playground."""
        return JsonResponse(ServerCard("Weft", __version__, str(app.openapi_url)))

    @app.get("/version", responses=gives(Version))
    async def version() -> Response:
        """Tell which version of Weft this is."""
        return JsonResponse(Version(__version__))

    @app.get("/v1/models", responses=gives_either(ModelList, AnthropicModelList))
    async def models(request: Request) -> Response:
        """A list in Anthropic's shape for clients that send anthropic-version."""
        cards = _all_cards(admission)
        if ANTHROPIC_VERSION in request.headers:
            return JsonResponse(model_list(cards, request.query_params))
        return JsonResponse(ModelList(data=cards))

    @app.get("/v1/models/{model_id:path}", responses=gives_either(ModelCard, ModelEntryInfo))
    async def model(model_id: str, request: Request) -> Response:
        """Show one model."""
        cards = {card.id: card for card in _all_cards(admission)}
        if model_id not in cards:
            raise ModelNotFound(f"There is no model {model_id!r:.200} here; this server has {', '.join(cards)}.")
        card = cards[model_id]
        return JsonResponse(model_info(card) if ANTHROPIC_VERSION in request.headers else card)


def _add_health(app: FastAPI, admission: Admission) -> None:
    @app.get("/health", responses=errors())
    async def health() -> Response:
        """200 only while requests are taken and an engine's loop beats. Of several models it names those in trouble."""
        state = admission.health()
        if not state.ready:
            raise Unavailable(f"Not ready: {state.reason.rstrip('.')}.")
        troubles = admission.pool.troubles()
        return JsonResponse({"status": "ready", **({"troubles": troubles} if troubles else {})})

    @app.get("/health/live")
    async def live() -> Response:
        """200 for as long as this process answers."""
        return JsonResponse({"status": "live"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus's text format; empty until a model is loaded."""
        residences = [_residence(slot) for slot in admission.pool.slots] if admission.pool.has_many else []
        return Response(exposition(admission.metrics(), residences, admission.watchdog.stalls), media_type=CONTENT_TYPE)


def _add_live(app: FastAPI, admission: Admission) -> None:
    def watched(tenant: str | None) -> Response:
        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return StreamingResponse(admission.live.watch(tenant), headers=headers)

    @app.get(LIVE_PATH, include_in_schema=False)
    async def live_view() -> Response:
        """The state of the engines as it changes, with the requests of the caller's own key."""
        return watched(logs.tenant.get())

    if admission.admin_keys.required:

        @app.get(ADMIN_PATH + LIVE_PATH, include_in_schema=False)
        async def live_view_of_all() -> Response:
            """The same with the requests of all keys."""
            return watched(None)


def _all_cards(admission: Admission) -> list[ModelCard]:
    admission.check_open()
    loaded = admission.pool.served_models()
    if loaded and not admission.pool.has_many:
        return [card for served in loaded for card in _cards(served)]
    cards: list[ModelCard] = []
    for slot in admission.pool.slots:
        if slot.served is not None:
            cards += [replace(card, state=slot.state) for card in _cards(slot.served)]
        else:
            why = public_reason(slot.failure.error) if slot.failure is not None else UNSET
            card = ModelCard(id=slot.name, created=admission.pool.created, state=slot.state, why=why)
            cards += [card, *(replace(card, id=name, parent=slot.name, root=slot.name) for name in slot.adapter_names)]
    return cards


def _residence(slot: ModelSlot) -> Residence:
    return Residence(
        model_name=slot.name,
        is_loaded=slot.served is not None,
        loads=slot.num_loads,
        failures=slot.num_failures,
        unloads=slot.num_unloads,
    )


def _cards(served: ServedModel) -> list[ModelCard]:
    """List the language model, its adapters, and the image model beside it, if any."""
    model = served.engine.model
    writes = ModelCard(
        id=served.model_name,
        created=served.created,
        max_model_len=model.max_model_len or UNSET,
        capabilities=[
            "chat",
            "completions",
            *(["embeddings"] if served.engine.abilities.embeddings else []),
            *(["prompt_embeds"] if model.embeds_width else []),
        ],
    )
    adapted = [
        replace(writes, id=name, parent=served.model_name, root=served.model_name) for name in served.adapter_names
    ]
    if (image_model := model.images) is None:
        return [writes, *adapted]
    image_card = ModelCard(
        id=image_model.name,
        created=served.created,
        max_model_len=image_model.max_prompt_tokens,
        capabilities=["images"],
        sizes=[f"{image_model.width}x{image_model.height}"],
    )
    return [writes, *adapted, image_card]
