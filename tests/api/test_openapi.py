"""The description of the interface is served, complete and true."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.api.http import CHAT, COMPLETIONS, request
from tests.api.scripted_engine import ScriptedEngine
from weft.api.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from weft.api.body import Fields
from weft.api.field_rules import RULES
from weft.api.openai.batches import BatchRequest
from weft.api.openai.embeddings import EmbeddingsRequest
from weft.api.openai.images_schema import ImagesRequest
from weft.api.openai.openai_schema import ChatRequest, CompletionRequest
from weft.api.openai.rerank import RerankRequest, ScoreRequest
from weft.api.openai.responses_schema import ResponsesRequest
from weft.api.openai.tokenize import DetokenizeRequest, TokenizeRequest


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    body: dict[str, Any] = request(ScriptedEngine(), "GET", "/openapi.json").json()
    return body


def test_every_route_is_there(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        CHAT, COMPLETIONS, "/tokenize", "/detokenize", "/version", "/v1/models", "/v1/models/{model_id}", "/health",
        "/health/live", "/metrics", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
        "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items", "/v1/embeddings",
        "/v1/images/generations", "/",
        "/v1/responses/{response_id}/cancel", "/v1/score", "/v1/rerank", "/tokenizer_info",
        "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/batches", "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel", "/v1/messages/batches", "/v1/messages/batches/{message_batch_id}",
        "/v1/messages/batches/{message_batch_id}/cancel", "/v1/messages/batches/{message_batch_id}/results",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (CHAT, ChatRequest),
        (COMPLETIONS, CompletionRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
        ("/v1/messages", MessagesRequest),
        ("/v1/messages/count_tokens", CountTokensRequest),
        ("/v1/responses", ResponsesRequest),
        ("/v1/embeddings", EmbeddingsRequest),
        ("/v1/images/generations", ImagesRequest),
        ("/v1/batches", BatchRequest),
        ("/v1/score", ScoreRequest),
        ("/v1/rerank", RerankRequest),
    ],
)
def test_request_bodies_are_shown(document: dict[str, Any], path: str, schema: type[Fields]) -> None:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": f"#/components/schemas/{schema.__name__}"}
    shown = document["components"]["schemas"][schema.__name__]
    assert shown["properties"].keys() == schema.model_fields.keys() | RULES.get(schema.place, {}).keys()
    assert shown["additionalProperties"] is False


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_422_is_never_promised(document: dict[str, Any]) -> None:
    assert "422" not in json.dumps(document)
