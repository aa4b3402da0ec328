"""Fields that are accepted and change nothing: docs/API.md has one table of them, and the code has no others.

Requests that fill every field of every schema go through every endpoint. What the code never reads of them is without
effect, and must be in the table; what is in the table is sent alone, and must leave the work as it was.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from msgspec.structs import replace

from tests.api.grpc.calls import door
from tests.api.http import request
from tests.api.says import SCHEMA, model_that_says
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Submitted, with_logprobs
from weft.api.grpc.ai_service_pb2 import DESCRIPTOR, StreamMetadata, StreamPredictRequest
from weft.api.grpc.image import OPTIONAL
from weft.api.grpc.prediction import PARAMETERS
from weft.api.openai.openai_schema import Fields, SamplingFields
from weft.config import load
from weft.serving.served_model import ServedModel
from weft.text.grammars.specs import GrammarSpec
from weft.types import LoadLora

ROOT = Path(__file__).parents[2]
Key = tuple[str, str]
"""A schema, or what the table calls an endpoint, and a field of it."""
BY_BEING_THERE = {("StructuredOutputs", "json_object")}
"""It is what is asked for where none of the others is."""

CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": "{}"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True},
}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["x"], "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {"65": 1.0}, "user": "u", "top_k": 5, "min_p": 0.1,
    "repetition_penalty": 1.1, "stop_token_ids": [7], "min_tokens": 1, "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "return_timings": True, "truncate_prompt_tokens": 50, "priority": 1,
    "cache_salt": "s", "adapter": "red", "request_id": "mine",
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "assistant", "content": "a", "reasoning": "r"},
    {"role": "tool", "content": "t", "tool_call_id": "1"},
]
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TEXT = {"type": "text", "text": "t", **CACHED}
COUNTED: dict[str, Any] = {
    "model": "scripted",
    "system": [TEXT],
    "messages": [
        {"role": "user", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}, **CACHED},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [TEXT], "is_error": True, **CACHED}],
        },
    ],
    "tools": [
        {"type": "custom", "name": "weather", "description": "d", "input_schema": SCHEMA, "strict": True, **CACHED}
    ],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    **CACHED,
}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "t"}], "id": "i", "status": "completed"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
    {
        "type": "reasoning", "id": "i", "status": "completed", "summary": [{"type": "summary_text", "text": "t"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
    },
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}", "id": "i", "status": "completed"},
    {"type": "function_call_output", "call_id": "1", "output": "o", "id": "i", "status": "completed"},
]  # fmt: skip
JSON = {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}
TENSOR = {"data": base64.b64encode(bytes(16)).decode(), "shape": [2, 2], "dtype": "float32", "sha256": ""}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: dict[str, dict[str, Any]] = {
    CHAT: {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "scripted", "prompt": "hi"},
    "/v1/messages": {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "scripted", "input": "hi"},
    "/v1/embeddings": {"model": "scripted", "input": "hi"},
    "/v1/images/generations": {"prompt": "hi"},
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": 'start: "a"'}, {"json_object": True}
]  # fmt: skip
COMPARED = {"model": "scripted", "truncate_prompt_tokens": 5, "priority": 1, "cache_salt": "s"}
FULL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SAMPLING | {"messages": MESSAGES, "max_tokens": 9}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CHAT, {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1}),
    (CHAT, {"prediction": {"type": "content", "content": "hi there"}}),
    (CHAT, {"metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"}),
    (CHAT, {"parallel_tool_calls": False, "include_reasoning": False, "add_generation_prompt": True}),
    (CHAT, {"messages": MESSAGES[:4], "continue_final_message": True, "chat_template_kwargs": {"a": 1}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": JSON}}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (COMPLETIONS, SAMPLING | {"max_tokens": 9, "best_of": 2}),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt_embeds": TENSOR}),
    *((COMPLETIONS, {"structured_outputs": form}) for form in FORMS),
    (
        "/v1/messages",
        COUNTED
        | {
            "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True, "seed": 1,
            "metadata": {"user_id": "u"}, "service_tier": "auto", "priority": 1, "cache_salt": "s",
        },
    ),
    ("/v1/messages", {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/messages", {"tools": COUNTED["tools"], "tool_choice": {"type": "any"}}),
    ("/v1/messages/count_tokens", COUNTED),
    (
        RESPONSES,
        {
            "input": ITEMS, "instructions": "i", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9,
            "tools": [{"type": "function"} | TOOL["function"]],
            "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "store": False,
            "include": ["reasoning.encrypted_content"], "truncation": "auto", "metadata": {"a": "b"}, "user": "u",
            "prompt_cache_key": "k", "safety_identifier": "s", "top_k": 5, "seed": 1, "priority": 1, "cache_salt": "s",
            "stream": True, "stream_options": {},
        },
    ),
    (RESPONSES, {"input": ITEMS, "text": {"format": {"type": "json_schema", **JSON}}, "reasoning": {"effort": "low"}}),
    (
        "/v1/embeddings",
        {
            "encoding_format": "base64", "dimensions": 2, "user": "u", "pooling": "last", "truncate_prompt_tokens": 5,
            "add_special_tokens": False, "priority": 1, "cache_salt": "s",
        },
    ),
    (
        "/v1/images/generations",
        {
            "model": "painter", "n": 2, "size": "4x2", "response_format": "b64_json", "output_format": "png",
            "stream": True, "partial_images": 1, "user": "u", "safety_identifier": "s", "seed": 1,
            "num_inference_steps": 3, "guidance_scale": 2.0, "negative_prompt": "n", "sampler": "heun", "priority": 1,
            "cache_salt": "s",
        },
    ),
    (
        "/v1/images/generations",
        {
            "prompt": None, "prompt_embeds": TENSOR,
            "additional_information": {"entries": {"negative_prompt_embeds": {"tensor": TENSOR}}},
        },
    ),
    ("/tokenize", {"prompt": "hi", "model": "scripted", "add_special_tokens": False, "return_token_strs": True}),
    (
        "/tokenize",
        {
            "messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": False, "chat_template_kwargs": {"a": 1},
            "return_token_strs": True,
        },
    ),
    ("/detokenize", {"model": "scripted", "tokens": [65]}),
    ("/v1/score", COMPARED | {"text_1": "a", "text_2": ["b"]}),
    ("/v1/rerank", COMPARED | {"query": "a", "documents": ["b"], "top_n": 1, "return_documents": False}),
    (RESPONSES, {"background": True}),
]  # fmt: skip
PATHS = {
    "chat": CHAT, "completions": COMPLETIONS, "messages": "/v1/messages", "responses": RESPONSES,
    "embeddings": "/v1/embeddings", "images": "/v1/images/generations",
}  # fmt: skip


def thinking(**fields: Any) -> dict[str, Any]:
    """A conversation in which the assistant has thought, and these fields of the thought."""
    said = [{"type": "thinking", "thinking": "t", **fields}, {"type": "text", "text": "t"}]
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": said}, {"role": "user", "content": "u"}]
    return {"messages": turns}


def shaped(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, **fields}}}


def redacted(data: str) -> dict[str, Any]:
    said = [{"type": "redacted_thinking", "data": data}, {"type": "text", "text": "t"}]
    return {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": said}]}


ASKED = {"role": "user", "content": "u"}
NESTED: dict[Key, tuple[dict[str, Any], dict[str, Any]]] = {
    ("chat", "index"): (
        {"messages": [ASKED, MESSAGES[2], MESSAGES[4]]},
        {"messages": [ASKED, MESSAGES[2] | {"tool_calls": [CALL | {"index": None}]}, MESSAGES[4]]},
    ),
    ("chat", "name"): (shaped(name="n"), shaped()),
    ("chat", "description"): (shaped(description="d"), shaped()),
    ("chat", "strict"): (shaped(strict=False), shaped()),
    ("messages", "cache_control"): (
        {"system": [TEXT], **CACHED},
        {"system": [{"type": "text", "text": "t"}]},
    ),
    ("messages", "ttl"): (CACHED, {"cache_control": {"type": "ephemeral"}}),
    ("messages", "user_id"): ({"metadata": {"user_id": "u"}}, {}),
    ("messages", "budget_tokens"): (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 1}},
    ),
    ("messages", "signature"): (thinking(signature="s"), thinking()),
    ("messages", "data"): (redacted("d"), redacted("")),
    ("responses", "stream_options"): ({"stream": True, "stream_options": {}}, {"stream": True}),
}
"""Where a field is not the request's own, or needs another: a request with it, and one without."""
ALLOWING = load({"allow_prompt_embeds": True}, env={})


