"""OpenAI's newer interface: what is asked of the model, what clients read, and what they can come back to."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.http import error_of, post, request_app
from tests.api.says import CALLS, EVERYTHING, SCHEMA, STYLES, THOUGHT, model_that_says, named_events
from tests.api.scripted_engine import ScriptedEngine
from tests.growth import check_linear
from weft.api.app import build_app
from weft.api.handler import FIELDS_HEADER
from weft.api.openai.openai_schema import AllowedChoice, NamedFunction, NamedTool
from weft.api.openai.responses_schema import ResponsesRequest
from weft.api.openai.responses_translate import chat_request
from weft.backends.contract import ChatStyles
from weft.config import load
from weft.errors import EngineFault, Overloaded
from weft.types import FinishReason, Output, SamplingParams, TokenLogprob, Usage

RESPONSES = "/v1/responses"
HELLO = {"model": "scripted", "input": "hi"}
TOOLS = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": SCHEMA},
    {"type": "function", "name": "time"},
]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edits.", "format": LARK}
PATCHED = '<tool_call>\n{"name": "edits__patch", "arguments": {"input": "+\\"a\\"\\n"}}\n</tool_call>'


def ask(engine: ScriptedEngine, **fields: Any) -> httpx.Response:
    return post(engine, RESPONSES, HELLO | fields)


def whole(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    response = ask(engine, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(body)
    return body


def streamed(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    """The last event's response; all that the events before it said is compared with it."""
    events = named_events(ask(engine, stream=True, **fields))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    texts: dict[int, str] = {}
    items: list[Any] = []
    for event in events:
        EVENT.validate_python(event)
        index = event.get("output_index")
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(items), "one item after the other"
                assert event["item"]["status"] == "in_progress"
                texts[index] = ""
            case (
                "output_text.delta"
                | "reasoning_text.delta"
                | "function_call_arguments.delta"
                | "custom_tool_call_input.delta"
            ):
                texts[index] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[index]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[index]
            case "custom_tool_call_input.done":
                assert event["input"] == texts[index]
            case "content_part.done":
                assert event["part"]["text"] == texts[index]
            case "output_item.done":
                items.append(event["item"])
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == items
    assert last["id"] == events[0]["response"]["id"]
    return last


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return response | {"output": output, "id": "", "created_at": 0, "completed_at": 0}


def test_an_answer_has_openai_s_shape() -> None:
    body = whole(ScriptedEngine(), metadata={"a": "b"}, instructions="Be brief.", user="u", prompt_cache_key="k")
    assert body["id"].startswith("resp_")
    assert Response.model_validate(body).output_text == "Hello, world"
    [item] = body["output"]
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == (
        "response", "completed", None, None,
    )  # fmt: skip
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }
    assert (body["metadata"], body["instructions"], body["user"]) == ({"a": "b"}, "Be brief.", "u")
    assert body["prompt_cache_key"] == "k"
    assert (body["tools"], body["tool_choice"], body["text"]) == ([], "auto", {"format": {"type": "text"}})


REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip
"""The fields that every response has by the specification Open Responses, null or not."""


def test_an_answer_has_every_field_that_open_responses_requires() -> None:
    """As far as its sources tell: its own suite is run by `make show-open-responses`, where there is one."""
    tool = {"type": "function", "name": "look"}
    body = whole(model_that_says(EVERYTHING), tools=[tool], presence_penalty=0.5)
    assert not REQUIRED - body.keys()
    nullable = {
        "completed_at", "incomplete_details", "previous_response_id", "instructions", "error", "reasoning", "user",
        "usage", "max_output_tokens", "max_tool_calls", "safety_identifier", "prompt_cache_key",
    }  # fmt: skip
    assert not [name for name in REQUIRED - nullable if body[name] is None]
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.5, 0)
    assert body["tools"][0].keys() >= {"type", "name", "description", "parameters", "strict"}


