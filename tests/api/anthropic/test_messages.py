"""Anthropic's interface: what is asked of the model, what its clients read, and how they are refused."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.api.http import post, request
from tests.api.says import CALLS, EVERYTHING, SCHEMA, THOUGHT, model_that_says, named_events
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.handler import FIELDS_HEADER
from weft.backends.contract import ChatStyles
from weft.config import load
from weft.errors import EngineFault, InvalidRequest, Overloaded, RequestTimeout, Unavailable, WeftError
from weft.types import FinishReason, Output, SamplingParams

MESSAGES = "/v1/messages"
HELLO = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}, {"name": "time", "input_schema": {}}]


@cache
def events_of_theirs() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent  # Seconds, for the one worker that runs this file.

    return TypeAdapter(RawMessageStreamEvent)


def ask(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, MESSAGES, HELLO | fields)


def whole(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    from anthropic.types import Message

    response = ask(engine, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Message.model_validate(body)
    return body


def streamed(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    """The stream put together as clients do it; its order is checked on the way."""
    message: dict[str, Any] = {}
    texts: list[list[str]] = []
    is_open = False
    *events, last = named_events(ask(engine, stream=True, **fields))
    assert last == {"type": "message_stop"}
    for event in events:
        if event["type"] != "ping":
            events_of_theirs().validate_python(event)
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                is_open = True
                message["content"].append(event["content_block"])
                texts.append([])
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                [text] = [value for name, value in event["delta"].items() if name != "type"]
                texts[-1].append(text)
            case "content_block_stop":
                assert is_open and event["index"] == len(message["content"]) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
            case name:
                assert name == "ping"
    for block, parts in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads("".join(parts))
        else:
            block[block["type"]] = "".join(parts)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"content": content, "id": ""}


def error_of(response: httpx.Response) -> tuple[str, str]:
    """The type and the message of an error, which must have Anthropic's shape."""
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    body = response.json()
    assert body["type"] == "error"
    assert body.keys() <= {"type", "error", "request_id"}
    return body["error"]["type"], body["error"]["message"]


def test_an_answer_has_anthropic_s_shape() -> None:
    body = whole(ScriptedEngine())
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": "Hello, world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "output_tokens": 12,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
        },
    }


def test_a_stream_has_its_events_in_order() -> None:
    events = named_events(ask(ScriptedEngine(), stream=True))
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "ping", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["stop_reason"], start["usage"]["input_tokens"]) == (None, len("<user>hi"))
    assert events[-2]["usage"] == whole(ScriptedEngine())["usage"]


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    body = whole(model_that_says(EVERYTHING), tools=TOOLS)
    thinking, text, first, second = body["content"]
    assert thinking == {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert text == {"type": "text", "text": "Let me look."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert (second["name"], second["input"]) == ("time", {})
    assert first["id"] != second["id"]
    assert body["stop_reason"] == "tool_use"


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(1, len(EVERYTHING) - 1), max_size=30),
    text=st.sampled_from([EVERYTHING, CALLS, "No call < at <tool all.", f"{CALLS}\nAnd more text."]),
)
def test_every_way_to_cut_a_stream_says_the_same(cuts: list[int], text: str) -> None:
    at_once = without_ids(whole(model_that_says(text), tools=TOOLS))
    assert without_ids(streamed(model_that_says(text, cuts), tools=TOOLS)) == at_once


@pytest.mark.parametrize(
    ("finish", "matched", "said", "sequence"),
    [
        (FinishReason.STOP, None, "end_turn", None),
        (FinishReason.STOP, 2, "end_turn", None),
        (FinishReason.STOP, "END", "stop_sequence", "END"),
        (FinishReason.LENGTH, None, "max_tokens", None),
    ],
)
def test_why_an_answer_ended(finish: FinishReason, matched: Any, said: str, sequence: str | None) -> None:
    engine = model_that_says("text", finish=finish, stop_reason=matched)
    for body in (whole(engine), streamed(engine)):
        assert (body["stop_reason"], body["stop_sequence"]) == (said, sequence)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Os', {}),
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "da', {"city": "Oslo"}),
        ('<tool_call>\n{"name": "weather", "arguments": {city}}\n</tool_call>', {"arguments": "{city}"}),
    ],
)
def test_a_call_s_input_is_an_object_whatever_the_model_wrote(text: str, expected: Any) -> None:
    body = whole(model_that_says(text, finish=FinishReason.LENGTH), tools=TOOLS)
    assert [block["input"] for block in body["content"]] == [expected]
    assert body["stop_reason"] == "max_tokens"


