"""Which requests are taken, what becomes of their fields, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, chat, complete, error_of, post, request
from tests.api.scripted_engine import ScriptedEngine
from weft.text.tokenizer import FillInMiddle
from weft.types import SamplingParams

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "hi"}


def params_of(**fields: Any) -> SamplingParams:
    engine = ScriptedEngine()
    response = chat(engine, **fields)
    assert response.status_code == 200, response.text
    return engine.submitted[0].params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0}, SamplingParams(temperature=0)),
        ({"temperature": None, "top_p": None, "stop": None, "seed": None}, SamplingParams()),
        ({"max_tokens": 5}, SamplingParams(max_tokens=5)),
        ({"max_completion_tokens": 6}, SamplingParams(max_tokens=6)),
        ({"max_completion_tokens": 6, "max_tokens": 6}, SamplingParams(max_tokens=6)),
        ({"top_k": -1}, SamplingParams(top_k=0)),
        ({"top_k": 0}, SamplingParams(top_k=0)),
        (
            {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": -7},
            SamplingParams(top_k=40, top_p=0.9, min_p=0.1, seed=-7),
        ),
        ({"stop": "x"}, SamplingParams(stop=("x",))),
        ({"stop": ["x", "y"]}, SamplingParams(stop=("x", "y"))),
        ({"stop": []}, SamplingParams()),
        ({"logit_bias": {"5": -100, "6": 1.5}}, SamplingParams(logit_bias={5: -100.0, 6: 1.5})),
        ({"presence_penalty": 1, "frequency_penalty": -1}, SamplingParams(presence_penalty=1, frequency_penalty=-1)),
        ({"repetition_penalty": 1.2, "min_tokens": 2}, SamplingParams(repetition_penalty=1.2, min_tokens=2)),
        ({"stop_token_ids": [1, 2], "ignore_eos": True}, SamplingParams(stop_token_ids=(1, 2), ignore_eos=True)),
        (
            {"include_stop_str_in_output": True, "skip_special_tokens": False},
            SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False),
        ),
        ({"prediction": {"type": "content", "content": "ab"}}, SamplingParams(prediction=(97, 98))),
        (
            {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}] * 2}},
            SamplingParams(prediction=(97, 10, 97)),
        ),
        ({"logprobs": True}, SamplingParams(logprobs=0)),
        ({"logprobs": True, "top_logprobs": 3}, SamplingParams(logprobs=3)),
        ({"logprobs": False}, SamplingParams()),
    ],
)
def test_fields_become_sampling_parameters(fields: dict[str, Any], expected: SamplingParams) -> None:
    assert params_of(**fields) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"tools": []},
        {"tools": None, "tool_choice": "auto", "functions": [], "function_call": "none"},
        {"response_format": {"type": "text"}},
        {"parallel_tool_calls": False},
        {"store": False, "metadata": {"a": "b"}, "user": "u"},
        {"service_tier": "auto"},
        {"service_tier": "default", "modalities": ["text"], "verbosity": "medium"},
        {"audio": None, "prediction": None, "reasoning_effort": None},
        {"safety_identifier": "s"},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(fields: dict[str, Any]) -> None:
    assert params_of(**fields) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("use_beam_search", True),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(field: str, value: Any) -> None:
    response = chat(ScriptedEngine(), **{field: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == field
    assert field in error["message"] and "not supported" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
    ],
)
def test_what_a_completion_cannot_have_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    response = complete(ScriptedEngine(), **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert complete(ScriptedEngine(), n=1, best_of=1, echo=False, suffix=None).status_code == 200


def test_a_suffix_makes_a_prompt_of_the_text_before_and_behind_the_gap() -> None:
    engine = ScriptedEngine()
    engine.tokenizer.fill_in_middle = FillInMiddle((1,), 2, 3, 4)
    assert complete(engine, prompt="ab", suffix="c").status_code == 200
    assert complete(engine, prompt=[7, 8], suffix="c").status_code == 200
    assert [sent.prompt for sent in engine.submitted] == [[1, 2, 97, 98, 3, 99, 4], [1, 2, 7, 8, 3, 99, 4]]
    assert error_of(complete(engine, suffix="c", echo=True))["param"] == "suffix"


def test_numbers_of_errors_are_written_in_full() -> None:
    for fields in ({"max_tokens": 10**10}, {"top_k": 10**10}, {"temperature": 1e10}):
        message = error_of(chat(ScriptedEngine(), **fields))["message"]
        assert "is 10000000000;" in message and "e+" not in message
    assert "at most 2147483647" in error_of(chat(ScriptedEngine(), max_tokens=10**10))["message"]
    assert "is 0.00001;" in error_of(chat(ScriptedEngine(), repetition_penalty=-1e-5))["message"].replace("-", "")


@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_field_is_refused_with_the_nearest(value: Any) -> None:
    response = chat(ScriptedEngine(), temprature=value)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "other", "content": "a"}}, "prediction.type"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 1}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "stream_options.include_usag"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [TOOL | {"custom": {"name": "x"}}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}]},
            "tools[0].custom.format",
        ),
        ({"tools": [TOOL | {"type": "wed_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1001}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(fields: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    response = chat(engine, **fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.submitted


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    for path in (CHAT, COMPLETIONS):
        response = request(ScriptedEngine(), "POST", path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert "body" in error_of(response)["message"]


def test_an_unknown_model_is_not_found() -> None:
    for response in (chat(ScriptedEngine(), model="other"), complete(ScriptedEngine(), model="other")):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "model_not_found"
        assert "'scripted'" in error["message"]


def test_messages_reach_the_template() -> None:
    engine = ScriptedEngine()
    response = chat(
        engine,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None},
            {"role": "tool", "content": "d", "tool_call_id": "t1"},
        ],
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert response.status_code == 200, response.text
    assert engine.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d", "tool_call_id": "t1"},
    ]
    assert engine.template_variables == {"enable_thinking": False}
    assert engine.add_generation_prompt is False


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        (["ab"], [[97, 98]]),
        ([1, 2, 255], [[1, 2, 255]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ("x" * 5000, [[120] * 5000]),
    ],
)
def test_prompts_of_every_form(prompt: Any, expected: list[list[int]]) -> None:
    engine = ScriptedEngine()
    assert complete(engine, prompt=prompt, cache_salt="s").status_code == 200
    assert [submitted.prompt for submitted in engine.submitted] == expected
    assert engine.submitted[0].params.max_tokens == 16, "OpenAI's default"
    assert engine.submitted[0].cache_salt == "s"


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], [1, "a"], ["a", [1]], [256], [-1], [[1], [256]], [True], [1.5], 5, ["a"] * 129]
)
def test_prompts_of_no_form_are_refused(prompt: Any) -> None:
    engine = ScriptedEngine()
    response = complete(engine, prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    assert not engine.submitted


def test_a_long_body_is_parsed_like_a_short_one() -> None:
    engine = ScriptedEngine()
    assert post(engine, COMPLETIONS, PROMPT | {"prompt": "y" * 100_000}).status_code == 200
    response = post(engine, CHAT, HELLO | {"user": "y" * 100_000, "topk": 1})
    assert error_of(response)["param"] == "topk"
