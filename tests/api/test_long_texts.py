"""A text far over the context is refused before it is encoded, whichever way it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.api.grpc.calls import ask, failed, served
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, post
from tests.api.scripted_engine import ScriptedEngine, ScriptedTokenizer
from weft.backends.contract import ENCODED_CONTEXTS, max_encoded_tokens

MOST = ENCODED_CONTEXTS * 1000
"""The scripted engine's context is 1000 tokens, and a token is a byte."""


def engine() -> ScriptedEngine:
    return ScriptedEngine(tokenizer=ScriptedTokenizer(is_bounded=True))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BODIES: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, lambda text: HELLO | {"messages": user(text)}),
    "completion": (COMPLETIONS, lambda text: PROMPT | {"prompt": text}),
    "completions": (COMPLETIONS, lambda text: PROMPT | {"prompt": ["a", text]}),
    "truncated": (COMPLETIONS, lambda text: PROMPT | {"prompt": text, "truncate_prompt_tokens": 5}),
    "embeddings": ("/v1/embeddings", lambda text: {"model": "scripted", "input": ["a", text]}),
    "messages": ("/v1/messages", lambda text: {"model": "scripted", "max_tokens": 1, "messages": user(text)}),
    "count_tokens": ("/v1/messages/count_tokens", lambda text: {"model": "scripted", "messages": user(text)}),
    "responses": ("/v1/responses", lambda text: {"model": "scripted", "input": text}),
    "tokenize": ("/tokenize", lambda text: {"prompt": text, "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", lambda text: {"messages": user(text)}),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_endpoint_bounds_the_text_that_it_encodes(name: str) -> None:
    path, body = BODIES[name]
    scripted = engine()
    assert max_encoded_tokens(scripted) == MOST
    assert post(scripted, path, body("x" * (MOST - 20))).status_code == 200, "it is encoded"
    scripted = engine()
    response = post(scripted, path, body("x" * (MOST + 1)))
    assert response.status_code == 400
    assert f"more than {MOST} tokens" in response.json()["error"]["message"]
    assert not scripted.submitted and not scripted.embedded


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, "prompt"), ("/v1/embeddings", "input")])
def test_token_ids_have_the_same_bound(path: str, field: str) -> None:
    scripted = engine()
    assert post(scripted, path, {"model": "scripted", field: [7] * MOST}).status_code == 200
    response = post(scripted, path, {"model": "scripted", field: [7] * (MOST + 1)})
    assert response.status_code == 400
    assert "--max-model-len" in error_of(response)["message"]
    assert error_of(response)["param"] == field


def test_grpc_has_the_same_bound() -> None:
    async def scenario() -> None:
        scripted = engine()
        async with served(scripted) as opened:
            _, code, details = await failed(opened.predict([ask(prompt="x" * (MOST + 1))]))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"more than {MOST} tokens" in details
            assert not scripted.submitted

    asyncio.run(scenario())