def test_a_conversation_with_calls_comes_back_as_it_went() -> None:
    engine = model_that_says(EVERYTHING)
    turn = whole(engine, tools=TOOLS)
    calls = [block for block in turn["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": "no clock", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    messages = [*HELLO["messages"], {"role": "assistant", "content": turn["content"]}]  # type: ignore[misc]
    whole(engine, tools=TOOLS, messages=[*messages, {"role": "user", "content": results}], system="Be brief.")
    assert engine.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": THOUGHT,
            "tool_calls": [
                {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["input"]}}
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "Error: no clock"},
        {"role": "user", "content": "So?"},
    ]
    assert engine.tools is not None
    assert [tool["function"]["name"] for tool in engine.tools] == ["weather", "time"]
    assert engine.tools[0]["function"]["parameters"] == SCHEMA


def test_blocks_of_text_are_joined_and_cache_control_is_taken() -> None:
    engine = ScriptedEngine()
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]
    whole(engine, system=parts, messages=[{"role": "user", "content": parts}], **cached)
    assert [message["content"] for message in engine.messages] == ["a\nb", "a\nb"]


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    engine = ScriptedEngine()
    begun = [*HELLO["messages"], {"role": "assistant", "content": "The answer is"}]  # type: ignore[misc]
    whole(engine, messages=begun)
    assert (engine.continue_final_message, engine.add_generation_prompt) == (True, False)
    whole(engine)
    assert (engine.continue_final_message, engine.add_generation_prompt) == (False, True)


def test_thoughts_that_nobody_can_read_are_left_out() -> None:
    engine = ScriptedEngine()
    content = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "yes"}]
    again = {"role": "user", "content": "why?"}
    whole(engine, messages=[{"role": "user", "content": "ok?"}, {"role": "assistant", "content": content}, again])
    assert engine.messages[1] == {"role": "assistant", "content": "yes"}


def test_fields_become_sampling_parameters() -> None:
    engine = ScriptedEngine()
    whole(
        engine, max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x", "y"], seed=4, priority=2,
        cache_salt="s", metadata={"user_id": "u"}, service_tier="auto", speed="standard",
    )  # fmt: skip
    [submitted] = engine.submitted
    assert submitted.params == SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, stop=("x", "y"), seed=4
    )
    assert (submitted.priority, submitted.cache_salt, submitted.session) == (2, "s", "u")


@pytest.mark.parametrize(("thinking", "shown"), [
    (None, True),
    ({"type": "adaptive"}, True),
    ({"type": "enabled", "budget_tokens": 1024}, True),
    ({"type": "adaptive", "display": "omitted"}, False),
    ({"type": "disabled"}, False),
])  # fmt: skip
def test_thoughts_are_shown_unless_the_client_wants_none(thinking: Any, shown: bool) -> None:
    content = whole(model_that_says("<think>hm</think>yes"), thinking=thinking)["content"]
    assert [block["type"] for block in content] == (["thinking", "text"] if shown else ["text"])


def test_thinking_is_a_hint_for_a_model_that_cannot_and_switched_where_the_template_can() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    response = ask(ScriptedEngine(), thinking=thinking)
    assert response.status_code == 200 and response.headers[FIELDS_HEADER] == "thinking.budget_tokens, thinking"
    engine = ScriptedEngine()
    engine.styles = ChatStyles(variables=frozenset({"enable_thinking"}))
    for kind, expected in (("enabled", True), ("disabled", False)):
        response = ask(engine, thinking={"type": kind})
        assert FIELDS_HEADER not in response.headers and engine.template_variables == {"enable_thinking": expected}
    assert ask(engine, thinking=thinking).headers[FIELDS_HEADER] == "thinking.budget_tokens"


def test_at_most_one_call_when_parallel_use_is_disabled() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    content = whole(model_that_says(CALLS), tools=TOOLS, tool_choice=choice)["content"]
    assert [block["name"] for block in content] == ["weather"]


