"""Fields are honoured, hints, impossible or unknown, and docs/API.md has the table that the code has.

Requests that fill every field of every schema go through every endpoint: what a schema has is read. What the table has
is sent alone: a hint leaves the work as it was and is named, what is impossible is refused.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from msgspec.structs import replace

from tests.api.grpc.calls import served
from tests.api.http import request, request_app
from tests.api.says import SCHEMA, STYLES, model_that_says
from tests.api.scripted_engine import PAINTER, ScriptedEngine, Submitted, with_logprobs
from weft.api.app import build_app
from weft.api.body import Fields
from weft.api.field_rules import RULES, rules_table
from weft.api.grpc.ai_service_pb2 import DESCRIPTOR, StreamMetadata, StreamPredictRequest
from weft.api.grpc.image import OPTIONAL
from weft.api.grpc.prediction import PARAMETERS
from weft.api.handler import FIELDS_HEADER
from weft.api.llamacpp.llamacpp_schema import LlamaSampling
from weft.api.ollama.ollama_schema import OllamaFields
from weft.api.openai.openai_schema import FunctionOrCustom, SamplingFields
from weft.config import load
from weft.options import Config
from weft.serving.served_model import ServedModel
from weft.text.grammars.specs import GrammarSpec
from weft.text.tokenizer import FillInMiddle
from weft.types import LoadLora

ROOT = Path(__file__).parents[2]
Key = tuple[str, str]
"""A schema, or what the table calls an endpoint, and a field of it."""
ABSTRACT = {SamplingFields, FunctionOrCustom, OllamaFields, LlamaSampling}
"""What other schemas have in common; no request is one."""
BY_BEING_THERE = {("StructuredOutputs", "json_object")}
"""It is what is asked for where none of the others is."""

CALL = {"id": "1", "type": "function", "index": 0, "function": {"name": "weather", "arguments": "{}"}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True},
}
GRAMMAR = {"definition": "a", "syntax": "regex"}
CUSTOM: dict[str, Any] = {"name": "patch", "description": "d", "format": {"type": "grammar", "grammar": GRAMMAR}}
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["x"], "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "logit_bias": {"65": 1.0}, "top_k": 5, "min_p": 0.1,
    "repetition_penalty": 1.1, "stop_token_ids": [7], "min_tokens": 1, "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "return_timings": True, "truncate_prompt_tokens": 50, "priority": 1,
    "cache_salt": "s", "prompt_cache_key": "k", "adapter": "red", "request_id": "mine",
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": "n"},
    {"role": "user", "content": [{"type": "text", "text": "u"}]},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "assistant", "content": "a", "reasoning": "r"},
    {"role": "tool", "content": "t", "tool_call_id": "1"},
]
OLD_MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "function_call": {"name": "weather", "arguments": "{}"}},
    {"role": "function", "content": "t", "name": "weather"},
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
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t", "logprobs": []}]},
    {
        "type": "reasoning", "id": "i", "status": "completed", "summary": [{"type": "summary_text", "text": "t"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
    },
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}", "id": "i", "status": "completed"},
    {"type": "function_call_output", "call_id": "1", "output": "o", "id": "i", "status": "completed"},
    {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "i", "namespace": None, "id": "i",
     "status": "completed"},
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
FILE = {"filename": "f", "text": "t"}
OPTIONS = {
    "num_predict": 9, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1, "stop": ["x"],
    "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
}  # fmt: skip
OLLAMA_MESSAGES = [
    {"role": "user", "content": "u"},
    {
        "role": "assistant", "thinking": "t",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    },
    {"role": "tool", "content": "c", "tool_name": "weather", "tool_call_id": "1"},
]  # fmt: skip
LLAMA_SAMPLING = {name: value for name, value in OPTIONS.items() if name != "num_predict"} | {
    "n_predict": 9, "max_tokens": 9, "stream": True, "logit_bias": [[65, 1.0]], "n_probs": 1, "json_schema": SCHEMA,
    "return_tokens": True, "ignore_eos": False,
}  # fmt: skip
LLAMA_PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"prompt": "p"}),
    ("/infill", {"input_prefix": "p", "input_suffix": "s", "prompt": "b", "input_extra": [FILE]}),
]
OTHER_SERVERS: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": OLLAMA_MESSAGES, "tools": [TOOL], "options": OPTIONS, "stream": False, "think": True}),
    ("/api/chat", {"messages": OLLAMA_MESSAGES[:1], "format": SCHEMA, "logprobs": True, "top_logprobs": 1}),
    ("/api/generate", {"prompt": "p", "system": "s", "raw": False, "format": "json", "think": True,
                       "logprobs": True, "top_logprobs": 1, "options": OPTIONS}),
    ("/api/generate", {"prompt": "p", "suffix": "s"}),
    ("/api/embed", {"input": ["hi"], "truncate": True, "dimensions": 2}),
    ("/api/embeddings", {"prompt": "hi"}),
    ("/api/show", {"name": "scripted", "model": ""}),
    ("/api/pull", {"stream": False}),
    *((path, LLAMA_SAMPLING | body) for path, body in LLAMA_PROMPTS),
    ("/completion", {"prompt": "p", "grammar": 'root ::= "a"', "n_predict": 9}),
    ("/infill", {"input_suffix": "s", "grammar": "g"}),
    ("/apply-template", {"messages": MESSAGES[:2], "tools": [TOOL], "add_generation_prompt": True,
                         "chat_template_kwargs": {"a": 1}}),
    ("/tokenize?", {"content": "hi", "add_special": True, "with_pieces": True}),
    ("/tokenize?", {"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize?", {"messages": MESSAGES, "tools": [TOOL], "add_generation_prompt": False,
                    "chat_template_kwargs": {"a": 1}}),
]  # fmt: skip
OTHER_PATHS = {path for path, _ in OTHER_SERVERS}
COMPARED = {"model": "scripted", "truncate_prompt_tokens": 5, "priority": 1, "cache_salt": "s"}
FULL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, SAMPLING | {"messages": MESSAGES, "max_tokens": 9}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (
        CHAT,
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "patch", "input": "i"}}]},
                {"role": "tool", "content": "t"},
            ],
            "tools": [{"type": "custom", "custom": CUSTOM}],
            "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        },
    ),
    (CHAT, {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1}),
    (CHAT, {"prediction": {"type": "content", "content": "hi there"}}),
    (CHAT, {"reasoning_effort": "low", "enable_thinking": True}),
    (CHAT, {"parallel_tool_calls": False, "include_reasoning": False, "add_generation_prompt": True}),
    (CHAT, {"messages": MESSAGES[:4], "continue_final_message": True, "chat_template_kwargs": {"a": 1}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": JSON}}),
    (CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}),
    (CHAT, {"response_format": {"type": "json_object", "value": SCHEMA}}),
    (CHAT, {"functions": [TOOL["function"]], "function_call": {"name": "weather"}, "messages": OLD_MESSAGES}),
    (
        CHAT,
        {
            "tools": [TOOL],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "weather"}}]},
            },
        },
    ),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (COMPLETIONS, SAMPLING | {"max_tokens": 9, "best_of": 2}),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt_embeds": TENSOR}),
    (COMPLETIONS, {"suffix": "end"}),
    *((COMPLETIONS, {"structured_outputs": form}) for form in FORMS),
    *((path, {f"guided_{name}": form[name]}) for path in (CHAT, COMPLETIONS) for form in FORMS[:4] for name in form),
    (
        "/v1/messages",
        COUNTED
        | {
            "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True, "seed": 1,
            "priority": 1, "cache_salt": "s", "metadata": {"user_id": "u", "team": "t"},
        },
    ),
    ("/v1/messages", {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/messages", {"tools": COUNTED["tools"], "tool_choice": {"type": "any"}}),
    ("/v1/messages/count_tokens", COUNTED),
    (
        RESPONSES,
        {
            "input": ITEMS, "instructions": "i", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9,
            "tools": [{"type": "function", "namespace": None} | TOOL["function"]],
            "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False, "store": False,
            "include": ["reasoning.encrypted_content"], "truncation": "auto", "metadata": {"a": "b"}, "user": "u",
            "top_k": 5, "seed": 1, "priority": 1, "cache_salt": "s", "prompt_cache_key": "k", "stream": True,
        },
    ),
    (
        RESPONSES,
        {
            "top_logprobs": 1, "include": ["message.output_text.logprobs"], "max_tool_calls": 1,
            "tools": [{"type": "function"} | TOOL["function"]],
            "tool_choice": {
                "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]
            },
        },
    ),
    (RESPONSES, {"input": ITEMS, "text": {"format": {"type": "json_schema", **JSON}}, "reasoning": {"effort": "low"}}),
    (
        RESPONSES,
        {
            "tools": [{"type": "custom", **CUSTOM, "format": {"type": "grammar", **GRAMMAR}}],
            "tool_choice": {"type": "custom", "name": "patch"},
        },
    ),
    (
        "/v1/embeddings",
        {
            "encoding_format": "base64", "dimensions": 2, "pooling": "last", "truncate_prompt_tokens": 5,
            "add_special_tokens": False, "priority": 1, "cache_salt": "s",
        },
    ),
    (
        "/v1/images/generations",
        {
            "model": "painter", "n": 2, "size": "4x2", "response_format": "b64_json", "output_format": "png",
            "stream": True, "partial_images": 1, "seed": 1,
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
    *((path, {"model": "scripted"} | body) for path, body in OTHER_SERVERS),
    ("/v1/score", COMPARED | {"text_1": "a", "text_2": ["b"]}),
    ("/v1/rerank", COMPARED | {"query": "a", "documents": ["b"], "top_n": 1, "return_documents": False}),
    (RESPONSES, {"background": True}),
]  # fmt: skip
PATHS = {
    "chat": CHAT, "completions": COMPLETIONS, "messages": "/v1/messages", "responses": RESPONSES,
    "embeddings": "/v1/embeddings", "images": "/v1/images/generations",
}  # fmt: skip


ALLOWING = load({"allow_prompt_embeds": True}, env={})
STRICT = load({"fields": "strict"}, env={})
TOLERANT = load({"fields": "tolerant"}, env={})
LIKE_OTHERS = load({"compat_api": ["ollama", "llamacpp"]}, env={})
PAGE = (ROOT / "docs/API.md").read_text()


def engine_for(path: str, body: Mapping[str, Any]) -> ScriptedEngine:
    if not {"logprobs", "prompt_logprobs", "top_logprobs", "n_probs"}.isdisjoint(body):
        engine = ScriptedEngine(with_logprobs("ab"))
        engine.styles = STYLES
    else:
        engine = model_that_says("ab")
    engine.tokenizer.fim_ids = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<file_sep>": 4}
    engine.model = replace(engine.model, images=PAINTER, embeds_width=2)
    engine.tokenizer.fill_in_middle = FillInMiddle((), 1, 2, 3)
    asyncio.run(engine.control(LoadLora("red", "/loras/red")))
    return engine


async def grammar_of(service: ServedModel, spec: GrammarSpec | None, thinking: object = None) -> str:
    """The scripted tokenizer is none that grammars can be compiled for."""
    return "" if spec is None else repr(spec)


def send(path: str, body: Mapping[str, Any], config: Config = ALLOWING) -> tuple[ScriptedEngine, httpx.Response]:
    engine = engine_for(path, body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedModel, "grammar_of", grammar_of)
        return engine, request(
            engine, "POST", path, LIKE_OTHERS if path in OTHER_PATHS else config, json=HI.get(path, {}) | {**body}
        )


def send_each(
    path: str, bodies: Sequence[Mapping[str, Any]], config: Config = ALLOWING
) -> list[tuple[Any, httpx.Response]]:
    """Send each to one application. With the answer comes what the engine was asked to do."""
    engine = engine_for(path, {})
    app = build_app(engine, config)

    async def go() -> list[tuple[Any, httpx.Response]]:
        replies = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for body in bodies:
                engine.submitted.clear(), engine.embedded.clear(), engine.drawn.clear()
                answered = await client.post(path, json=HI[path] | {**body})
                replies.append((work_of(engine), answered))
        return replies

    return asyncio.run(go())


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
        if schema not in ABSTRACT
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


LABELS = {("JsonSchema", "name"), ("JsonSchema", "strict")}
"""Fields of schemas that ask for nothing: a name, and what is so anyway, that an answer fits its schema."""


def test_the_code_reads_every_field_of_the_schemas(fields: set[Key], read: set[Key]) -> None:
    assert fields - read - BY_BEING_THERE == LABELS


def test_the_page_has_the_table_of_the_code() -> None:
    assert f"\n{rules_table()}\n" in PAGE


def test_every_place_of_the_table_is_one_of_a_schema() -> None:
    places = {schema.place for schema in schemas() if schema.place}
    assert places | {"chat.messages.content", "grpc.metadata"} == RULES.keys()


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
    assert unread == {*RULES["grpc.metadata"]}


def work_of(engine: ScriptedEngine) -> Any:
    """What the engine was asked to do, but for the ids of requests."""
    submitted = [replace(each, request_id="", sibling_of="") for each in engine.submitted]
    return submitted, engine.embedded, engine.drawn, engine.messages, engine.tools, engine.template_variables


ASKING = {"asks": "for something"}
"""A value that no rule lets through."""


@pytest.mark.parametrize("interface", PATHS)
def test_a_hint_is_accepted_and_named_and_leaves_the_work_as_it_was(interface: str) -> None:
    path, rules = PATHS[interface], {name: rule for name, rule in RULES[interface].items() if rule.possible}
    seeded = {} if interface == "embeddings" else {"seed": 1}
    (plain, _), *others = send_each(path, [seeded, *(seeded | {name: ASKING} for name in rules)])
    for field, (work, answered) in zip(rules, others, strict=True):
        assert answered.status_code == 200, (field, answered.text)
        assert answered.headers[FIELDS_HEADER] == field
        assert work == plain
    quiet = [{name: value} for name, rule in rules.items() for value in (None, *rule.neutral)]
    for body, (_, answered) in zip(quiet, send_each(path, quiet), strict=True):
        assert answered.status_code == 200 and FIELDS_HEADER not in answered.headers, (body, answered.text)
    for field, (_, answered) in zip(rules, send_each(path, [{name: ASKING} for name in rules], STRICT), strict=True):
        assert answered.status_code == 400 and field in answered.json()["error"]["message"], field


@pytest.mark.parametrize("interface", PATHS)
def test_what_is_impossible_is_refused_by_name(interface: str) -> None:
    path, rules = PATHS[interface], {name: rule for name, rule in RULES[interface].items() if not rule.possible}
    asked = [{name: ASKING} for name in rules]
    for field, (_, answered) in zip(rules, send_each(path, asked, TOLERANT), strict=True):
        assert answered.status_code == 400 and field in answered.json()["error"]["message"], field
    quiet = [{name: value} for name, rule in rules.items() for value in (None, *rule.neutral)]
    for body, (_, answered) in zip(quiet, send_each(path, quiet), strict=True):
        assert answered.status_code == 200, (body, answered.text)


def test_tolerant_takes_unknown_fields_for_hints() -> None:
    _, answered = send(CHAT, {"temprature": 1, "a\nb": 2}, TOLERANT)
    assert answered.status_code == 200 and answered.headers[FIELDS_HEADER] == "temprature"
    assert send(CHAT, {"temprature": 1})[1].status_code == 400


def test_hints_below_the_request_are_named_with_their_place() -> None:
    parts = [{"type": "text", "text": "a", **CACHED}]
    said = {"role": "assistant", "content": parts, "annotations": [1], "refusal": "r"}
    _, answered = send(CHAT, {"messages": [said, {"role": "user", "content": "u"}], "user": "u"})
    named = {*answered.headers[FIELDS_HEADER].split(", ")}
    assert named == {"user", "messages.content.cache_control", "messages.annotations", "messages.refusal"}
    about = {"metadata": {"user_id": "u", "team": "t"}, "context_management": {"edits": []}}
    _, answered = send("/v1/messages", {"system": [TEXT], **about})
    named = {*answered.headers[FIELDS_HEADER].split(", ")}
    assert named == {"context_management", "messages.content.cache_control"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": JSON}},
            "response_format.json_schema.description",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **JSON}}}, "text.format.description"),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, "include"),
    ],
)
def test_what_is_not_told_the_model_or_never_given_is_named(path: str, body: dict[str, Any], named: str) -> None:
    _, answered = send(path, body)
    assert answered.status_code == 200 and answered.headers[FIELDS_HEADER] == named, answered.text
    assert send(path, body, STRICT)[1].status_code == 400


def test_fields_without_effect_are_counted() -> None:
    app = build_app(model_that_says("ab"), ALLOWING)
    for _ in range(2):
        request_app(app, "POST", CHAT, json=HI[CHAT] | {"user": "u", "service_tier": "flex"})
    text = request_app(app, "GET", "/metrics").text
    assert 'weft_fields_without_effect_total{field="chat.user",model_name="scripted"} 2.0' in text


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        (CHAT, [{"type": "web_search"}, TOOL]),
        (RESPONSES, [{"type": "web_search_preview_2025_03_11"}, {"type": "function"} | TOOL["function"]]),
        ("/v1/messages", [{"type": "web_search_20250305", "name": "web_search"}, *COUNTED["tools"]]),
    ],
)
def test_a_tool_that_only_its_vendor_runs_is_not_offered(path: str, tools: list[dict[str, Any]]) -> None:
    engine, answered = send(path, {"tools": tools})
    assert answered.status_code == 200, answered.text
    assert f"tools.{tools[0]['type']}" in answered.headers[FIELDS_HEADER]
    assert engine.tools is not None and [tool["function"]["name"] for tool in engine.tools] == ["weather"]
    assert send(path, {"tools": tools}, STRICT)[1].status_code == 400
    assert send(path, {"tools": [{"type": "wether"}, *tools]})[1].status_code == 400


def test_more_tokens_than_the_context_holds_are_cut_to_what_fits() -> None:
    for path, field in ((CHAT, "max_tokens"), (RESPONSES, "max_output_tokens"), ("/v1/messages", "max_tokens")):
        engine, answered = send(path, {field: 10**6})
        assert answered.status_code == 200 and answered.headers[FIELDS_HEADER] == field
        [asked] = engine.submitted
        assert asked.params.max_tokens == engine.model.max_model_len - len(asked.prompt)
        kept, _ = send(path, {field: 10**6}, STRICT)
        assert kept.submitted[0].params.max_tokens == 10**6, "the engine itself refuses it"


def test_a_prediction_is_a_hint_where_the_engine_drafts_nothing_from_it() -> None:
    engine, body = ScriptedEngine(), HI[CHAT] | {"prediction": {"type": "content", "content": "ab"}}
    engine.abilities = replace(engine.abilities, prediction=False)
    answered = request(engine, "POST", CHAT, json=body)
    assert answered.status_code == 200 and answered.headers[FIELDS_HEADER] == "prediction"
    assert not engine.submitted[0].params.prediction
    assert request(engine, "POST", CHAT, STRICT, json=body).status_code == 400


def test_a_request_that_names_no_model_means_the_only_one() -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, "/v1/messages", "/v1/embeddings"):
        _, answered = send(path, {"model": None})
        assert answered.status_code == 200 and answered.json()["model"] == "scripted", answered.text


def test_what_grpc_ignores_is_accepted_and_named() -> None:
    async def go() -> list[Submitted]:
        engine = ScriptedEngine()
        async with served(engine) as client:
            for about in ({}, {"tenant": "t", "player_id": "p", "locale": "l", "extra": {"a": "b"}}):
                asked = StreamPredictRequest(prompt="hi", metadata=StreamMetadata(trace_id="1", **about))
                *_, last = [response async for response in client.predict([asked])]
                named = [f"metadata.{name}" for name in about]
                assert last.end_of_stream and [*last.fields_without_effect] == named
        return engine.submitted

    plain, full = (replace(each, request_id="") for each in asyncio.run(go()))
    assert plain == full
