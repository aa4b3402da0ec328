"""Requests that no client should send, over HTTP: every parameter of every route alone with values that it cannot have,
every pair of parameters together with values that it might, and bodies that were cut off or changed on the way.

The parameters are read from the description that the server gives of itself, so that a new one is in at once.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import zstandard
from msgspec import Struct

from tests.e2e.tiny_server import ADMIN_KEY, NAME
from tests.tiny_models import SPECIAL_TOKENS

Json = Any

BASES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {
        "model": NAME, "messages": [{"role": "user", "content": "over"}], "max_tokens": 3, "seed": 1,
    },
    "/v1/completions": {"model": NAME, "prompt": "over", "max_tokens": 3, "seed": 1},
    "/v1/images/generations": {"prompt": "over", "num_inference_steps": 2, "seed": 1},
    "/v1/messages": {"model": NAME, "messages": [{"role": "user", "content": "over"}], "max_tokens": 3, "seed": 1},
    "/v1/messages/count_tokens": {"model": NAME, "messages": [{"role": "user", "content": "over"}]},
    "/v1/responses": {"model": NAME, "input": "over", "max_output_tokens": 3, "seed": 1},
    "/v1/embeddings": {"model": NAME, "input": "over"},
    "/tokenize": {"model": NAME, "prompt": "over"},
    "/detokenize": {"model": NAME, "tokens": [40, 41]},
    "/v1/score": {"model": NAME, "text_1": "over", "text_2": ["under"]},
    "/v1/rerank": {"model": NAME, "query": "over", "documents": ["under", "over"]},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {"model": NAME}}]},
}  # fmt: skip
"""The least that each route takes."""

OPERATORS: dict[str, dict[str, Json]] = {
    "/admin/abort": {"request_id": "none"},
    "/admin/lora/load": {"lora_name": "a", "lora_path": "a"},
    "/admin/lora/unload": {"lora_name": "a"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/admin/models/load": {"model": "a"},
    "/admin/models/unload": {"model": "a"},
    "/admin/models/reload": {"model": "a"},
}
"""The same of the operator's routes, which the description leaves out."""
FOR_OPERATORS = (("Authorization", f"Bearer {ADMIN_KEY}"),)


def nested(depth: int, kind: type = list) -> Json:
    value: Json = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


HOSTILE: tuple[Json, ...] = (
    None, True, False, 0, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400,
    1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
    "", " ", "\0", "a\0b", "\ud800", "\udc00\ud800", "\ufeff\u202e", "1", "NaN", "x" * 200_000, "".join(SPECIAL_TOKENS),
    [], [[]], [None], [-1], [2**63], [1e308], [""], ["\0"], ["a", 1], [True], list(range(3000)),
    {}, {"": ""}, {"a": None}, {"type": "object"}, {"$ref": "#"}, {"__class__": "x"}, {"-1": 1, "99999": 1e308},
    nested(60), nested(60, dict), nested(300),
)  # fmt: skip
"""For any parameter, whatever it is."""

