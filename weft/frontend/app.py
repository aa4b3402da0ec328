"""The HTTP application: its routes, and nothing of how they work."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import FastAPI, Response
from starlette.exceptions import HTTPException

from weft import __version__
from weft.backends.contract import Engine
from weft.config import Config
from weft.errors import Unavailable, WeftError
from weft.frontend.answers import ChatCompletion, Completion, Detokenized, ModelCard, ModelList, Tokenized, Version
from weft.frontend.chat import chat_door
from weft.frontend.completions import completion_door
from weft.frontend.errors import answer_http_exception, answer_weft_error
from weft.frontend.exchange import Exchange
from weft.frontend.gate import Gate, Service
from weft.frontend.keys import Keys
from weft.frontend.lock import Lock
from weft.frontend.openapi import describe, errors, gives, takes
from weft.frontend.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from weft.frontend.shell import Shell
from weft.frontend.tokens import Question, detokenize, tokenize
from weft.observe.metrics import CONTENT_TYPE


def build_app(engine: Engine, config: Config) -> FastAPI:
    """The application over an engine that is ready."""
    gate = Gate(config)
    gate.open(engine)
    return gated_app(gate)


def gated_app(gate: Gate) -> FastAPI:
    """The application of a gate that may open later."""
    app = FastAPI(
        title="Weft", version=__version__, summary="OpenAI's interface, served by Weft.", docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    app.add_exception_handler(WeftError, answer_weft_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    keys = Keys(gate.config.server.api_key)
    if keys.required:
        app.add_middleware(Lock, keys=keys)
    app.add_middleware(Shell)
    _add_generation(app, gate)
    _add_tokens(app, gate)
    _add_models(app, gate)
    _add_health(app, gate)
    return app


def _add_generation(app: FastAPI, gate: Gate) -> None:
    @app.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=gives(ChatCompletion, streamed=True))
    async def chat_completions() -> Response:
        return Exchange(gate, chat_door)

    @app.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=gives(Completion, streamed=True))
    async def completions() -> Response:
        return Exchange(gate, completion_door)


def _add_tokens(app: FastAPI, gate: Gate) -> None:
    @app.post("/tokenize", openapi_extra=takes(TokenizeRequest), responses=gives(Tokenized))
    async def to_tokens() -> Response:
        return Question(gate, tokenize)

    @app.post("/detokenize", openapi_extra=takes(DetokenizeRequest), responses=gives(Detokenized))
    async def from_tokens() -> Response:
        return Question(gate, detokenize)


def _add_models(app: FastAPI, gate: Gate) -> None:
    @app.get("/version", responses=gives(Version))
    async def version() -> Response:
        return _json(Version(__version__))

    @app.get("/v1/models", responses=gives(ModelList))
    async def models() -> Response:
        return _json(ModelList(data=[_card(gate.service())]))

    @app.get("/v1/models/{model_id:path}", responses=gives(ModelCard))
    async def model(model_id: str) -> Response:
        service = gate.service()
        service.check_model(model_id)
        return _json(_card(service))


def _add_health(app: FastAPI, gate: Gate) -> None:
    @app.get("/health", responses=errors())
    async def health() -> Response:
        """200 only while requests are taken and the engine's loop beats."""
        state = gate.health()
        if not state.ready:
            raise Unavailable(f"Not ready: {state.reason}.")
        return _json({"status": "ready"})

    @app.get("/health/live")
    async def live() -> Response:
        """200 for as long as this process answers."""
        return _json({"status": "live"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus's text format; empty until the model is loaded."""
        figures = gate.metrics()
        return Response(figures.exposition() if figures else b"", media_type=CONTENT_TYPE)


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.model_name, created=service.created, max_model_len=service.engine.model.max_model_len)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