def engine_for(path: str, body: Mapping[str, Any]) -> ScriptedEngine:
    if "logprobs" in body or "prompt_logprobs" in body:
        engine = ScriptedEngine(with_logprobs("ab"))
    else:
        engine = model_that_says("ab")
    engine.model = replace(engine.model, images=PAINTER, embeds_width=2)
    asyncio.run(engine.control(LoadLora("red", "/loras/red")))
    return engine


async def grammar_of(service: ServedModel, spec: GrammarSpec | None, thinking: object = None) -> str:
    """The scripted tokenizer is none that grammars can be compiled for."""
    return "" if spec is None else repr(spec)


def send(path: str, body: Mapping[str, Any]) -> tuple[ScriptedEngine, httpx.Response]:
    engine = engine_for(path, body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedModel, "grammar_of", grammar_of)
        return engine, request(engine, "POST", path, ALLOWING, json=HI.get(path, {}) | {**body})


def schemas(base: type[Fields] = Fields) -> Iterator[type[Fields]]:
    for schema in base.__subclasses__():
        # Those of batches need a file: tests/api/openai/test_batches.py.
        if not schema.__module__.startswith(("weft.api.admin", "weft.api.openai.batches")):
            yield schema
        yield from schemas(schema)


def endpoint_of(schema: type[Fields]) -> str:
    """What the table calls the requests that a schema is of, or a part of."""
    module = schema.__module__.rpartition(".")[2].removesuffix("_schema")
    own = {"CompletionRequest": "completions", "TokenizeRequest": "tokenize", "DetokenizeRequest": "detokenize"}
    return own.get(schema.__name__, "chat") if module == "openai" else module