def test_tools_can_be_kept_from_the_model() -> None:
    engine = model_that_says("text")
    whole(engine, tools=TOOLS, tool_choice={"type": "none"})
    assert engine.tools is None


def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    engine = model_that_says("text")
    conversation = {name: value for name, value in HELLO.items() if name != "max_tokens"} | {"system": "Be brief."}
    counted = post(engine, "/v1/messages/count_tokens", conversation | {"tools": TOOLS})
    whole(engine, system="Be brief.", tools=TOOLS)
    assert counted.json() == {"input_tokens": len(engine.submitted[0].prompt)}
    refused = post(engine, "/v1/messages/count_tokens", conversation | {"stream": True})
    assert refused.status_code == 400
    assert "stream" in error_of(refused)[1]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "'temperature'"),
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'; supported here: text"),
        ({"messages": [{"role": "user", "content": []}]}, "needs content"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "no place"),
        ({"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": ""}]}, "go on with"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "'text'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}
                ]
            },
            "'image'; supported here: text",
        ),
        ({"system": [IMAGE]}, "'image'; supported here: text"),
        ({"tools": [{"type": "wed_search", "name": "web_search", "max_uses": 3}]}, "wed_search"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "name"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
    ],
)
def test_a_wrong_request_is_refused_in_anthropic_s_shape(fields: dict[str, Any], said: str) -> None:
    from anthropic.types.shared.error_response import ErrorResponse

    engine = model_that_says("text")
    for stream in (False, True):
        response = ask(engine, stream=stream, **fields)
        assert response.status_code == 400, response.text
        ErrorResponse.model_validate(response.json())
        kind, message = error_of(response)
        assert kind == "invalid_request_error"
        assert said in message
    assert not engine.submitted


def test_tools_need_a_model_that_calls() -> None:
    response = ask(model_that_says("text", styles=ChatStyles()), tools=TOOLS)
    assert response.status_code == 400
    assert "--tool-style" in error_of(response)[1]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("too long"), 400, "invalid_request_error"),
        (Overloaded("full", retry_after_s=7), 429, "rate_limit_error"),
        (Unavailable("restarting"), 503, "overloaded_error"),
        (RequestTimeout("late"), 504, "timeout_error"),
        (EngineFault("NaN logits"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses(error: WeftError, status: int, kind: str, stream: bool) -> None:
    response = ask(ScriptedEngine(refuse=error), stream=stream)
    assert response.status_code == status
    assert response.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)
    said_kind, message = error_of(response)
    assert said_kind == kind
    assert error.message in message


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), RuntimeError("boom in /usr/lib/secret.py")])
    events = named_events(ask(engine, stream=True))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(events)
    assert "message_stop" not in [event["type"] for event in events]
    assert not engine.open


def test_every_refusal_of_its_paths_has_anthropic_s_shape() -> None:
    locked = load({"api_key": ["sesame"]}, env={})
    response = request(ScriptedEngine(), "POST", MESSAGES, locked, json=HELLO)
    assert (response.status_code, error_of(response)[0]) == (401, "authentication_error")
    opened = request(ScriptedEngine(), "POST", MESSAGES, locked, json=HELLO, headers={"x-api-key": "sesame"})
    assert opened.status_code == 200
    response = request(ScriptedEngine(), "GET", MESSAGES)
    assert (response.status_code, error_of(response)[0]) == (405, "invalid_request_error")
    assert response.headers["allow"] == "POST"
    response = request(ScriptedEngine(), "POST", MESSAGES + "/nothing", headers={"x-request-id": "mine"})
    assert (response.status_code, error_of(response)[0]) == (404, "not_found_error")
    assert response.json()["request_id"] == "mine"
    response = ask(ScriptedEngine(), model="other")
    assert (response.status_code, error_of(response)[0]) == (404, "not_found_error")
    assert "type" not in request(ScriptedEngine(), "GET", "/v1/messagesandmore").json()


def test_an_empty_answer_has_no_blocks() -> None:
    engine = ScriptedEngine(answer(""))
    assert whole(engine)["content"] == []
    assert [event["type"] for event in named_events(ask(engine, stream=True))] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
