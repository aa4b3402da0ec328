"""Tools and reasoning in a chat: what the model is told, what it wrote, and what the client reads of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.http import chat, events
from tests.api.scripted_engine import ScriptedEngine
from weft.backends.contract import ChatStyles
from weft.serving.served_model import ServedModel
from weft.text.parsers.styles import REASONING_STYLES, TOOL_STYLES, ToolStyle
from weft.types import FinishReason, Output, Usage

HERMES = next(style for style in TOOL_STYLES if style.name == "hermes")
THINK = REASONING_STYLES[0]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALLS = HERMES.shape.write([("weather", '{"city": "Oslo"}'), ("time", "{}")])
TEXT = f"<think>Which city?</think>Let me look.{CALLS}"


def engine_that_says(text: str, *, cuts: list[int] | None = None, finish: FinishReason = FinishReason.STOP) -> Any:
    edges = sorted({0, len(text), *(cut for cut in cuts or () if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(edges)]
    script = [Output(text=part, token_ids=[65]) for part in parts]
    usage = Usage(prompt_tokens=3, completion_tokens=len(parts))
    engine = ScriptedEngine([*script, Output(finish=finish, usage=usage)])
    engine.styles = ChatStyles(HERMES, THINK)
    return engine


def whole(text: str, **fields: Any) -> Any:
    response = chat(engine_that_says(text), **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(text: str, cuts: list[int], **fields: Any) -> Any:
    """The stream put together as clients do it."""
    message: dict[str, Any] = {}
    calls: dict[int, Any] = {}
    finish = None
    for chunk in events(chat(engine_that_says(text, cuts=cuts), stream=True, **fields)):
        [choice] = chunk["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for part in value:
                    call = calls.setdefault(part["index"], {"function": {"arguments": ""}})
                    call["function"]["arguments"] += part["function"].pop("arguments")
                    call["function"] |= part.pop("function")
                    call |= part
            elif isinstance(value, str) and name != "role":
                message[name] = message.get(name, "") + value
        finish = choice["finish_reason"] or finish
    return message | ({"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {}), finish


def test_calls_content_and_reasoning_are_told_apart() -> None:
    choice = whole(TEXT, tools=[WEATHER, TIME])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"].strip() == "Let me look."
    assert message["reasoning"] == message["reasoning_content"] == "Which city?"
    first, second = message["tool_calls"]
    assert (first["type"], first["function"]["name"]) == ("function", "weather")
    assert json.loads(first["function"]["arguments"]) == {"city": "Oslo"}
    assert second["function"] == {"name": "time", "arguments": "{}"}
    assert first["id"] != second["id"]


PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}},
    },
}
DIFF = '*** Begin "Patch"\n+\tä 😀 \\n\n*** End'


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 300), max_size=60), ascii=st.booleans())
def test_a_custom_tool_is_called_with_its_text(cuts: list[int], ascii: bool) -> None:
    arguments = json.dumps({"input": DIFF}, ensure_ascii=ascii)
    text = HERMES.shape.write([("weather", '{"city": "Oslo"}'), ("patch", arguments), ("time", "{}")])
    tools = [WEATHER, PATCH, TIME]
    choice = whole(text, tools=tools)
    weather, patch, time = choice["message"]["tool_calls"]
    assert patch == {"id": patch["id"], "type": "custom", "custom": {"name": "patch", "input": DIFF}}
    assert "custom" not in weather | time and choice["finish_reason"] == "tool_calls"
    chunks = events(chat(engine_that_says(text, cuts=cuts), stream=True, tools=tools))
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    begun, *others = [part for part in parts if part["index"] == 1]
    assert (begun["type"], begun["custom"]["name"]) == ("custom", "patch")
    assert "".join(part["custom"]["input"] for part in (begun, *others)) == DIFF


def test_the_model_is_told_of_a_custom_tool_as_a_function() -> None:
    engine = engine_that_says("text")
    call = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": DIFF}}
    past = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
    answered = chat(engine, messages=[*past, {"role": "tool", "tool_call_id": "1", "content": "ok"}], tools=[PATCH])
    assert answered.headers["weft-fields-without-effect"] == "tools.custom.format"
    [tool] = engine.tools
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert tool["function"]["description"].startswith("Edits files.") and "start: /.+/" in str(tool)
    assert engine.messages[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": DIFF}}


def test_a_regular_expression_is_enforced_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[Any] = []

    async def noted(served: ServedModel, spec: Any, thinking: object = None) -> str:
        specs.append(spec)
        return ""

    monkeypatch.setattr(ServedModel, "grammar_of", noted)
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a|b"}}
    tool = {"type": "custom", "custom": {"name": "pick", "format": form}}
    named = {"type": "custom", "custom": {"name": "pick"}}
    for choice in ("auto", named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}):
        answered = chat(engine_that_says("text"), tools=[tool, TIME], tool_choice=choice)
        assert answered.status_code == 200 and "weft-fields-without-effect" not in answered.headers, answered.text
        assert specs[-1].at_least_one is (choice != "auto")
        assert specs[-1].tools[0].parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:a|b)$"}}


def test_a_call_without_words_has_no_content() -> None:
    assert whole(CALLS, tools=[WEATHER, TIME])["message"]["content"] is None


def test_one_call_when_they_may_not_be_parallel() -> None:
    calls = whole(TEXT, tools=[WEATHER, TIME], parallel_tool_calls=False)["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather"]


def test_an_answer_cut_off_in_a_call_says_length() -> None:
    engine = engine_that_says(CALLS[:30], finish=FinishReason.LENGTH)
    assert chat(engine, tools=[WEATHER]).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("style", TOOL_STYLES, ids=lambda style: style.name)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_anywhere_is_no_content(
    style: ToolStyle, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedModel, "grammar_of", _no_grammar)
    text = style.shape.write([("weather", '{"city": "Oslo"}')])
    for end in range(len(text)):
        engine = engine_that_says(text[:end], cuts=[*range(end)], finish=FinishReason.LENGTH)
        engine.styles = ChatStyles(style)
        response = chat(engine, tools=[WEATHER], tool_choice="required", stream=stream)
        choices = [chunk["choices"][0] for chunk in (events(response) if stream else [response.json()])]
        messages = [choice["delta" if stream else "message"] for choice in choices]
        assert "".join(message.get("content") or "" for message in messages) == ""
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        assert [call["name"] for call in calls if "name" in call] == ["weather"] * bool(calls)
        assert '{"city": "Oslo"}'.startswith("".join(call["arguments"] for call in calls))
        assert choices[-1]["finish_reason"] == "length"


async def _no_grammar(*args: object) -> str:
    return ""


OLD: dict[str, Any] = {"functions": [WEATHER["function"], TIME["function"]]}


def test_a_call_of_a_function_is_answered_in_the_older_form() -> None:
    choice = whole(TEXT, **OLD)
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    chunks = [chunk["choices"][0] for chunk in events(chat(engine_that_says(TEXT, cuts=[90]), stream=True, **OLD))]
    calls = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == '{"city": "Oslo"}'
    assert chunks[-1]["finish_reason"] == "function_call"


def test_past_calls_of_functions_are_those_of_tools() -> None:
    engine = engine_that_says("Sunny.")
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert chat(engine, messages=messages, function_call="auto", **OLD).status_code == 200
    _, call, result = engine.messages
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert result == {"role": "tool", "content": "sun", "name": "weather"}
    assert [tool["function"]["name"] for tool in engine.tools] == ["weather", "time"]
    none = engine_that_says("Sunny.")
    assert chat(none, function_call="none", **OLD).status_code == 200 and not none.tools
    assert chat(engine, tools=[TIME], **OLD).status_code == 400


def test_without_tools_a_call_is_text() -> None:
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = whole(CALLS, **fields)
        assert choice["message"]["content"] == CALLS and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


def test_reasoning_can_be_left_out() -> None:
    message = whole("<think>hm</think>yes", include_reasoning=False)["message"]
    assert message["content"] == "yes" and "reasoning" not in message


@given(cuts=st.lists(st.integers(1, len(TEXT)), max_size=20))
@settings(max_examples=40)
def test_the_stream_put_together_is_the_whole(cuts: list[int]) -> None:
    message, finish = streamed(TEXT, cuts, tools=[WEATHER, TIME])
    expected = whole(TEXT, tools=[WEATHER, TIME])
    assert finish == expected["finish_reason"]
    assert message["content"] == expected["message"]["content"]
    assert message["reasoning_content"] == expected["message"]["reasoning_content"]
    assert [call["function"] for call in message["tool_calls"]] == [
        call["function"] for call in expected["message"]["tool_calls"]
    ]
    assert [call["index"] for call in message["tool_calls"]] == [0, 1]


def test_the_template_is_given_tools_and_past_calls() -> None:
    engine = engine_that_says("It rains.")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert chat(engine, messages=messages, tools=[WEATHER]).status_code == 200
    assert engine.tools == [WEATHER]
    _, assistant, tool = engine.messages
    assert assistant["content"] == "" and assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert tool["tool_call_id"] == "c1"
    # Its markers must reach the parser, special tokens or not.
    assert set(HERMES.markers) <= set(engine.submitted[0].markers)


def test_tool_choice_none_does_not_tell_the_model() -> None:
    engine = engine_that_says("x")
    chat(engine, tools=[WEATHER], tool_choice="none")
    assert engine.tools is None


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "nobody"}}, "any"])
def test_a_choice_that_there_is_not(choice: Any) -> None:
    response = chat(engine_that_says("x"), tools=[WEATHER], tool_choice=choice)
    assert response.status_code == 400 and "tool_choice" in response.json()["error"]["param"]
