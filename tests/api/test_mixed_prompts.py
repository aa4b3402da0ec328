"""Prompt embeds of text over HTTP and gRPC: refused unless allowed, checked to the end, and then as good as tokens."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from tests.api.grpc.calls import answer_to, ask, refused, served, text_of
from tests.api.http import CHAT, COMPLETIONS, HELLO, error_of, request
from tests.api.scripted_engine import ScriptedEngine
from weft.api.app import build_app
from weft.api.grpc.ai_service_pb2 import ClientTensor, PromptSegment, TokenIds
from weft.backends.contract import Abilities, max_encoded_tokens
from weft.backends.native import NativeEngine, start_native
from weft.config import load
from weft.engine.process import EngineThread
from weft.hub.resolve import resolve
from weft.types import MixedPrompt

ALLOWED = load({"allow_prompt_embeds": True}, env={})


def encoded(rows: Any, dtype: str = "float32") -> dict[str, Any]:
    values = np.asarray(rows, dtype=dtype)
    return {"data": base64.b64encode(values.tobytes()).decode(), "shape": [*values.shape], "dtype": dtype}


ROWS = [[1, 2], [3, 4], [5, 6]]
GOOD = encoded(ROWS)
PART = {"type": "prompt_embeds", **GOOD}


def taking(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(embeds_width=2, **options)


def complete(engine: ScriptedEngine, config: Any = ALLOWED, **fields: Any) -> httpx.Response:
    return request(engine, "POST", COMPLETIONS, config, json={"model": "scripted", **fields})


def chat(engine: ScriptedEngine, *content: Any, config: Any = ALLOWED, **fields: Any) -> httpx.Response:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [*content]}]
    return request(engine, "POST", CHAT, config, json=HELLO | {"messages": messages} | fields)


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def parts(prompt: Any) -> list[Any]:
    """What an engine was sent: text for tokens, and the values of rows."""
    assert isinstance(prompt, MixedPrompt)
    return [bytes(part).decode() if isinstance(part, list) else part.array().tolist() for part in prompt.parts()]


# What the engine is sent.


def test_rows_are_a_prompt_as_vllms_clients_send_them() -> None:
    engine = taking()
    two = encoded([[7, 8]], "float16")
    assert complete(engine, prompt_embeds=GOOD).status_code == 200
    assert complete(engine, prompt="", prompt_embeds=[GOOD, two], n=2).status_code == 200
    answer = complete(engine, prompt=["ab"], prompt_embeds=PART).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    *sent, last = [submitted.prompt for submitted in engine.submitted]
    assert [*map(parts, sent)] == [[ROWS], [ROWS], [ROWS], [[[7, 8]]], [[[7, 8]]], [ROWS]]
    assert last == list(b"ab"), "text comes behind the rows"


def test_rows_stand_among_token_ids() -> None:
    engine = taking()
    assert complete(engine, prompt=[97, 98, PART, 99]).status_code == 200
    assert complete(engine, prompt=[[PART, 97], [98], [GOOD, PART]]).status_code == 200
    sent = [submitted.prompt for submitted in engine.submitted]
    assert sent[2] == [98]
    assert [parts(sent[i]) for i in (0, 1, 3)] == [["ab", ROWS, "c"], [ROWS, "a"], [ROWS, ROWS]]


def test_rows_stand_in_a_message_where_their_part_does() -> None:
    engine = taking()
    response = chat(engine, text("see"), text("this:"), PART, text("and"), PART, PART)
    assert response.status_code == 200, response.text
    assert parts(engine.submitted[0].prompt) == ["<system>s<user>see\nthis:", ROWS, "and", ROWS, ROWS]
    mark = engine.messages[1]["content"]
    assert chat(engine, text(mark), PART).status_code == 200, "what once was a mark is text"
    assert parts(engine.submitted[1].prompt) == [f"<system>s<user>{mark}", ROWS]


def test_a_template_that_drops_a_part_is_told() -> None:
    class Forgetful(ScriptedEngine):
        def encode_chat(self, messages: Any, **options: Any) -> Any:
            return super().encode_chat(messages[:1], **options)

    error = error_of(chat(Forgetful(embeds_width=2), PART))
    assert error["param"] == "messages" and "chat template" in error["message"]


def test_the_models_card_tells_that_it_takes_them() -> None:
    for engine, takes in ((taking(), True), (ScriptedEngine(), False)):
        [card] = request(engine, "GET", "/v1/models").json()["data"]
        assert ("prompt_embeds" in card["capabilities"]) == takes


# What is refused.


def refusals(config: Any = ALLOWED, engine: Callable[[], ScriptedEngine] = taking, **fields: Any) -> list[Any]:
    """The errors of all ways to send rows; nothing may reach the engine."""
    used = engine()
    odd = PART | fields
    responses = [
        complete(used, config, prompt_embeds=odd),
        complete(used, config, prompt=[1, odd]),
        chat(used, text("a"), odd, config=config),
    ]
    assert [response.status_code for response in responses] == [400] * 3, [response.text for response in responses]
    assert not used.submitted
    return [error_of(response) for response in responses]


PLACES = ["prompt_embeds[0]", "prompt[1]", "messages[1].content[1]"]


def test_they_must_be_allowed() -> None:
    for error, place in zip(refusals(load(env={})), ["prompt_embeds", "prompt", PLACES[2]], strict=True):
        assert error["param"] == place and "--allow-prompt-embeds" in error["message"]


def test_the_engine_must_take_them() -> None:
    class Limited(ScriptedEngine):
        abilities = replace(Abilities(), prompt_embeds=False)

    assert all("the engine scripted takes no prompt embeds" in error["message"] for error in refusals(engine=Limited))


VIOLATIONS = [
    ({"data": "no base64!"}, "data"),
    ({"data": encoded([[1, 2], [3, 4]])["data"]}, "data"),
    ({"data": encoded([[1, 2], [3, 4], [5, float("inf")]])["data"]}, "data"),
    ({"shape": [6]}, "shape"),
    ({"shape": [2, 3]}, "shape"),
    ({"shape": [1000, 2]}, "shape"),
    ({"shape": [0, 2]}, "shape"),
    ({"sha256": "00"}, "sha256"),
]


@pytest.mark.parametrize(("fields", "place"), VIOLATIONS)
def test_every_violation_names_its_field(fields: dict[str, Any], place: str) -> None:
    assert [error["param"] for error in refusals(**fields)] == [f"{before}.{place}" for before in PLACES]


@pytest.mark.parametrize("fields", [{"dtype": "int8"}, {"shape": ["2", 2]}, {"extra": 1}, {"shape": [1] * 9}])
def test_what_is_no_tensor_names_its_part(fields: dict[str, Any]) -> None:
    of_embeds, of_prompt, of_chat = refusals(**fields)
    [field] = fields
    assert of_embeds["param"].startswith(f"prompt_embeds[0].{field}")
    assert (of_prompt["param"], of_chat["param"]) == ("prompt", "messages[1].content")
    assert all(f"part 1: {field}" in error["message"] for error in (of_prompt, of_chat))


def test_a_file_of_torch_is_not_read() -> None:
    for given in ("UEsDBA==", ["UEsDBA=="]):
        error = error_of(complete(taking(), prompt_embeds=given))
        assert error["param"] == "prompt_embeds"
        assert all(word in error["message"] for word in ("torch.save", "data", "shape", "dtype"))


def test_too_much_data_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.openai.openai_schema.MAX_BYTES", 23)
    assert all("at most 32, which are 23 bytes" not in error["message"] for error in refusals(sha256="00"))
    monkeypatch.setattr("weft.api.openai.openai_schema.MAX_BYTES", 20)
    assert all("at most 28, which are 20 bytes" in error["message"] for error in refusals())


NOT_WITH = [{"prompt_logprobs": 1}, {"return_token_ids": True}, {"truncate_prompt_tokens": 2}]


@pytest.mark.parametrize("fields", [*NOT_WITH, {"echo": True}])
def test_what_needs_the_token_ids_of_the_prompt_is_named(fields: dict[str, Any]) -> None:
    [field] = fields
    responses = [complete(taking(), prompt=[1, PART], **fields)]
    responses += [] if field == "echo" else [chat(taking(), PART, **fields)]
    for response in responses:
        assert error_of(response)["param"] == field and response.status_code == 400


def test_a_prompt_is_still_needed_and_tokens_of_rows_are_not_counted() -> None:
    assert error_of(complete(taking()))["param"] == "prompt"
    messages = [{"role": "user", "content": [PART]}]
    assert error_of(request(taking(), "POST", "/tokenize", ALLOWED, json={"messages": messages}))["param"] == "messages"


# gRPC.


def segment(tensor: dict[str, Any] = GOOD) -> PromptSegment:
    fields = tensor | {"data": base64.b64decode(tensor["data"])}
    return PromptSegment(prompt_embeds=ClientTensor(**fields))


def test_a_prediction_has_a_prompt_in_segments() -> None:
    engine = taking()
    segments = [PromptSegment(text="ab"), segment(), PromptSegment(token_ids=TokenIds(ids=[99, 100]))]

    async def scenario() -> None:
        async with served(engine, allow_prompt_embeds=True) as opened:
            await answer_to(opened, ask("", segments=segments))
            await answer_to(opened, ask("", segments=[segments[0], segments[2]]))
            for fields, place in (
                ({"prompt": "a", "segments": segments}, "segments"),
                ({"prompt": "", "segments": [PromptSegment()]}, "segments[0]"),
                ({"prompt": "", "segments": [segments[0], segment(encoded([[1]]))]}, "segments[1].prompt_embeds.shape"),
            ):
                code, details = await refused(opened.predict([ask(**fields)]))
                assert code.name == "INVALID_ARGUMENT" and details.startswith(place)
        async with served(engine) as closed:
            code, details = await refused(closed.predict([ask("", segments=segments)]))
            assert code.name == "INVALID_ARGUMENT" and "--allow-prompt-embeds" in details

    asyncio.run(scenario())
    mixed, plain = [submitted.prompt for submitted in engine.submitted]
    assert parts(mixed) == ["ab", ROWS, "cd"] and plain == list(b"abcd")


def test_segments_are_bounded_together() -> None:
    engine = taking()
    most = max_encoded_tokens(engine)
    long = PromptSegment(token_ids=TokenIds(ids=[99] * (most // 2 + 1)))

    async def scenario() -> None:
        async with served(engine) as opened:
            for last in (long, PromptSegment(text="a" * (most // 2))):
                code, details = await refused(opened.predict([ask("", segments=[long, last])]))
                assert code.name == "INVALID_ARGUMENT" and "more than" in details and "tokens" in details

    asyncio.run(scenario())
    assert not engine.submitted


# A real model.

Scenario = Callable[[NativeEngine], Coroutine[Any, Any, None]]
QUESTION = "which river is the longest"
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def run(tiny_model: Path) -> Iterator[Callable[[Scenario], None]]:
    settings = {"num_blocks": 64, "max_model_len": 256, "threads": 1, "allow_prompt_embeds": True}
    with asyncio.Runner() as runner:
        config = load(settings, env={})
        engine = runner.run(start_native(config, resolve(str(tiny_model)), launch=EngineThread))
        yield lambda scenario: runner.run(scenario(engine))
        assert engine.stats().open_requests == 0 and engine.stats().embedding_bytes == 0
        runner.run(engine.close())


def test_the_embeddings_of_a_text_are_the_text_at_every_endpoint(
    run: Callable[[Scenario], None], tiny_model: Path
) -> None:
    table = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"]

    async def scenario(engine: NativeEngine) -> None:
        name = engine.model.name
        app = build_app(engine, ALLOWED)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def ask_http(path: str, **fields: Any) -> dict[str, Any]:
                response = await client.post(path, json={"model": name, **GREEDY, **fields})
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer

            ids = engine.text.tokenizer.encode(QUESTION)
            rows = encoded(table[ids])
            expected = await ask_http(COMPLETIONS, prompt=QUESTION)
            half = len(ids) // 2
            for fields in (
                {"prompt_embeds": rows},
                {"prompt": [*ids[:half], encoded(table[ids[half:]])]},
                {"prompt": [encoded(table[ids[:2]]), *ids[2:]]},
            ):
                answer = await ask_http(COMPLETIONS, **fields)
                assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
                assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"] == len(ids)
            both = await ask_http(COMPLETIONS, prompt_embeds=rows, n=2, seed=1, temperature=1)
            alike = await ask_http(COMPLETIONS, prompt=ids, n=2, seed=1, temperature=1)
            assert [one["text"] for one in both["choices"]] == [one["text"] for one in alike["choices"]]

            # In a chat, among the template's own tokens: each piece of text is encoded by itself.
            written = engine.text.encode_chat([{"role": "user", "content": "a~~b"}]).text
            encode = engine.text.tokenizer.encode
            before, after = (encode(piece, add_special_tokens=False) for piece in written.split("~~"))
            expected = await ask_http(COMPLETIONS, prompt=[*before, *ids, *after])
            content = [text("a"), {"type": "prompt_embeds", **rows}, text("b")]
            answer = await ask_http(CHAT, messages=[{"role": "user", "content": content}])
            assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
            assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]

        generation = {"temperature": 0, "max_new_tokens": 20}
        async with served(engine, allow_prompt_embeds=True) as opened:
            plain = await answer_to(opened, ask(QUESTION, generation=generation))
            rpc = await answer_to(opened, ask("", generation=generation, segments=[segment(rows)]))
        assert text_of(rpc) == text_of(plain) != "" and rpc[-1].prompt_tokens == len(ids)

    run(scenario)