def test_thoughts_text_and_calls_are_items_in_order() -> None:
    body = whole(model_that_says(EVERYTHING), tools=TOOLS)
    reasoning, message, first, second = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
    assert message["content"][0]["text"] == "Let me look."
    assert (first["type"], first["name"], json.loads(first["arguments"])) == (
        "function_call", "weather", {"city": "Oslo"},
    )  # fmt: skip
    assert (second["name"], second["arguments"]) == ("time", "{}")
    assert len({item["id"] for item in body["output"]}) == 4
    assert first["call_id"] != second["call_id"]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    assert [tool["name"] for tool in body["tools"]] == ["weather", "time"]


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(1, len(EVERYTHING) - 1), max_size=30),
    text=st.sampled_from([EVERYTHING, CALLS, "No call < at <tool all.", f"{CALLS}\nAnd more text.", ""]),
    finish=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_every_way_to_cut_a_stream_says_the_same(cuts: list[int], text: str, finish: FinishReason) -> None:
    at_once = without_ids(whole(model_that_says(text, finish=finish), tools=TOOLS))
    assert without_ids(streamed(model_that_says(text, cuts, finish=finish), tools=TOOLS)) == at_once


def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    body = whole(model_that_says(EVERYTHING[:-20], finish=FinishReason.LENGTH), tools=TOOLS)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed"] * 3 + ["incomplete"]


def test_fields_become_sampling_parameters() -> None:
    engine = ScriptedEngine()
    whole(
        engine, max_output_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=4, priority=2, cache_salt="s",
        stream_options={"include_obfuscation": False}, include=["reasoning.encrypted_content"], background=False,
        reasoning={"effort": None, "summary": "auto"}, service_tier="auto", top_logprobs=0, store=False,
    )  # fmt: skip
    [submitted] = engine.submitted
    assert submitted.params == SamplingParams(max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=4)
    assert (submitted.priority, submitted.cache_salt) == (2, "s")


