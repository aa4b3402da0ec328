"""Which form of output each request asks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.openai.test_tools import HERMES, TIME, WEATHER
from weft.api.openai.openai_schema import ChatRequest, CompletionRequest
from weft.api.translate import chat_shape, structured_shape, toolbox
from weft.backends.contract import ChatStyles
from weft.errors import InvalidRequest
from weft.text.grammars.specs import (
    ChoiceSpec,
    GrammarSpec,
    JsonObjectSpec,
    JsonSchemaSpec,
    LarkSpec,
    RegexSpec,
    ToolCallsSpec,
    ToolSpec,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]


def shape_of(**fields: Any) -> GrammarSpec | None:
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    return chat_shape(request, toolbox(request, ChatStyles(HERMES)), 64)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json": SCHEMA}, JsonSchemaSpec(schema=SCHEMA, param="structured_outputs.json")),
        ({"json": '{"type": "null"}'}, JsonSchemaSpec(schema={"type": "null"}, param="structured_outputs.json")),
        ({"regex": "a+"}, RegexSpec(pattern="a+", param="structured_outputs.regex")),
        ({"choice": ["a", "b"]}, ChoiceSpec(options=["a", "b"], param="structured_outputs.choice")),
        ({"grammar": 'start: "a"'}, LarkSpec(text='start: "a"', param="structured_outputs.grammar")),
        ({"json_object": True}, JsonObjectSpec(param="structured_outputs")),
    ],
)
def test_structured_outputs_of_both_doors(asked: dict[str, Any], expected: GrammarSpec) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x", "structured_outputs": asked})
    assert structured_shape(request, 64) == shape_of(structured_outputs=asked) == expected


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_schema_that_is_no_object(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shape_of(structured_outputs={"json": text})
    assert caught.value.param == "structured_outputs.json"


def test_response_format() -> None:
    assert shape_of(response_format={"type": "text"}) is None
    assert shape_of(response_format={"type": "json_object"}) == JsonObjectSpec(param="response_format")
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert shape_of(response_format=asked) == JsonSchemaSpec(schema=SCHEMA, param="response_format.json_schema.schema")
    with pytest.raises(InvalidRequest, match="both say"):
        shape_of(response_format=asked, structured_outputs={"regex": "a"})


def test_calls_are_forced_only_when_they_must_be() -> None:
    assert shape_of(tools=[WEATHER, TIME]) is None
    assert shape_of(tools=[WEATHER], tool_choice="none") is None
    required = shape_of(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(required, ToolCallsSpec)
    assert (len(required.tools), required.at_least_one, required.parallel) == (2, True, False)
    named = shape_of(tools=[WEATHER, TIME], tool_choice={"type": "function", "function": {"name": "time"}})
    assert isinstance(named, ToolCallsSpec)
    assert (
        named.tools == [ToolSpec(name="time", parameters={"type": "object", "properties": {}})] and not named.parallel
    )
    with pytest.raises(InvalidRequest, match="no room"):
        shape_of(tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"})


def test_a_strict_tool_binds_calls_and_leaves_the_text_free() -> None:
    strict = shape_of(tools=[STRICT, TIME])
    assert isinstance(strict, ToolCallsSpec) and not strict.at_least_one