_TOOL = {"type": "function", "function": {"name": "weave", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


def _tensor(rows: int, width: int, **changes: Json) -> Json:
    data = base64.b64encode(bytes(4 * rows * width)).decode()
    return {"data": data, "shape": [rows, width], "dtype": "float32", **changes}


LIKELY: dict[str, tuple[Json, ...]] = {
    "model": (NAME,),
    "messages": (
        [{"role": "user", "content": "".join(SPECIAL_TOKENS)}],
        [{"role": "user", "content": "under " * 200}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}],
        [{"role": "system", "content": ""}],
    ),
    "prompt": ("row", ["row", "row by row"], [1, 2, 0], [[40], [41, 42]], "".join(SPECIAL_TOKENS), [319] * 127),
    "input": ("row", ["row", "row by row"], [40, 41], [{"role": "user", "content": "row"}], [319] * 128),
    "tokens": ([0, 1, 2], [319], [320], []),
    "max_tokens": (1, 2, 0, 127, 2**31 - 1),
    "max_completion_tokens": (1, 3, 127),
    "max_output_tokens": (1, 3, 127),
    "min_tokens": (0, 2, 3, 4),
    "n": (1, 2, 5, 128),
    "best_of": (1, 2),
    "temperature": (0, 1e-9, 0.7, 100),
    "top_p": (1e-9, 0.5, 1),
    "min_p": (0, 1e-9, 1),
    "top_k": (-1, 0, 1, 319, 320, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-9, 1.5, 100),
    "logprobs": (True, 0, 5, 20, 21),
    "top_logprobs": (0, 5, 20, 21),
    "prompt_logprobs": (0, 3, 20),
    "seed": (0, -(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1, 2**63 - 1),
    "dimensions": (1, 96),
    "stop": ("e", ["a", "b"], ["x" * 256], ["\0"], ["a"] * 16),
    "stop_sequences": (["e"], ["a"] * 17),
    "stop_token_ids": ([0], list(range(320)), [320]),
    "logit_bias": ({"5": 100, "6": -100}, {str(i): -100 for i in range(320)}, {"320": 1}),
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}),
    "response_format": (
        {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    ),
    "structured_outputs": (
        {"regex": "(a+)+b"}, {"regex": "("}, {"choice": ["weft", "warp"]}, {"choice": []}, {"json": _SCHEMA},
        {"grammar": "start: \"a\" | \"b\""}, {"grammar": "start: nowhere"}, {"json": {"type": "nonsense"}},
        {"regex": "(x{1,1000}){1,1000}"},
    ),
    "text": ({"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, {"format": {"type": "text"}}),
    "output_config": ({"format": {"type": "json_schema", "schema": _SCHEMA}},),
    "tools": (
        [_TOOL], [_TOOL, _TOOL], [_TOOL] * 129, [{"type": "function", "name": "weave", "parameters": {}}],
        [{"name": "weave", "input_schema": {"type": "object"}}],
    ),
    "tool_choice": (
        "none", "auto", "required", {"type": "function", "function": {"name": "weave"}}, {"type": "any"},
        {"type": "tool", "name": "weave"}, {"type": "function", "name": "weave"},
        {"type": "function", "function": {"name": "absent"}},
    ),
    "chat_template_kwargs": (
        {"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"messages": []}, {"enable_thinking": True},
    ),
    "metadata": ({"a": "b"}, {"user_id": "x"}),
    "thinking": ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
    "system": ("over", [{"type": "text", "text": "over"}]),
    "truncate_prompt_tokens": (-1, 1, 127, 128, 129, 2**63),
    "previous_response_id": ("resp_0", "\0"),
    "cache_salt": ("a", "\0", "ü" * 256, "x" * 257),
    "request_id": ("a", "a/b"),
    "num_inference_steps": (1, 3, 20, 1001),
    "guidance_scale": (0, 1, 7.5, 50, 51),
    "partial_images": (0, 1, 20, 21),
    "size": ("auto", "8x8", "64x64", "99999x99999"),
    "sampler": ("euler", "heun"),
    "negative_prompt": ("", "under", "".join(SPECIAL_TOKENS), "x" * 4001),
    "prompt_embeds": (
        _tensor(1, 96), _tensor(24, 96), _tensor(25, 96), _tensor(1, 95), _tensor(1, 96, sha256="0"),
        _tensor(1, 96, shape=[-1, -96]), _tensor(1, 96, shape=[2**40, 2**40]), _tensor(1, 96, dtype="float16"),
        _tensor(1, 96, data=base64.b64encode(b"\xff" * 384).decode()), _tensor(1, 96, data="!"),
    ),
    "additional_information": (
        {"entries": {}}, {"entries": {"negative_prompt_embeds": {"tensor": _tensor(1, 96)}}},
        {"entries": {"negative_prompt_embeds": {"values": [1, 2.5, "a"]}}}, {"entries": {"absent": {"values": [1]}}},
        {"entries": {"negative_prompt_embeds": {"tensor": _tensor(1, 96), "values": [1]}}},
    ),
}  # fmt: skip
"""Values that get further in: right ones, those at a limit and those just behind it."""


class Asked(Struct, frozen=True):
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        headers = f" with {len(self.headers)} headers {str(self.headers)[:100]}" if self.headers else ""
        body = f" and {len(self.body)} bytes {self.body[:300]!r}" if self.body else ""
        return f"{self.method} {self.path[:200]}{headers}{body}"


def parameters_of(openapi: Json) -> dict[str, list[str]]:
    """The names of the parameters of every route that takes a body."""
    schemas = openapi["components"]["schemas"]
    found = {}
    for path, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            schema = content["application/json"]["schema"]
            found[path] = sorted(schemas[schema["$ref"].rpartition("/")[2]]["properties"])
    return found


def alone(parameters: dict[str, list[str]]) -> Iterator[Asked]:
    for path, names in parameters.items():
        for name in [*names, "no_such_field"]:
            for value in (*HOSTILE, *LIKELY.get(name, ())):
                yield _asked(path, {name: value})


def in_pairs(parameters: dict[str, list[str]], rng: random.Random) -> Iterator[Asked]:
    """Each pair of a route's parameters once, mostly with likely values."""
    for path, names in parameters.items():
        for first, second in itertools.combinations(names, 2):
            yield _asked(path, {first: _pick(first, rng), second: _pick(second, rng)})


def for_operators() -> Iterator[Asked]:
    for path, base in OPERATORS.items():
        for name in [*base, "no_such_field"]:
            for value in HOSTILE:
                yield Asked(path, json.dumps({**base, name: value}).encode(), headers=FOR_OPERATORS)


def corrupted(asked: Asked, rng: random.Random) -> Asked:
    """Change some of its bytes, or cut off its end."""
    body = bytearray(asked.body)
    if rng.random() < 0.5:
        del body[rng.randrange(len(body)) :]
    else:
        for _ in range(rng.choice((1, 2, 8))):
            body[rng.randrange(len(body))] = rng.randrange(256)
    return Asked(asked.path, bytes(body), asked.method, asked.headers)


ENCODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


def compressed(asked: Asked, encoding: str) -> Asked:
    headers = (*asked.headers, ("Content-Encoding", encoding))
    return Asked(asked.path, ENCODERS[encoding](asked.body), asked.method, headers)


def unreadable() -> Iterator[Asked]:
    """What is no request at all."""
    bodies: Sequence[bytes] = (
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0", b'"', b"{}" * 2, b'{"model": "tiny", "model": "tiny"}',
        b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000,
        b'{"seed": ' + b"1" * 5000 + b"}", b'{"model": "\\ud800"}', b'{"model": "\xed\xa0\x80"}',
    )  # fmt: skip
    for path in BASES:
        for body in bodies:
            yield Asked(path, body)


def _pick(name: str, rng: random.Random) -> Json:
    likely = LIKELY.get(name, (True, False))
    return rng.choice(HOSTILE if rng.random() < 0.1 else likely)


def _asked(path: str, fields: dict[str, Json]) -> Asked:
    return Asked(path, json.dumps({**BASES[path], **fields}).encode())