def test_items_become_messages() -> None:
    engine = model_that_says("text")
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me", "annotations": []}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "user", "content": "so?"},
    ]
    whole(engine, input=items, instructions="Be brief.")
    made = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert engine.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\na"},
        {
            "role": "assistant",
            "content": "Let me",
            "reasoning_content": "hm",
            "tool_calls": [made | {"id": "c1"}, made | {"id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "why"},
        {"role": "user", "content": "so?"},
    ]


def test_the_output_can_be_sent_back_as_input() -> None:
    engine = model_that_says(EVERYTHING)
    output = whole(engine, tools=TOOLS)["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for item in output
        if item["type"] == "function_call"
    ]
    whole(engine, tools=TOOLS, input=[{"role": "user", "content": "hi"}, *output, *results], store=False)
    sent_back = engine.messages

    app = build_app(engine, load(env={}))
    first = request_app(app, "POST", RESPONSES, json=HELLO | {"tools": TOOLS}).json()
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    again = {"model": "scripted", "tools": TOOLS, "input": results, "previous_response_id": first["id"]}
    assert request_app(app, "POST", RESPONSES, json=again).json()["previous_response_id"] == first["id"]
    assert normalised(engine.messages) == normalised(sent_back), "the store says what the items say"


def normalised(messages: Any) -> Any:
    return json.loads(json.dumps([{**message, "tool_call_id": "", "tool_calls": [
        call["function"] for call in message.get("tool_calls", ())]} for message in messages]))  # fmt: skip


class Client:
    """One application, asked several times."""

    def __init__(self, engine: ScriptedEngine, **flags: Any) -> None:
        self.app: FastAPI = build_app(engine, load(flags, env={}))

    def ask(self, key: str = "", **fields: Any) -> httpx.Response:
        return self.send("POST", "", key, json=HELLO | fields)

    def send(self, method: str, path: str, key: str = "", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return request_app(self.app, method, RESPONSES + path, headers=headers, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_kept_answer(stream: bool) -> None:
    engine = ScriptedEngine()
    client = Client(engine)
    response = client.ask(instructions="Only now.", stream=stream)
    first = named_events(response)[-1]["response"]["id"] if stream else response.json()["id"]
    second = client.ask(input="and?", previous_response_id=first).json()["id"]
    client.ask(input="so?", previous_response_id=second, instructions="Be brief.")
    said = [(message["role"], message["content"]) for message in engine.messages]
    hello = ("assistant", "Hello, world")
    assert said == [("system", "Be brief."), ("user", "hi"), hello, ("user", "and?"), hello, ("user", "so?")]


def test_a_kept_answer_can_be_read_and_deleted() -> None:
    client = Client(ScriptedEngine())
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    first = client.ask(input=items).json()
    path = f"/{first['id']}"
    assert client.send("GET", path).json() == first
    listed = client.send("GET", path + "/input_items").json()
    ResponseItemList.model_validate(listed)
    assert [item["content"][0]["text"] for item in listed["data"]] == ["c", "b", "a"]
    assert len({item["id"] for item in listed["data"]}) == 3
    page = client.send("GET", path + f"/input_items?order=asc&limit=1&after={listed['last_id']}").json()
    assert [item["content"][0]["text"] for item in page["data"]] == ["b"]
    assert page["has_more"] is True
    for limit in ("0", "101", "1000", "-1", "a", "", "0" * 5000 + "1", "001" + "0" * 5000, "0099999", "٣"):
        refused = client.send("GET", path + f"/input_items?limit={limit}")
        assert refused.status_code == 400 and error_of(refused)["param"] == "limit"
    assert len(client.send("GET", path + "/input_items?limit=001").json()["data"]) == 1
    assert error_of(client.send("GET", path + "?stream=true"))["param"] == "stream"
    assert client.send("DELETE", path).json() == {"id": first["id"], "object": "response", "deleted": True}
    for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        response = client.send(method, path + below)
        assert response.status_code == 404
        assert error_of(response)["code"] == "response_not_found"


def test_what_is_not_to_be_kept_is_not() -> None:
    for client, fields in (
        (Client(ScriptedEngine()), {"store": False}),
        (Client(ScriptedEngine(), responses_store_entries=0), {}),
        (Client(ScriptedEngine(), responses_store_mb=0), {}),
    ):
        answer = client.ask(**fields).json()
        response_id = answer["id"]
        assert answer["store"] is False and client.send("GET", f"/{response_id}").status_code == 404
        refused = client.ask(previous_response_id=response_id)
        assert refused.status_code == 400
        assert error_of(refused)["code"] == "previous_response_not_found"


def test_a_store_that_is_asked_for_and_not_there_is_named() -> None:
    client = Client(ScriptedEngine(), responses_store_entries=0)
    assert client.ask(store=True).headers[FIELDS_HEADER] == "store"
    assert FIELDS_HEADER not in client.ask().headers


def test_nobody_reads_what_another_key_asked() -> None:
    client = Client(ScriptedEngine(), api_key=["mine", "yours"])
    response_id = client.ask(key="mine").json()["id"]
    assert client.send("GET", f"/{response_id}", key="mine").status_code == 200
    assert client.send("GET", f"/{response_id}", key="yours").status_code == 404
    assert client.send("DELETE", f"/{response_id}", key="yours").status_code == 404
    assert client.ask(key="yours", previous_response_id=response_id).status_code == 400
    assert client.send("GET", f"/{response_id}").status_code == 401
    assert client.ask(key="mine", previous_response_id=response_id).status_code == 200


@pytest.mark.parametrize("cuts", [[], [3, 9], [*range(60)]])
def test_figures_are_those_of_the_text_s_tokens(cuts: list[int]) -> None:
    def script() -> ScriptedEngine:
        edges = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
        parts = [text[begin:end] for begin, end in pairwise(edges)]
        outputs = [
            Output(text=part, token_ids=[*part.encode()], logprobs=[TokenLogprob(-0.5, ((97, -0.25),))] * len(part))
            for part in parts
        ]
        end = Output(token_ids=[0], logprobs=[TokenLogprob(-1)], finish=FinishReason.STOP, usage=Usage(prompt_tokens=1))
        engine = ScriptedEngine([*outputs, end])
        engine.styles = STYLES
        return engine

    text = f"<think>Look.</think>Look.\n{CALLS}"
    fields = {"tools": TOOLS, "top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    for answer in (whole(script(), **fields), streamed(script(), **fields)):
        [part] = next(item for item in answer["output"] if item["type"] == "message")["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Look."
        assert part["logprobs"][0]["top_logprobs"] == [{"token": "a", "logprob": -0.25, "bytes": [97]}]
        assert answer["top_logprobs"] == 1
    events = named_events(ask(script(), stream=True, **fields))
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(entry["token"] for event in deltas for entry in event["logprobs"]) == "Look."
    assert whole(model_that_says("hi"))["output"][0]["content"][0]["logprobs"] == []


def test_tools_that_the_server_runs_are_limited_and_there_are_none() -> None:
    answer = whole(model_that_says(EVERYTHING), tools=TOOLS, max_tool_calls=1)
    assert answer["max_tool_calls"] == 1
    assert [item["type"] for item in answer["output"]].count("function_call") == 2


def test_allowed_tools_are_those_of_a_chat() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    request = ResponsesRequest.model_validate(HELLO | {"tools": TOOLS, "tool_choice": allowed})
    choice = chat_request(request, [{"role": "user", "content": "hi"}]).tool_choice
    assert isinstance(choice, AllowedChoice)
    assert (choice.allowed_tools.mode, choice.allowed_tools.tools[0].function) == ("auto", NamedFunction(name="time"))


def test_many_allowed_tools_are_found_in_linear_time() -> None:
    def asked(count: int) -> ResponsesRequest:
        named = [{"type": "function", "name": f"tool{i}"} for i in range(count)]
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": named}
        return ResponsesRequest.model_validate(HELLO | {"tools": named, "tool_choice": allowed})

    check_linear(asked, lambda request: chat_request(request, [{"role": "user", "content": "hi"}]), 1000)


def test_truncation_cuts_a_prompt_that_is_too_long() -> None:
    engine = ScriptedEngine()
    whole(engine, input="x" * 2000, truncation="auto", max_output_tokens=100)
    assert len(engine.submitted[0].prompt) == engine.model.max_model_len - 100


def test_an_effort_goes_to_the_template() -> None:
    engine = ScriptedEngine()
    engine.styles = ChatStyles(variables=frozenset({"reasoning_effort"}))
    whole(engine, reasoning={"effort": "low"})
    assert engine.template_variables == {"reasoning_effort": "low"}
    whole(engine)
    assert engine.template_variables == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].message.content[0]",
        ),
        ({"inputs": "x"}, "inputs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"tools": [PATCH | {"parameters": {}}]}, "tools[0].parameters"),
        ({"tools": [PATCH | {"format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [TOOLS[0] | {"format": LARK}]}, "tools[0].format"),
        ({"top_logprobs": 21}, "top_logprobs"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tools": [{"type": "wed_search", "search_context_size": "low"}]}, "tools[0]"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbositi": "low"}}, "text.verbositi"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_a_wrong_request_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    engine = model_that_says("text")
    response = ask(engine, **fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param, response.text
    assert not engine.submitted


def test_a_part_that_is_no_text_is_refused_plainly() -> None:
    image = {"type": "input_image", "image_url": "x"}
    message = error_of(ask(ScriptedEngine(), input=[{"role": "user", "content": [image]}]))["message"]
    assert "input_text or output_text" in message


def test_what_the_engine_refuses_keeps_its_status() -> None:
    for stream in (False, True):
        response = ask(ScriptedEngine(refuse=Overloaded("full", retry_after_s=7)), stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")
        assert error_of(response)["type"] == "rate_limit_error"


def test_a_stream_that_breaks_says_so_and_is_not_kept() -> None:
    engine = ScriptedEngine([Output(text="Hel", token_ids=[1]), EngineFault("NaN logits")])
    client = Client(engine)
    *_, error, failed = named_events(client.ask(stream=True))
    for event in (error, failed):
        EVENT.validate_python(event)
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert "NaN logits" in error["message"]
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert client.send("GET", f"/{failed['response']['id']}").status_code == 404
    assert not engine.open


def test_functions_of_a_namespace_are_offered_by_both_names_and_called_by_their_own() -> None:
    engine = model_that_says('<tool_call>\n{"name": "agents__spawn", "arguments": {"task": "a"}}\n</tool_call>')
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}
    asking = {"role": "user", "content": "u"}
    past = {"type": "function_call", "call_id": "1", "namespace": "agents", "name": "spawn", "arguments": "{}"}
    asked: dict[str, Any] = {
        "model": "scripted",
        "input": [
            asking,
            past,
            {"type": "function_call_output", "call_id": "1", "output": "o"},
        ],
        "tools": [{"type": "namespace", "name": "agents", "description": "d", "tools": [spawn]}],
    }
    [call] = [item for item in post(engine, "/v1/responses", asked).json()["output"] if item["type"] == "function_call"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")
    assert engine.tools is not None and engine.tools[0]["function"]["name"] == "agents__spawn"
    assert engine.messages[1]["tool_calls"][0]["function"]["name"] == "agents__spawn"
    for event in named_events(post(engine, "/v1/responses", asked | {"stream": True})):
        if event["type"] == "response.output_item.done" and event["item"]["type"] == "function_call":
            assert (event["item"]["namespace"], event["item"]["name"]) == ("agents", "spawn")


SPACES = [
    {"type": "namespace", "name": space, "tools": [{"type": "function", "name": name} for name in names]}
    for space, names in {"agents": ("spawn", "wait", "time"), "clock": ("wait", "time")}.items()
]


@pytest.mark.parametrize(
    ("chosen", "call"),
    [("spawn", "agents__spawn"), ("agents__spawn", "agents__spawn"), ("clock__wait", "clock__wait"), ("time", "time")],
)
def test_a_choice_names_a_function_inside_of_a_namespace(chosen: str, call: str) -> None:
    choice = {"type": "function", "name": chosen}
    for asked in (choice, {"type": "allowed_tools", "mode": "required", "tools": [choice]}):
        request = ResponsesRequest.model_validate(HELLO | {"tools": TOOLS + SPACES, "tool_choice": asked})
        translated = chat_request(request, [{"role": "user", "content": "hi"}]).tool_choice
        tool = translated.allowed_tools.tools[0] if isinstance(translated, AllowedChoice) else translated
        assert isinstance(tool, NamedTool) and tool.function == NamedFunction(name=call)


def test_a_choice_that_two_namespaces_have_is_refused() -> None:
    error = error_of(ask(ScriptedEngine(), tools=SPACES, tool_choice={"type": "function", "name": "wait"}))
    assert error["param"] == "tool_choice" and "agents__wait" in error["message"]


@pytest.mark.parametrize("cuts", [[], [*range(90)]])
def test_custom_tools_are_called_with_their_text(cuts: list[int]) -> None:
    tools = [*TOOLS, {"type": "namespace", "name": "edits", "tools": [PATCH]}]
    text = f"{CALLS}\n{PATCHED}"
    at_once = whole(model_that_says(text), tools=tools)
    *functions, call = at_once["output"]
    assert [item["type"] for item in functions] == ["function_call"] * 2 and call["id"].startswith("ctc_")
    assert (call["type"], call["namespace"], call["name"], call["input"]) == (
        "custom_tool_call", "edits", "patch", '+"a"\n',
    )  # fmt: skip
    assert at_once["tools"][-1] == PATCH | {"namespace": "edits"}
    assert without_ids(streamed(model_that_says(text, cuts), tools=tools)) == without_ids(at_once)


def test_a_conversation_with_custom_tools_goes_on() -> None:
    engine = model_that_says(PATCHED.replace("edits__", ""))
    client = Client(engine)
    first = client.ask(tools=[PATCH], tool_choice="auto")
    assert first.headers[FIELDS_HEADER] == "tools.format", "the grammar is told and not enforced"
    assert engine.tools is not None and "start: /.+/" in engine.tools[0]["function"]["description"]
    result = {"type": "custom_tool_call_output", "call_id": first.json()["output"][0]["call_id"], "output": "done"}
    second = client.ask(input=[result], previous_response_id=first.json()["id"], tools=[PATCH])
    _, called, told = engine.messages
    assert called["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": '+"a"\n'}}
    assert (told["role"], told["content"]) == ("tool", "done")
    past = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+a"}
    third = client.ask(input=[past, result | {"call_id": "c"}]).json()
    listed = client.send("GET", f"/{third['id']}/input_items?order=asc").json()["data"]
    assert [(item["type"], item["id"][:4]) for item in listed] == [
        ("custom_tool_call", "ctc_"), ("custom_tool_call_output", "ctco"),
    ]  # fmt: skip
    assert second.status_code == 200 and listed[0]["input"] == "+a"


def test_calls_of_custom_tools_are_calls_of_functions_and_a_vendor_s_own_are_left_aside() -> None:
    engine = ScriptedEngine()
    items = [
        {"role": "user", "content": "u"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+a"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "o"},
    ]
    answered = post(engine, "/v1/responses", {"model": "scripted", "input": items, "store": False})
    assert answered.headers["weft-fields-without-effect"] == "input.web_search_call"
    _, called, result = engine.messages
    assert called["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "+a"}}
    assert result["content"] == "o"
