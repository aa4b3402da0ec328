"""Every endpoint over an engine that is given text: what it passes on, and what needs tokens that nobody knows."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.api.grpc.calls import answer_to, ask, served
from tests.api.http import (
    CHAT,
    COMPLETIONS,
    HELLO,
    PROMPT,
    chat,
    complete,
    error_of,
    events,
    post,
    real_server,
    request,
    request_app,
)
from tests.api.says import named_events
from tests.api.scripted_engine import forever
from tests.api.text_engine import PIECES, TextEngine, plain, read
from tests.serving.test_rate_limits import hang_up, limited_app
from weft.api.app import build_app
from weft.backends.contract import Conversation
from weft.config import load
from weft.text.grammars.specs import ChoiceSpec, JsonObjectSpec, JsonSchemaSpec, LarkSpec, RegexSpec, decode_spec
from weft.text.parsers.pieces import Content
from weft.types import FinishReason, Output, Usage

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
]


def refused(response: httpx.Response, *words: str, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = error_of(response)
    for word in words:
        assert word in error["message"]
    return error


# What is passed on.


def test_a_chat_goes_as_messages_and_comes_back_in_pieces() -> None:
    engine = TextEngine(read(*PIECES))
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Is it"}, {"type": "text", "text": "cold?"}]},
        {"role": "assistant", "tool_calls": CALLS[:1], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_a", "content": "-3"},
    ]
    response = chat(engine, messages=messages, tools=[WEATHER, TIME], parallel_tool_calls=True, max_tokens=50)
    [choice] = response.json()["choices"]
    assert choice["message"]["content"] == "Let me look."
    assert choice["message"]["reasoning_content"] == "Which city?"
    assert choice["message"]["tool_calls"] == CALLS
    assert choice["finish_reason"] == "tool_calls"
    assert response.json()["usage"]["prompt_tokens"] == 11
    assert response.json()["usage"]["completion_tokens"] == 6
    [asked] = engine.asked
    assert isinstance(asked, Conversation)
    assert [message["role"] for message in asked.messages] == ["system", "user", "assistant", "tool"]
    assert asked.messages[1]["content"] == "Is it\ncold?"
    assert asked.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}', "as JSON text"
    assert asked.messages[2]["reasoning_content"] == "Hm."
    assert [tool["function"]["name"] for tool in asked.tools] == ["weather", "time"]
    assert (asked.tool_choice, asked.parallel_tool_calls, asked.add_generation_prompt) == (None, True, True)


def test_a_stream_tells_the_same_as_the_whole() -> None:
    chunks = events(chat(TextEngine(read(*PIECES)), tools=[WEATHER, TIME], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Which city?"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == '{"city": "Oslo"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_a_request_does_not_want_to_see_is_left_out() -> None:
    tools = {"tools": [WEATHER, TIME]}
    hidden = chat(TextEngine(read(*PIECES)), include_reasoning=False, parallel_tool_calls=False, **tools)
    message = hidden.json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert len(message["tool_calls"]) == 1


def test_tools_are_offered_only_when_they_may_be_called() -> None:
    for choice, told in (("none", ([], "none")), ("required", (["weather"], "required"))):
        engine = TextEngine()
        chat(engine, tools=[WEATHER], tool_choice=choice)
        [asked] = engine.asked
        assert isinstance(asked, Conversation)
        assert ([tool["function"]["name"] for tool in asked.tools], asked.tool_choice) == told
    engine = TextEngine(read(*PIECES[3:6]))
    named = {"type": "function", "function": {"name": "weather"}}
    response = chat(engine, tools=[WEATHER], tool_choice=named)
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert engine.asked[0].tool_choice == named  # type: ignore[union-attr]
    refused(chat(TextEngine(), tools=[WEATHER, WEATHER]), "same name")


def test_templates_are_told_what_the_request_says() -> None:
    engine = TextEngine()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    chat(engine, messages=messages, continue_final_message=True, chat_template_kwargs={"colour": "red"})
    [asked] = engine.asked
    assert isinstance(asked, Conversation)
    assert (asked.continue_final_message, asked.add_generation_prompt) == (True, False)
    assert asked.template_variables == {"colour": "red"}


def test_a_completion_goes_as_text() -> None:
    engine = TextEngine(plain("Hel", "lo"))
    response = complete(engine, prompt=["One", "Two"], n=2)
    assert [choice["text"] for choice in response.json()["choices"]] == ["Hello"] * 4
    assert engine.asked == ["One", "One", "Two", "Two"]
    assert response.json()["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 22,
        "completion_tokens": 24,
        "total_tokens": 46,
        "prompt_tokens_details": None,
    }
    chunks = events(complete(TextEngine(plain("Hel", "lo")), stream=True, stream_options={"include_usage": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["Hel", "lo", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 6


def test_what_an_output_must_be_is_passed_on_in_its_own_words() -> None:
    def asked(**fields: Any) -> Any:
        engine = TextEngine()
        assert chat(engine, **fields).status_code == 200
        return decode_spec(engine.submitted[0].params.grammar)

    formed = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert asked(response_format=formed) == JsonSchemaSpec(schema=SCHEMA, param="response_format.json_schema.schema")
    assert asked(response_format={"type": "json_object"}) == JsonObjectSpec()
    assert asked(structured_outputs={"regex": "a+"}).pattern == RegexSpec(pattern="a+").pattern
    assert asked(structured_outputs={"choice": ["a"]}).options == ChoiceSpec(options=["a"]).options
    assert asked(structured_outputs={"grammar": "start: /a/"}).text == LarkSpec(text="start: /a/").text
    large = {"type": "object", "description": "x" * 100_000}
    refused(chat(TextEngine(), structured_outputs={"json": large}), "--max-schema-kb")


def test_the_other_interfaces_go_the_same_way() -> None:
    body = {"model": "scripted", "max_tokens": 50, "messages": [{"role": "user", "content": "Cold?"}]}
    tool = {"name": "weather", "input_schema": SCHEMA}
    engine = TextEngine(read(*PIECES))
    answer = post(engine, "/v1/messages", body | {"tools": [tool]}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][2]["input"] == {"city": "Oslo"}
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["input_tokens"] == 7 and answer["usage"]["cache_read_input_tokens"] == 4
    streamed = named_events(post(TextEngine(read(*PIECES)), "/v1/messages", body | {"tools": [tool], "stream": True}))
    assert streamed[-2]["usage"]["output_tokens"] == 6

    body = {"model": "scripted", "input": "Cold?"}
    answer = post(TextEngine(read(*PIECES)), "/v1/responses", body).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert answer["usage"]["input_tokens"] == 11
    streamed = named_events(post(TextEngine(read(*PIECES)), "/v1/responses", body | {"stream": True}))
    assert streamed[-1]["response"]["output"] == [
        {**item, "id": streamed[-1]["response"]["output"][number]["id"]} for number, item in enumerate(answer["output"])
    ]


def test_grpc_goes_the_same_way() -> None:
    async def answered(engine: TextEngine, **fields: Any) -> Any:
        async with served(engine) as client:
            return await answer_to(client, ask(**fields))

    engine = TextEngine(plain("Hel", "lo"))
    responses = asyncio.run(answered(engine, prompt="Say it"))
    assert "".join(response.chunk for response in responses) == "Hello"
    assert responses[-1].tokens_per_sec > 0
    assert responses[-1].ttft_ms > 0
    assert engine.asked == ["Say it"]


# What needs tokens.

NEED_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, PROMPT | {"prompt": [1, 2, 3]}, "prompt"),
    (COMPLETIONS, PROMPT | {"echo": True}, "echo"),
    (COMPLETIONS, PROMPT | {"logprobs": 1}, "logprobs"),
    (COMPLETIONS, PROMPT | {"prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, PROMPT | {"return_token_ids": True}, "return_token_ids"),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    (CHAT, HELLO | {"logprobs": True}, "logprobs"),
    (CHAT, HELLO | {"return_token_ids": True, "stream": True}, "return_token_ids"),
    (CHAT, HELLO | {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
    ("/tokenize", {"prompt": "hi"}, ""),
    ("/tokenize", {"messages": HELLO["messages"]}, ""),
    ("/detokenize", {"tokens": [1, 2]}, ""),
]


@pytest.mark.parametrize(("path", "body", "field"), NEED_TOKENS, ids=[f"{case[0]}-{case[2]}" for case in NEED_TOKENS])
def test_what_needs_tokens_says_what_to_set(path: str, body: dict[str, Any], field: str) -> None:
    error = refused(post(TextEngine(), path, body), "the engine remote", "--tokenizer")
    assert error["param"] == (field or None)


@pytest.mark.parametrize("field", ["return_token_ids", "logprobs"])
def test_a_tokenizer_is_not_named_where_it_would_not_help(field: str) -> None:
    engine = TextEngine()
    engine.abilities = replace(engine.abilities, with_tokenizer=frozenset({"tokens"}))
    error = refused(complete(engine, **{field: 1 if field == "logprobs" else True}), f"{field} is not supported")
    assert "--tokenizer" not in error["message"]


def test_counting_needs_tokens_too() -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    response = post(TextEngine(), "/v1/messages/count_tokens", body)
    assert response.status_code == 400
    assert "--tokenizer" in response.json()["error"]["message"]


def test_what_the_engine_cannot_says_its_name() -> None:
    error = refused(complete(TextEngine(), min_p=0.5), "min_p", "the engine remote", "weft engines")
    assert error["param"] == "min_p"
    embeddings = post(TextEngine(), "/v1/embeddings", {"model": "scripted", "input": "hi"})
    refused(embeddings, "remote", status=501)
    ids = post(TextEngine(), "/v1/embeddings", {"model": "scripted", "input": [1, 2]})
    refused(ids, "--tokenizer")


def test_ids_that_the_client_knows_are_passed_on() -> None:
    engine = TextEngine(plain("Hello"))
    assert complete(engine, logit_bias={"90000": 1}, stop_token_ids=[90001]).status_code == 200
    params = engine.submitted[0].params
    assert (params.logit_bias, params.stop_token_ids) == ({90000: 1.0}, (90001,))


def test_the_card_tells_only_what_is_known() -> None:
    [card] = request(TextEngine(), "GET", "/v1/models").json()["data"]
    assert card["capabilities"] == ["chat", "completions"]
    assert "max_model_len" not in card


# What is counted.


def figures(engine: TextEngine, **fields: Any) -> dict[str, float]:
    app = build_app(engine, load(env={}))
    assert request_app(app, "POST", COMPLETIONS, json=PROMPT | fields).status_code == 200
    lines = request_app(app, "GET", "/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("weft_"))
    return {name.split("{")[0]: float(value) for name, value in found}


def test_tokens_are_counted_by_the_peer_and_times_by_text() -> None:
    told = figures(TextEngine(plain("a", "b", "c")))
    assert told["weft_request_prompt_tokens_sum"] == 11
    assert told["weft_request_generation_tokens_sum"] == 6
    assert told["weft_time_to_first_token_seconds_count"] == 1
    assert told["weft_inter_token_latency_seconds_count"] == 5, "six tokens have five times between them"


def test_a_running_usage_is_counted_once() -> None:
    def seen(tokens: int) -> Usage:
        return Usage(prompt_tokens=11, completion_tokens=tokens)

    script = [
        Output(text="a", usage=seen(2)),
        Output(text="b", usage=seen(5)),
        Output(finish=FinishReason.STOP, usage=seen(6)),
    ]
    told = figures(TextEngine(script))
    assert told["weft_request_generation_tokens_sum"] == 6
    assert told["weft_request_prompt_tokens_sum"] == 11
    assert told["weft_inter_token_latency_seconds_count"] == 5


def test_a_key_pays_for_what_the_peer_counted() -> None:
    """The prompt of several choices once, and every answer. Until it has counted, characters are an estimate."""
    engine = TextEngine(plain("a"))
    app, purse = limited_app(engine, 10_000)
    assert request_app(app, "POST", COMPLETIONS, json=PROMPT | {"n": 2}).status_code == 200
    assert purse.level == 10_000 - (11 + 2 * 6)
    engine.script = [Output(text="x" * 400), forever]
    with real_server(app) as url:
        hang_up(url, engine, COMPLETIONS, PROMPT | {"prompt": "y" * 4000, "max_tokens": 500, "stream": True})
    assert 1100 <= 9977 - purse.level <= 1110


def test_prompts_are_logged_as_they_were_given(caplog: pytest.LogCaptureFixture) -> None:
    config = load({"log_prompts": True}, env={})
    with caplog.at_level("INFO"):
        request(TextEngine(plain("a")), "POST", COMPLETIONS, config, json=PROMPT)
        request(TextEngine(read(Content("a"))), "POST", CHAT, config, json=HELLO)
    said = json.dumps([record.__dict__ for record in caplog.records], default=str)
    assert "'hi'" in said or '"hi"' in said
