"""The interface of llama.cpp's server: what is asked of the model, what its clients read, and how they are refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.api.http import error_of, request
from tests.api.says import model_that_says
from tests.api.scripted_engine import ScriptedEngine, ScriptedTokenizer, answer, with_logprobs
from weft.api.app import build_app
from weft.backends.contract import ChatStyles
from weft.config import load
from weft.errors import EngineFault
from weft.text.tokenizer import FillInMiddle
from weft.types import FinishReason, Output

ON = load({"compat_api": ["llamacpp"], "max_num_seqs": 3}, env={})
COMPLETION = "/completion"
NUMBERS = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}


def post(engine: ScriptedEngine, path: str = COMPLETION, **body: Any) -> httpx.Response:
    return request(engine, "POST", path, ON, json=body)


def complete(engine: ScriptedEngine | None = None, **body: Any) -> Any:
    response = post(engine or ScriptedEngine(), **{"prompt": "hi"} | body)
    assert response.status_code == 200, response.text
    return response.json()


def get(path: str, engine: ScriptedEngine | None = None) -> httpx.Response:
    return request(engine or ScriptedEngine(), "GET", path, ON)


def test_an_answer_in_one_piece() -> None:
    body = complete(n_predict=9)
    assert (body["content"], body["stop"], body["stop_type"], body["truncated"]) == ("Hello, world", True, "eos", False)
    assert (body["tokens_predicted"], body["tokens_evaluated"], body["prompt"]) == (12, 3, "hi")
    assert body["generation_settings"]["n_predict"] == 9
    assert (body["timings"]["prompt_n"], body["timings"]["cache_n"], body["timings"]["predicted_n"]) == (2, 1, 12)


def test_a_stream_ends_with_the_figures_and_nothing_behind() -> None:
    response = post(ScriptedEngine(), prompt="hi", stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-1]]
    assert [piece["content"] for piece in (*pieces, last)] == ["Hello", ", ", "world"]
    assert [piece["stop"] for piece in (*pieces, last)] == [False, False, True]
    assert [piece["tokens_predicted"] for piece in pieces] == [5, 7]
    assert pieces[0]["tokens"] == [*b"Hello"] and pieces[0]["tokens_evaluated"] == 2
    assert last["timings"]["predicted_n"] == 12 and "timings" not in pieces[0]


def test_an_error_in_a_stream_is_its_last_event() -> None:
    engine = ScriptedEngine([Output(text="H", token_ids=[72]), EngineFault("it broke")])
    last = post(engine, prompt="hi", stream=True).text.split("\n\n")[-2]
    assert "it broke" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize(
    ("finish", "stop_reason", "stop_type", "word"),
    [
        (FinishReason.LENGTH, None, "limit", ""),
        (FinishReason.STOP, "END", "word", "END"),
        (FinishReason.STOP, None, "eos", ""),
        (FinishReason.STOP, 7, "eos", ""),
    ],
)
def test_why_it_ended(finish: FinishReason, stop_reason: str | int | None, stop_type: str, word: str) -> None:
    body = complete(model_that_says("a\nb", finish=finish, stop_reason=stop_reason))
    assert (body["stop_type"], body["stopping_word"], body["has_new_line"]) == (stop_type, word, True)


def test_fields_become_sampling_parameters() -> None:
    engine = ScriptedEngine()
    hints = {"cache_prompt": True, "id_slot": 3, "mirostat": 2, "samplers": ["top_k"], "dry_multiplier": 0.8}
    more = {"repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 4, "stop": ["x"]}
    complete(engine, n_predict=5, ignore_eos=True, logit_bias=[[65, 2], ["BC", -1.5], [70, False]], **NUMBERS, **more,
             **hints)  # fmt: skip
    params = engine.submitted[0].params
    assert {name: getattr(params, name) for name in NUMBERS} == NUMBERS
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.1, 0.2)
    assert (params.seed, params.stop, params.max_tokens, params.ignore_eos) == (4, ("x",), 5, True)
    assert params.logit_bias == {65: 2.0, 66: -1.5, 67: -1.5, 70: -100.0}


def test_without_a_bound_the_answer_may_fill_the_context() -> None:
    engine = ScriptedEngine()
    assert complete(engine)["generation_settings"]["n_predict"] == -1
    assert engine.submitted[0].params.max_tokens is None


def test_0_computes_the_prompt_and_shows_nothing() -> None:
    body = complete(n_predict=0, n_probs=1, return_tokens=True)
    assert (body["content"], body["tokens"], body["tokens_predicted"]) == ("", [], 0)
    assert "completion_probabilities" not in body


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", [b"hi"]),
        ([104, 105], [b"hi"]),
        (["hi", 33, "yo"], [b"hi!yo"]),
        (["hi", "yo"], [b"hi", b"yo"]),
        (["hi", [33, 34], [33, "yo"]], [b"hi", b'!"', b"!yo"]),
    ],
)
def test_every_kind_of_prompt(prompt: Any, prompts: list[bytes]) -> None:
    engine = ScriptedEngine()
    body = complete(engine, prompt=prompt)
    assert [submitted.prompt for submitted in engine.submitted] == [[*one] for one in prompts]
    assert (len(body) if isinstance(body, list) else 1) == len(prompts)


def test_probabilities_of_every_token() -> None:
    figures = complete(ScriptedEngine(with_logprobs("xy")), n_probs=2)["completion_probabilities"]
    assert [(one["id"], one["token"], one["logprob"]) for one in figures] == [(120, "x", -0.5), (121, "y", -0.5)]
    assert figures[0]["top_logprobs"][0] == {"id": 97, "token": "a", "bytes": [97], "logprob": -0.25}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "hi", "n_predikt": 1}, "n_predict"),
        ({"prompt": "hi", "lora": [{"id": 0}]}, "lora"),
        ({"prompt": "hi", "logit_bias": [[1, 2, 3]]}, "pairs"),
        ({"prompt": "hi", "logit_bias": [["x" * 5000, 1]]}, "4096"),
        ({"prompt": "hi", "n_probs": 21}, "--max-logprobs"),
        ({"prompt": "hi", "json_schema": {}, "grammar": 'root ::= "a"'}, "json_schema and grammar"),
        ({"prompt": ["x" * 9000, 65]}, "more than 4000 tokens"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], word: str) -> None:
    assert word in error_of(post(ScriptedEngine(), **body))["message"]


def test_what_stands_between_two_texts() -> None:
    tokenizer = ScriptedTokenizer()
    engine = ScriptedEngine(tokenizer=tokenizer)
    body = {"input_prefix": "ab", "input_suffix": "cd", "prompt": "x"}
    assert "no tokens to fill in" in error_of(post(engine, "/infill", **body))["message"]
    tokenizer.fill_in_middle = FillInMiddle((), 1, 2, 3)
    files = [{"filename": "f", "text": "t"}]
    assert post(engine, "/infill", **body).json()["content"] == "Hello, world"
    assert engine.submitted[-1].prompt == [1, *b"ab", 2, *b"cd", 3, *b"x"]
    post(engine, "/infill", **body, input_extra=files)
    assert bytes(engine.submitted[-1].prompt).startswith(b"\n\n--- snippet ---\n\nt\1ab")  # type: ignore[arg-type]
    tokenizer.named_ids = {"<|file_sep|>": 4}
    post(engine, "/infill", **body, input_extra=files)
    assert engine.submitted[-1].prompt[:6] == [4, *b"f\nt", 1, *b"a"]  # type: ignore[index]


def test_the_server_tells_of_itself() -> None:
    engine = ScriptedEngine()
    engine.styles = ChatStyles(template="{{ messages }}")
    body = get("/props", engine).json()
    assert (body["total_slots"], body["chat_template"], body["model_path"]) == (3, "{{ messages }}", "scripted")
    assert body["default_generation_settings"]["params"]["temperature"] == 1.0
    assert get("/props?model=nope").status_code == 404


def test_slots_are_the_requests_inside() -> None:
    assert [slot["is_processing"] for slot in get("/slots").json()] == [False, False, False]
    release = asyncio.Event()
    engine = ScriptedEngine([Output(text="H", token_ids=[72]), release.wait, *answer("i")])

    async def go() -> list[Any]:
        transport = httpx.ASGITransport(build_app(engine, ON))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            asking = asyncio.create_task(client.post(COMPLETION, json={"prompt": "hi"}))
            slots: list[Any] = []
            while not any(slot["next_token"] and slot["next_token"][0]["n_decoded"] for slot in slots):
                await asyncio.sleep(0)
                slots = (await client.get("/slots")).json()
            release.set()
            assert (await asking).json()["content"] == "Hi"
            return slots

    assert [slot["is_processing"] for slot in asyncio.run(go())] == [True, False, False]


def test_a_conversation_as_the_template_writes_it() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert post(ScriptedEngine(), "/apply-template", **body).json() == {"prompt": "<user>hi"}


def test_the_tokens_of_a_chat_are_counted() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    engine = ScriptedEngine()
    assert post(engine, "/v1/chat/completions/input_tokens", **body).json() == {"input_tokens": len("<user>hi")}
    assert not engine.submitted


def test_tokens_in_both_shapes() -> None:
    engine = ScriptedEngine()
    assert post(engine, "/tokenize", content="hi").json() == {"tokens": [104, 105]}
    pieces = [{"id": 104, "piece": "h"}, {"id": 105, "piece": "i"}]
    assert post(engine, "/tokenize", content="hi", with_pieces=True).json() == {"tokens": pieces}
    assert post(engine, "/tokenize", prompt="hi").json()["count"] == 2
    assert post(engine, "/detokenize", tokens=[104, 105]).json() == {"content": "hi", "prompt": "hi"}
