"""How large the parts of a request may be: every refusal names the limit and its flag."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator

from tests.api import raw
from tests.api.grpc.calls import ask, failed, served
from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, error_of, real_server, request
from tests.api.scripted_engine import ScriptedEngine, answer
from tests.growth import check_linear
from weft.api import body as body_module
from weft.api import http_protocol
from weft.api.app import REQUESTS, build_app
from weft.api.body import CAPS, TooDeep, check_caps, check_keys, check_structure, parse, parse_body
from weft.api.openai.openai_schema import ChatRequest
from weft.config import load
from weft.errors import InvalidRequest
from weft.options import LimitOptions
from weft.serving.admission import Admission
from weft.types import Output

USER = {"role": "user", "content": "hi"}


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


JSON = st.recursive(
    st.none() | st.integers() | st.text('ab"\\[]{}é', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\[{', max_size=3), inner, max_size=3),
    max_leaves=30,
)


@given(JSON, st.booleans())
def test_the_depth_is_that_of_the_value_whatever_its_strings_hold(value: Any, ascii_only: bool) -> None:
    depth = depth_of(value)
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    check_structure(body, LimitOptions(max_json_depth=max(depth, 4)))
    nested = b"[" * 10 + body + b"]" * 10
    check_structure(nested, LimitOptions(max_json_depth=depth + 10))
    with pytest.raises(InvalidRequest, match="--max-json-depth"):
        check_structure(nested, LimitOptions(max_json_depth=depth + 9))


@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        (b"", b"["),
        (b"", b'{"a":'),
        (b"[" * 65 + b'"', b"\\"),
        (b"", b'"['),
        (b'["', b'\\"['),
        (b"", b"[]"),
        (b"", b" "),
    ],
    ids=["lists", "objects", "an endless escape", "strings", "escaped quotes", "side by side", "spaces"],
)
def test_the_structure_is_checked_in_linear_time(begin: bytes, repeated: bytes) -> None:
    """No number of values ends the check early."""
    limits = LimitOptions(max_json_values=1_000_000_000)

    def check(body: bytes) -> None:
        with suppress(TooDeep):
            check_structure(body, limits)

    check_linear(lambda n: begin + repeated * n, check, 30_000)


FEW = LimitOptions(max_json_values=1000)


@pytest.mark.parametrize(
    ("fits", "too_many"),
    [
        (json.dumps([1] * 999), json.dumps([1] * 1001)),
        (json.dumps(["a, b"] * 999), json.dumps(["a, b"] * 1001)),
        (json.dumps([[]] * 199), json.dumps([[]] * 200)),
        (json.dumps({str(n): n for n in range(199)}), json.dumps({str(n): n for n in range(201)})),
        (json.dumps([{"a": n} for n in range(99)]), json.dumps([{"a": n} for n in range(100)])),
    ],
    ids=["numbers", "strings", "lists", "names", "objects"],
)
def test_values_are_counted_before_they_are_parsed(fits: str, too_many: str) -> None:
    check_structure(fits.encode(), FEW)
    with pytest.raises(InvalidRequest, match="--max-json-values"):
        check_structure(too_many.encode(), FEW)


def test_what_stands_in_strings_is_not_counted_but_as_escapes() -> None:
    prose = 'Rows, columns: {a}, [b], "c"\n' * 10_000
    check_structure(json.dumps({"prompt": prose, "lists": [[]] * 100}).encode(), LimitOptions(max_json_values=30_000))
    check_structure(json.dumps("\n" * 500_000).encode(), LimitOptions())
    with pytest.raises(InvalidRequest, match="500001 escapes; at most 500000"):
        check_structure(json.dumps("\n" * 500_001).encode(), LimitOptions())


def test_a_client_s_largest_lists_of_token_ids_are_taken() -> None:
    check_structure(json.dumps({"input": [[12345] * 300] * 1000}).encode(), LimitOptions())


def test_a_long_key_is_refused_wherever_it_stands() -> None:
    for body in ({"k" * 1025: 1}, {"a": [{"b": {"k" * 1025: 1}}]}):
        with pytest.raises(InvalidRequest, match="1025 characters; at most 1024"):
            check_keys(body)
    check_keys({"k" * 1024: 1})


@pytest.mark.parametrize("nested", [b"[" * 100_000, b'{"messages":' * 1000, b"[" * 100_000 + b"]" * 100_000])
def test_deep_json_is_400_and_names_the_flag(nested: bytes) -> None:
    response = request(ScriptedEngine(), "POST", CHAT, content=nested, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "--max-json-depth" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("field", "most", "too_many", "flag"),
    [
        ("messages", [USER] * 3, [USER] * 4, "--max-messages"),
        ("tools", [{}] * 3, [{}] * 4, "--max-tools"),
        ("functions", [{}] * 3, [{}] * 4, "--max-tools"),
        ("prompt", ["a"] * 3, ["a"] * 4, "--max-prompts"),
        ("prompt", [[1]] * 3, [[1]] * 4, "--max-prompts"),
        ("prompt", list(range(100)), ["a"] * 4, "--max-prompts"),
        ("prompt", "abcdef", [["x"]] * 4, "--max-prompts"),
        ("input", ["a"] * 3, ["a"] * 4, "--max-messages"),
        ("n", 3, 4, "--max-n"),
        ("n", -1, 10**18, "--max-n"),
        ("best_of", 3, 4, "--max-n"),
        ("stop", ["a"] * 3, ["a"] * 4, "--max-stop"),
        ("stop_sequences", ["a"] * 3, ["a"] * 4, "--max-stop"),
        ("stop_token_ids", [1] * 3, [1] * 4, "--max-stop-token-ids"),
        ("logprobs", 3, 4, "--max-logprobs"),
        ("top_logprobs", 3, 4, "--max-logprobs"),
        ("prompt_logprobs", 3, 4, "--max-logprobs"),
        ("logit_bias", dict.fromkeys("abc", 1), dict.fromkeys("abcd", 1), "--max-logit-bias"),
    ],
)
def test_every_cap_holds_at_its_limit_and_not_above(field: str, most: Any, too_many: Any, flag: str) -> None:
    names = ("messages", "tools", "prompts", "n", "stop", "stop_token_ids", "logprobs", "logit_bias")
    limits = LimitOptions(**{f"max_{name}": 3 for name in names})
    check_caps({field: most}, limits)
    with pytest.raises(InvalidRequest) as refused:
        check_caps({field: too_many}, limits)
    assert refused.value.param == field
    assert flag in str(refused.value) and "at most 3" in str(refused.value)


@pytest.mark.parametrize("value", [None, True, "text", 1.5, {}, {"a": 1}, []])
def test_what_cannot_be_counted_is_left_to_the_schema(value: Any) -> None:
    check_caps({cap.field: value for cap in CAPS}, LimitOptions())


def test_the_operator_s_limits_are_the_ones_that_count() -> None:
    body = json.dumps({"model": "m", "messages": [USER] * 3}).encode()
    with pytest.raises(InvalidRequest, match="--max-messages"):
        parse_body(ChatRequest, body, LimitOptions(max_messages=2))
    assert len(parse_body(ChatRequest, body, LimitOptions(max_messages=3)).messages) == 3


@pytest.mark.parametrize(
    ("path", "body", "flag"),
    [
        (CHAT, HELLO | {"messages": [USER] * 2049}, "--max-messages"),
        (CHAT, HELLO | {"n": 129}, "--max-n"),
        (CHAT, HELLO | {"tools": [{}] * 129}, "--max-tools"),
        (COMPLETIONS, PROMPT | {"prompt": ["a"] * 129}, "--max-prompts"),
        (COMPLETIONS, PROMPT | {"n": 10**9}, "--max-n"),
        (COMPLETIONS, PROMPT | {"stop_token_ids": [5] * 1025, "n": 32}, "--max-stop-token-ids"),
        (CHAT, HELLO | {"metadata": {"a": [0] * 1_000_000}}, "--max-json-values"),
    ],
)
def test_the_endpoints_have_the_caps(path: str, body: dict[str, Any], flag: str) -> None:
    engine = ScriptedEngine()
    response = request(engine, "POST", path, json=body)
    assert response.status_code == 400
    assert flag in error_of(response)["message"]
    assert not engine.submitted


# What is told of a wrong body.


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Every list in what pydantic validates by."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for name, part in schema.items():
            if name not in ("metadata", "json_schema_input_schema", "serialization"):
                yield from lists_of(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_of(part)


@pytest.mark.parametrize("schema", REQUESTS, ids=lambda schema: schema.__name__)
def test_a_list_is_refused_for_its_first_wrong_item(schema: type[BaseModel]) -> None:
    """With a list of all of them, two million wrong items took gigabytes."""
    found = [*lists_of(schema.__pydantic_core_schema__)]
    assert all(one.get("fail_fast") for one in found if one["items_schema"]["type"] != "any")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"stop_token_ids": [""] * 1000}),
        (COMPLETIONS, {"prompt": [[""]] * 100}),
        (CHAT, {"messages": [{"role": "user"}] * 2000}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1] * 100_000}]}),
        (CHAT, {"structured_outputs": {"choice": [1] * 100_000}}),
        (CHAT, {"logit_bias": {str(i): "a" for i in range(1000)}}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}] * 20_000}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text"}] * 20_000}], "max_tokens": 1}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
    ],
)
def test_few_mistakes_are_noted_of_a_body_that_is_full_of_them(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    refusal = body_module._refusal
    monkeypatch.setattr(body_module, "_refusal", lambda error: (noted.append(error.error_count()), refusal(error))[1])
    needed = {CHAT: HELLO, COMPLETIONS: PROMPT}.get(path, {"model": "scripted"})
    response = request(ScriptedEngine(), "POST", path, json=needed | fields)
    assert response.status_code == 400
    assert len(response.content) < 500
    assert noted and noted[0] <= 1024


LONG = "n" * 1_000_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {LONG: 1}),
        (CHAT, {"n" * 1000: 1}),
        (CHAT, {"model": LONG}),
        (CHAT, {"adapter": LONG}),
        (CHAT, {"use_beam_search": LONG}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "k" * 1000: 1}]}]}),
        (CHAT, {"messages": [{"role": LONG, "content": "a"}]}),
        (CHAT, {"chat_template_kwargs": {LONG: 1}}),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": LONG}}}),
        ("/v1/responses", {"input": "a", "tools": [{"type": LONG}]}),
        ("/v1/responses", {"input": [{"type": LONG}]}),
        ("/v1/responses", {"input": "a", "previous_response_id": LONG}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "tools": [{"type": [LONG]}]},
        ),
    ],
)
def test_a_refusal_repeats_little_of_what_the_client_sent(path: str, fields: dict[str, Any]) -> None:
    needed = HELLO if path == CHAT else {"model": "scripted"}
    response = request(ScriptedEngine(), "POST", path, json=needed | fields)
    assert response.status_code in (400, 404)
    assert len(response.content) < 1000


def test_a_field_s_name_that_is_nearly_right_is_told() -> None:
    response = request(ScriptedEngine(), "POST", CHAT, json=HELLO | {"temprature": 1})
    assert "Did you mean 'temperature'?" in error_of(response)["message"]


# A request's head.


def test_too_many_headers_are_431() -> None:
    few = {f"x-{number}": "1" for number in range(100)}
    assert request(ScriptedEngine(), "GET", "/v1/models", headers=few).status_code == 200
    many = {f"x-{number}": "1" for number in range(130)}
    response = request(ScriptedEngine(), "GET", "/v1/models", headers=many)
    assert response.status_code == 431
    assert "--max-headers" in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?" + "q" * 33_000, "/v1/" + "p" * 33_000])
def test_a_large_head_is_431_whatever_it_is_large_of(path: str) -> None:
    headers = {} if len(path) > 100 else {"x-large": "v" * 33_000}
    response = request(ScriptedEngine(), "GET", path, headers=headers)
    assert response.status_code == 431
    assert "--max-header-kb" in error_of(response)["message"]
    assert response.headers["connection"] == "close"


def test_a_head_without_an_end_is_ended() -> None:
    engine = ScriptedEngine(answer("x"))
    config = load({"max_header_kb": 8}, env={})
    with real_server(build_app(engine, config), config) as url:
        for beginning in (b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nx-long: ", b"GET / HTTP/1.1\r\nx"):
            with raw.connect(url) as connection:
                connection.sendall(beginning)
                for _ in range(8):
                    connection.sendall(b"a" * 1024)
                told = raw.everything(connection)
                assert raw.status_of(told) == 431 and b"--max-header-kb" in told, "and the connection is closed"
        with raw.connect(url) as connection:
            # A body is no head, however long, and the next head is counted from its own beginning.
            for _ in range(3):
                connection.sendall(raw.post_bytes(COMPLETIONS, PROMPT | {"prompt": "y" * 20_000}))
                assert raw.status_of(connection.recv(1 << 16)) == 200


def test_a_head_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = asyncio.Event()
    give_up = http_protocol.HttpProtocol._give_up_head

    def giving_up(connection: http_protocol.HttpProtocol) -> None:
        give_up(connection)
        given_up.set()

    monkeypatch.setattr(http_protocol.HttpProtocol, "_give_up_head", giving_up)
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.05)
    engine = ScriptedEngine([Output(text="a", token_ids=[1]), given_up.wait, *answer("b")])
    with real_server(build_app(engine, load(env={}))) as url:
        for beginning in (b"", b"GET /v1/models HTTP/1.1\r\nHost: local"):
            with raw.connect(url) as connection:
                connection.sendall(beginning)
                assert raw.everything(connection) == b"", "closed without an answer"
        given_up.clear()
        monkeypatch.setattr(http_protocol, "HEAD_S", 3600)
        with raw.connect(url) as connection:
            asked = raw.post_bytes(COMPLETIONS, PROMPT | {"stream": True}, "Connection: close\r\n")
            connection.sendall(asked)
            assert connection.recv(100)
            # Some clients send a line end behind the body: their answers are not cut off for it.
            monkeypatch.setattr(http_protocol, "HEAD_S", 0.05)
            connection.sendall(b"\r\n")
            assert b"[DONE]" in raw.everything(connection)


def test_grpc_refuses_metadata_that_http_would_refuse() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        async with served(engine, max_header_kb=16) as opened:
            method = opened.channel.stream_stream("/cy.llm.AiInference/StreamPredict")
            large = [("x-large", "v" * 17_000)]
            _, code, _ = await failed(method([ask().SerializeToString()], metadata=large))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not engine.submitted
            small = [("x-large", "v" * 12_000)]
            assert [one async for one in method([ask().SerializeToString()], metadata=small)]

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_bytes", "in_thread"), [(16 * 1024, False), (16 * 1024 + 1, True)])
def test_a_body_that_could_take_long_is_parsed_off_the_loop(num_bytes: int, in_thread: bool) -> None:
    parsed_in = []

    class Noted(BaseModel):
        text: str

        @model_validator(mode="before")
        @classmethod
        def note(cls, value: Any) -> Any:
            parsed_in.append(threading.get_ident())
            return value

    body = b'{"text":"' + b"x" * (num_bytes - 11) + b'"}'
    assert len(body) == num_bytes
    admission = Admission(load(env={}))
    admission.open(ScriptedEngine())

    async def scenario() -> None:
        with admission.admit() as context:
            await parse(Noted, body, context)

    asyncio.run(scenario())
    assert [thread != threading.get_ident() for thread in parsed_in] == [in_thread]
