"""Which form of output each request asks for."""

from __future__ import annotations

from itertools import product
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
def test_structured_outputs_of_chat_and_completions(asked: dict[str, Any], expected: GrammarSpec) -> None:
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
    for kind, name in product(("json_object", "json_schema"), ("schema", "value")):
        old = shape_of(response_format={"type": kind, name: SCHEMA})
        assert old == JsonSchemaSpec(schema=SCHEMA, param=f"response_format.{name}")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("guided_json", SCHEMA, JsonSchemaSpec(schema=SCHEMA, param="guided_json")),
        ("guided_json", '{"type": "null"}', JsonSchemaSpec(schema={"type": "null"}, param="guided_json")),
        ("guided_regex", "a+", RegexSpec(pattern="a+", param="guided_regex")),
        ("guided_choice", ["a", "b"], ChoiceSpec(options=["a", "b"], param="guided_choice")),
        ("guided_grammar", 'start: "a"', LarkSpec(text='start: "a"', param="guided_grammar")),
        ("json_schema", SCHEMA, JsonSchemaSpec(schema=SCHEMA, param="json_schema")),
        ("grammar", 'root ::= "a"', LarkSpec(text='root ::= "a"', param="grammar")),
    ],
)
def test_the_other_names_of_structured_outputs(field: str, value: Any, expected: GrammarSpec) -> None:
    request = CompletionRequest.model_validate({"model": "m", "prompt": "x", field: value})
    assert structured_shape(request, 64) == shape_of(**{field: value}) == expected
    with pytest.raises(InvalidRequest, match="both say"):
        shape_of(structured_outputs={"json_object": True}, **{field: value})
    name = field.removeprefix("guided_").removesuffix("_schema")
    both = shape_of(structured_outputs={name: value}, **{field: value})
    assert both == shape_of(structured_outputs={name: value}), "sent under both names, as guidance does"


def test_an_empty_grammar_asks_for_nothing() -> None:
    assert shape_of(grammar="") is None


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


def test_a_forced_call_goes_before_a_format_and_a_format_is_that_of_the_text() -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    forced, free = shape_of(tool_choice="required", **fields), shape_of(**fields)
    assert isinstance(forced, ToolCallsSpec) and forced.at_least_one and forced.text is None
    assert isinstance(free, ToolCallsSpec) and not free.at_least_one
    assert free.text == JsonObjectSpec(param="response_format")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called_and_the_model_is_told_of_all(mode: str) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    shape = shape_of(tools=[WEATHER, TIME], tool_choice=choice)
    assert isinstance(shape, ToolCallsSpec) and shape.parallel
    assert ([tool.name for tool in shape.tools], shape.at_least_one) == (["time"], mode == "required")
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, TIME]}
    request = ChatRequest.model_validate({**fields, "tool_choice": choice})
    assert len(toolbox(request, ChatStyles(HERMES)).offered) == 2
    choice["allowed_tools"]["tools"][0] = {"type": "function", "function": {"name": "other"}}  # type: ignore[index]
    with pytest.raises(InvalidRequest, match="no tool 'other'"):
        shape_of(tools=[WEATHER, TIME], tool_choice=choice)


def test_a_strict_tool_binds_calls_and_leaves_the_text_free() -> None:
    strict = shape_of(tools=[STRICT, TIME])
    assert isinstance(strict, ToolCallsSpec) and not strict.at_least_one
