"""Whatever stands in a field, the answer is an answer or a refusal: never a failure of the server's own."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.api.says import model_that_says
from weft.api.anthropic.messages_schema import CountTokensRequest, MessagesRequest
from weft.api.app import build_app
from weft.api.field_rules import RULES
from weft.api.openai.embeddings import EmbeddingsRequest
from weft.api.openai.responses_schema import ResponsesRequest
from weft.config import load

TURN = {"role": "user", "content": "hi"}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**63, -(2**63), 10**30, 1e308, -0.5, "", "x", "auto", "\x00", "�" * 300, [], [[]],
    [None], [0], [""], ["x"] * 20, {}, [{}], {"type": "x"}, [{"type": "x"}], {"type": "text"}, [{"type": "text"}],
    {"type": []},
    {"role": "user"}, [{"role": "user"}], [{"role": "assistant", "content": None}], [{"role": "user", "content": {}}],
    [{"role": "assistant", "content": []}],
    [TURN, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": ""}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "", "input": {"a": 1e300}}]}, TURN],
    [{"type": "reasoning"}], [{"type": "function_call", "call_id": "", "name": "", "arguments": "\""}],
    [{"type": "function_call_output", "call_id": "", "output": []}],
    [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": 3}}],
    [{"name": "f", "input_schema": {"$ref": "#"}}], {"type": "function", "name": ""}, {"type": "tool", "name": ""},
    {"format": {}}, {"format": {"type": "text"}}, {"effort": "none"}, {"user_id": ""},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "schema", "base"),
    [
        ("/v1/messages", MessagesRequest, {"max_tokens": 5, "messages": [TURN]}),
        ("/v1/messages/count_tokens", CountTokensRequest, {"messages": [TURN]}),
        ("/v1/responses", ResponsesRequest, {"input": "hi"}),
        ("/v1/embeddings", EmbeddingsRequest, {"input": "hi"}),
    ],
)
def test_no_value_of_a_field_makes_the_server_fail(path: str, schema: type[BaseModel], base: dict[str, Any]) -> None:
    engine = model_that_says("text")
    app = build_app(engine, load(env={}))
    cases = [(field, value) for field in schema.model_fields for value in ODD]
    # Fields that no schema has are not parsed: each gets some of the values.
    others: list[str] = [*RULES[schema.place]]  # type: ignore[attr-defined]
    cases += [(field, value) for i, field in enumerate(others) for value in ODD[i % 8 :: 8]]

    async def go() -> list[int]:
        statuses = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for field, value in cases:
                response = await client.post(path, json={"model": "scripted", **base, field: value})
                assert response.status_code < 500, (field, value, response.text)
                statuses.append(response.status_code)
        return statuses

    statuses = asyncio.run(go())
    assert {200, 400} <= set(statuses)
    assert not engine.open
