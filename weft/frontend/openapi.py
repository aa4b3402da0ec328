"""The description of the HTTP interface, from the very types that requests are checked by and answers made of."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import Struct
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from weft.frontend.answers import ChatCompletion, Completion, Detokenized, ModelCard, ModelList, Tokenized, Version
from weft.frontend.embeddings import EmbeddingList, EmbeddingsRequest
from weft.frontend.errors import ErrorBody
from weft.frontend.images.answers import ImagesAnswer
from weft.frontend.images.schemas import ImagesRequest
from weft.frontend.messages.answers import MessageAnswer, TokenCount
from weft.frontend.messages.errors import AnthropicError
from weft.frontend.messages.schemas import CountTokensRequest, MessagesRequest
from weft.frontend.responses.answers import DeletedResponse, InputItemList, ResponseAnswer
from weft.frontend.responses.schemas import ResponsesRequest
from weft.frontend.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, MessagesRequest, CountTokensRequest,
    ResponsesRequest, EmbeddingsRequest, ImagesRequest,
)  # fmt: skip
ANSWERS: tuple[type[Struct], ...] = (
    ChatCompletion, Completion, ModelCard, ModelList, Tokenized, Detokenized, Version, ErrorBody, MessageAnswer,
    TokenCount, AnthropicError, ResponseAnswer, DeletedResponse, InputItemList, EmbeddingList,
    ImagesAnswer,
)  # fmt: skip


Responses = dict[int | str, dict[str, Any]]


def takes(request: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that reads its own bytes."""
    return {"requestBody": {"required": True, "content": {"application/json": _reference(request)}}}


def gives(answer: type[Struct], *, streamed: bool = False, error: type[Struct] = ErrorBody) -> Responses:
    """The answers of a route that writes its own bytes."""
    content = {"application/json": _reference(answer)}
    if streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    about = "With `stream`: server-sent events." if streamed else "Found."
    return {200: {"description": about, "content": content}, **errors(error)}


def errors(error: type[Struct] = ErrorBody) -> Responses:
    return {"default": {"description": "An error.", "content": {"application/json": _reference(error)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        _, requests = models_json_schema(
            [(request, "validation") for request in REQUESTS], ref_template="#/components/schemas/{model}"
        )
        _, answers = msgspec.json.schema_components(ANSWERS, ref_template="#/components/schemas/{name}")
        document["components"] = {"schemas": {**requests["$defs"], **answers}}
        app.openapi_schema = document
    return app.openapi_schema


def _reference(schema: type[Struct] | type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}