def has_one_value(annotation: Any) -> bool:
    return get_origin(annotation) is Literal and len(get_args(annotation)) == 1


@pytest.fixture(scope="module")
def fields() -> set[Key]:
    """Every field that a client can set to something."""
    return {
        (schema.__name__, name)
        for schema in schemas()
        if schema is not SamplingFields
        for name, field in schema.model_fields.items()
        if not has_one_value(field.annotation)
    }


@pytest.fixture(scope="module")
def read() -> set[Key]:
    """Every field that the code reads while it answers the full requests."""
    found: set[Key] = set()
    plain = Fields.__getattribute__

    def noting(self: Fields, name: str) -> Any:
        caller = sys._getframe(1)
        is_validator = caller.f_locals.get("self") is self
        if caller.f_globals["__name__"].startswith("weft.api") and not is_validator and name in type(self).model_fields:
            found.add((type(self).__name__, name))
        return plain(self, name)

    def dumping(self: Fields, **options: Any) -> dict[str, Any]:
        dumped = Fields.__base__.model_dump(self, **options)  # type: ignore[union-attr]
        note_dumped(self, dumped)
        return dumped

    def note_dumped(part: Fields, dumped: dict[str, Any]) -> None:
        for name, field in type(part).model_fields.items():
            if name in dumped or field.alias in dumped:
                found.add((type(part).__name__, name))
                if isinstance(value := plain(part, name), Fields):
                    note_dumped(value, dumped[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fields, "__getattribute__", noting)
        patch.setattr(Fields, "model_dump", dumping)
        for path, body in FULL:
            _, answered = send(path, body)
            assert answered.status_code == 200, (path, body, answered.text)
    return found


def table() -> set[Key]:
    page = (ROOT / "docs/API.md").read_text()
    section = page.split("\n## Fields without effect\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert rows and all(why for _, _, why in rows)
    return {
        (endpoint, name.split(".")[-1])
        for names, endpoints, _ in rows
        for name in re.findall(r"`([\w.]+)`", names)
        for endpoint in endpoints.split(", ")
    }


def endpoints(keys: set[Key]) -> set[Key]:
    """Fields by what the table calls their endpoints, not by their schemas."""
    names = {schema.__name__: schema for schema in schemas()}
    return {(endpoint_of(names[schema]), field) for schema, field in keys}


def test_the_table_has_every_field_that_the_code_never_reads_and_no_other(fields: set[Key], read: set[Key]) -> None:
    written = {(endpoint, field) for endpoint, field in table() if endpoint != "gRPC"}
    assert endpoints(fields - read - BY_BEING_THERE) == written


def test_the_table_has_every_field_of_grpc_that_the_code_never_reads_and_no_other() -> None:
    places = {
        "StreamPredictRequest": "request",
        "StreamMetadata": "request.metadata",
        "GenerationParameters": "request.generation",
        "GenerateImageRequest": "request",
    }
    trees = [ast.parse(file.read_text()) for file in (ROOT / "weft/api/grpc").glob("*.py")]
    read = {ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {f"request.{name}" for name in OPTIONAL} | {f"request.generation.{name}" for name in PARAMETERS}
    unread = {
        field.name
        for message, place in places.items()
        for field in DESCRIPTOR.message_types_by_name[message].fields
        if f"{place}.{field.name}" not in read
    }
    assert unread == {field for endpoint, field in table() if endpoint == "gRPC"}


def work_of(engine: ScriptedEngine) -> Any:
    """What the engine was asked to do, but for the ids of requests."""
    submitted = [replace(each, request_id="", sibling_of="") for each in engine.submitted]
    return submitted, engine.embedded, engine.drawn, engine.messages, engine.tools, engine.template_variables


@pytest.mark.parametrize(("endpoint", "field"), sorted(key for key in table() if key[0] != "gRPC"))
def test_a_field_of_the_table_is_accepted_and_leaves_the_work_as_it_was(endpoint: str, field: str) -> None:
    with_it, without = alone(endpoint, field)
    path = PATHS[endpoint]
    seeded = {} if endpoint == "embeddings" else {"seed": 1}
    (engine, answered), (plain, expected) = (send(path, body | seeded) for body in (with_it, without))
    assert answered.status_code == expected.status_code == 200, answered.text
    assert work_of(engine) == work_of(plain)


def alone(endpoint: str, field: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plainest request with the field, and without."""
    if (endpoint, field) in NESTED:
        return NESTED[endpoint, field]
    [value, *_] = [body[field] for path, body in FULL if path == PATHS[endpoint] and field in body]
    return {field: value}, {}


def test_what_grpc_ignores_is_accepted() -> None:
    async def go() -> list[Submitted]:
        engine = ScriptedEngine()
        async with door(engine) as client:
            for more in ({}, {"worker_hint": "w"}):
                about = {"tenant": "t", "player_id": "p", "locale": "l", "extra": {"a": "b"}} if more else {}
                asked = StreamPredictRequest(prompt="hi", metadata=StreamMetadata(trace_id="1", **about), **more)
                assert [response async for response in client.predict([asked])][-1].end_of_stream
        return engine.submitted

    plain, full = (replace(each, request_id="") for each in asyncio.run(go()))
    assert plain == full
