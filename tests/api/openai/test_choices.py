"""Several answers to one prompt, and all that an answer can tell besides its text."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.api.http import CHAT, COMPLETIONS, HELLO, PROMPT, chat, complete, error_of, events, request, request_app
from tests.api.scripted_engine import ScriptedEngine, answer
from weft.api.app import build_app
from weft.api.handler import FIELDS_HEADER
from weft.api.openai import chat as chat_module
from weft.api.openai import completions
from weft.backends.contract import Stream
from weft.config import load
from weft.types import FinishReason, GenerationRequest, Output, Sample, SamplingParams, TokenLogprob, Usage

CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


def with_prompt_logprobs(num_prompt: int) -> list[Any]:
    """Two tokens behind a prompt of so many, with figures for all of them."""
    figures = [TokenLogprob(-1.0 - i, ((120, -0.5),)) for i in range(num_prompt - 1)]
    usage = Usage(prompt_tokens=num_prompt, completion_tokens=2)
    return [
        Output(text="a", token_ids=[97], logprobs=[TokenLogprob(-0.1)], prompt_logprobs=figures, queue_seconds=0.25),
        Output(text="b", token_ids=[98], logprobs=[TokenLogprob(-0.2)], finish=FinishReason.LENGTH, usage=usage),
    ]


def test_n_choices_are_siblings_with_seeds_of_their_own() -> None:
    engine = ScriptedEngine()
    body = chat(engine, n=3, seed=2**63 - 1).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    leader, *others = engine.submitted
    assert leader.sibling_of == "" and {other.sibling_of for other in others} == {leader.request_id}
    assert [submitted.params.seed for submitted in engine.submitted] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert {tuple(submitted.prompt) for submitted in engine.submitted} == {tuple(leader.prompt)}
    # The prompt is counted once.
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 36


def test_every_prompt_of_a_completion_has_its_own_siblings() -> None:
    engine = ScriptedEngine()
    body = complete(engine, prompt=["x", "y"], n=2, best_of=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [bytes(submitted.prompt) for submitted in engine.submitted] == [b"x", b"x", b"y", b"y"]
    first, second, third, fourth = engine.submitted
    assert (second.sibling_of, fourth.sibling_of) == (first.request_id, third.request_id)
    assert body["usage"]["prompt_tokens"] == 6


def test_choices_stream_side_by_side_each_with_its_role() -> None:
    chunks = events(chat(ScriptedEngine(), n=2, stream=True))
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello, world"
        assert mine[-1]["finish_reason"] == "stop"


def test_usage_goes_with_every_chunk_when_asked() -> None:
    script = [
        Output(text="a", token_ids=[97], usage=Usage(prompt_tokens=3, completion_tokens=1)),
        *answer("b"),
    ]
    for endpoint in (chat, complete):
        chunks = events(endpoint(ScriptedEngine(script), stream=True, stream_options=CONTINUOUS))
        told = [chunk["usage"]["total_tokens"] for chunk in chunks if chunk.get("usage")]
        assert told == sorted(told) and told[0] == 4 and len(told) >= 3


def test_token_ids_of_prompt_and_answer() -> None:
    body = chat(ScriptedEngine(), return_token_ids=True).json()
    assert bytes(body["prompt_token_ids"]) == b"<user>hi"
    assert bytes(body["choices"][0]["token_ids"]) == b"Hello, world"
    body = complete(ScriptedEngine(), return_token_ids=True).json()
    assert bytes(body["choices"][0]["prompt_token_ids"]) == b"hi"
    for endpoint in (chat, complete):
        chunks = events(endpoint(ScriptedEngine(), return_token_ids=True, stream=True))
        ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
        assert bytes(ids) == b"Hello, world"


def test_timings_come_with_the_end_when_asked() -> None:
    script = [Output(text="a", token_ids=[97], queue_seconds=0.25), *answer("b")]
    for endpoint in (chat, complete):
        [choice] = endpoint(ScriptedEngine(script), return_timings=True).json()["choices"]
        assert choice["timings"]["queue_ms"] == 250
        assert choice["timings"]["ttft_ms"] > 0 and choice["timings"]["tokens_per_second"] > 0
        last = events(endpoint(ScriptedEngine(script), return_timings=True, stream=True))[-1]["choices"][0]
        assert last["timings"].keys() == choice["timings"].keys()
        assert "timings" not in endpoint(ScriptedEngine(script)).json()["choices"][0]


def test_the_stop_string_is_told() -> None:
    script = [Output(text="a", token_ids=[97], finish=FinishReason.STOP, stop_reason="\n")]
    for endpoint in (chat, complete):
        assert endpoint(ScriptedEngine(script)).json()["choices"][0]["stop_reason"] == "\n"
        assert events(endpoint(ScriptedEngine(script), stream=True))[-1]["choices"][0]["stop_reason"] == "\n"


def test_an_echo_has_the_prompt_and_its_figures() -> None:
    def script() -> list[Any]:
        return with_prompt_logprobs(2)

    engine = ScriptedEngine(script())
    [choice] = complete(engine, echo=True, logprobs=1).json()["choices"]
    assert engine.submitted[0].params.prompt_logprobs == 1
    assert choice["text"] == "hiab"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -1.0, -0.1, -0.2]
    assert logprobs["top_logprobs"][:2] == [None, {"x": -0.5, "i": -1.0}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    chunks = events(complete(ScriptedEngine(script()), echo=True, logprobs=1, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hiab"
    tokens = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert tokens == ["h", "i", "a", "b"]


def test_an_echo_of_the_prompt_alone() -> None:
    engine = ScriptedEngine(with_prompt_logprobs(2))
    [choice] = complete(engine, echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert engine.submitted[0].params.max_tokens == 1
    assert choice["text"] == "hi" and choice["logprobs"]["tokens"] == ["h", "i"]
    assert complete(ScriptedEngine(), max_tokens=0).status_code == 400


class LikelierEachTime(ScriptedEngine):
    """Every answer is a number, and likelier than the one before it."""

    async def submit(self, request: GenerationRequest) -> Stream:
        number = len(self.submitted)
        text = str(number) * (9 - number)
        usage = Usage(prompt_tokens=2, completion_tokens=len(text))
        logprobs = [TokenLogprob(number - 9.0)] * len(text)
        self.script = [
            Output(text=text, token_ids=[*text.encode()], logprobs=logprobs, finish=FinishReason.LENGTH, usage=usage)
        ]
        return await super().submit(request)


def test_the_best_answers_to_each_prompt_are_given() -> None:
    engine = LikelierEachTime()
    body = complete(engine, prompt=["hi", "ho"], best_of=3, n=2).json()
    assert [(choice["index"], choice["text"][0]) for choice in body["choices"]] == [
        (0, "2"),
        (1, "1"),
        (2, "5"),
        (3, "4"),
    ]
    assert {choice["logprobs"] for choice in body["choices"]} == {None}
    assert body["usage"]["completion_tokens"] == 9 + 8 + 7 + 6 + 5 + 4, "all that were made"
    assert body["usage"]["prompt_tokens"] == 4
    [choice] = complete(LikelierEachTime(), best_of=2, logprobs=0, echo=True).json()["choices"]
    assert choice["text"] == "hi" + "1" * 8 and choice["logprobs"]["tokens"] == ["1"] * 8


def test_prompt_logprobs_by_token_id() -> None:
    expected = [None, {"105": {"logprob": -1.0, "decoded_token": "i"}, "120": {"logprob": -0.5, "decoded_token": "x"}}]
    [choice] = complete(ScriptedEngine(with_prompt_logprobs(2)), prompt_logprobs=1).json()["choices"]
    assert choice["prompt_logprobs"] == expected
    body = chat(ScriptedEngine(with_prompt_logprobs(len("<user>hi"))), prompt_logprobs=1).json()
    assert len(body["prompt_logprobs"]) == len("<user>hi") and body["prompt_logprobs"][0] is None


def test_a_prompt_is_cut_only_when_asked_and_says_so() -> None:
    engine = ScriptedEngine()
    body = complete(engine, prompt="abcdef", truncate_prompt_tokens=2).json()
    assert bytes(engine.submitted[0].prompt) == b"ef"
    assert body["usage"]["prompt_tokens_details"]["truncated_tokens"] == 4
    engine = ScriptedEngine()
    complete(engine, prompt="a" * 2000, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(engine.submitted[0].prompt) == 990


def test_priority_and_salt_reach_the_engine() -> None:
    engine = ScriptedEngine()
    chat(engine, priority=-5, cache_salt="s")
    assert (engine.submitted[0].priority, engine.submitted[0].cache_salt) == (-5, "s")


@pytest.mark.parametrize(("path", "fields"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
])  # fmt: skip
def test_a_session_reaches_the_engine(path: str, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    app, body = build_app(engine, load(env={})), {"model": "scripted", **fields}
    long = "x" * 1024
    for more, headers in (
        ({}, {}),
        ({"prompt_cache_key": "k"}, {}),
        ({"prompt_cache_key": "k"}, {"x-session-id": "h"}),
        ({"prompt_cache_key": long}, {}),
    ):
        answered = request_app(app, "POST", path, json=body | more, headers=headers)
        assert answered.status_code == 200 and FIELDS_HEADER not in answered.headers, answered.text
    assert [each.session for each in engine.submitted] == ["", "k", "h", long], "the header goes before the body"


def test_sessions_of_two_tenants_are_two() -> None:
    names = [("a", "s"), ("b", "s"), ("a", "t"), ("", "s")]
    task = Sample(params=SamplingParams())
    requests = [GenerationRequest(prompt=[1], task=task, tenant=tenant, session=name) for tenant, name in names]
    sessions = {each.tenant_session for each in requests}
    assert len(sessions) == 4 and {len(session) for session in sessions} == {16}
    assert not GenerationRequest(prompt=[1], task=task, tenant="a").tenant_session


# Answers that are large.


def test_the_figures_of_a_prompt_are_written_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    write = completions.prompt_logprobs

    def counted(tokenizer: Any, prompt: Any, logprobs: Any) -> Any:
        written.append(len(prompt))
        return write(tokenizer, prompt, logprobs)

    monkeypatch.setattr(completions, "prompt_logprobs", counted)
    body = complete(ScriptedEngine(with_prompt_logprobs(2)), prompt=["hi", "ho"], prompt_logprobs=1, n=5).json()
    assert len(written) == 2
    assert len({json.dumps(choice["prompt_logprobs"]) for choice in body["choices"][:5]}) == 1
    assert {len(choice["prompt_logprobs"]) for choice in body["choices"]} == {2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("send", "fields"),
    [
        (complete, {"logprobs": 1, "echo": True, "n": 3}),
        (complete, {"prompt_logprobs": 1, "logprobs": 1, "prompt": ["hi", "ho"], "n": 2}),
        (chat, {"logprobs": True, "n": 2}),
    ],
)
def test_an_answer_with_many_figures_is_written_in_a_thread_and_is_the_same(
    send: Any, fields: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads: list[str] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def working(*arguments: Any, **keywords: Any) -> Any:
            in_threads.append(threading.current_thread().name)
            return work(*arguments, **keywords)

        return working

    for module, name in (
        (completions, "completion_logprobs"),
        (completions, "echoed_logprobs"),
        (chat_module, "chat_logprobs"),
    ):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    prompt_tokens = len("<user>hi") if send is chat else 2
    bodies = []
    for many in (10**9, 0):
        for module in (chat_module, completions):
            monkeypatch.setattr(module, "MANY_FIGURES", many)
        in_threads.clear()
        response = send(ScriptedEngine(with_prompt_logprobs(prompt_tokens)), stream=stream, seed=1, **fields)
        bodies.append(events(response) if stream else [response.json()])
    assert in_threads and "MainThread" not in in_threads

    def choices(body: list[dict[str, Any]]) -> list[str]:
        """Those of several requests come in any order."""
        return sorted(json.dumps(choice) for chunk in body for choice in chunk["choices"])

    assert choices(bodies[0]) == choices(bodies[1])


@pytest.mark.parametrize(
    ("send", "fits", "exceeds"),
    [
        (complete, {"logprobs": 20, "max_tokens": 500}, {"n": 2}),
        (complete, {"logprobs": 20, "max_tokens": 500}, {"prompt": ["a", "b"]}),
        (complete, {"logprobs": 20, "max_tokens": 500}, {"max_tokens": 600}),
        (complete, {"prompt_logprobs": 20, "prompt": [7] * 500}, {"n": 2}),
        (complete, {"prompt_logprobs": 20, "prompt": [7] * 500}, {"prompt": [7] * 600}),
        (chat, {"logprobs": True, "top_logprobs": 9, "n": 1}, {"n": 2}),
    ],
)
def test_an_answer_that_would_be_too_large_is_refused_with_the_numbers(
    send: Any, fits: dict[str, Any], exceeds: dict[str, Any]
) -> None:
    """A MiB holds 10,922 figures; the scripted engine's context is 1000 tokens."""
    path, needed = (CHAT, HELLO) if send is chat else (COMPLETIONS, PROMPT)

    def asked(engine: ScriptedEngine, fields: dict[str, Any], limit_mb: int) -> httpx.Response:
        return request(engine, "POST", path, load({"max_answer_mb": limit_mb}, env={}), json=needed | fields)

    assert asked(ScriptedEngine(), fits, 1).status_code == 200
    engine = ScriptedEngine()
    response = asked(engine, fits | exceeds, 1)
    message = error_of(response)["message"]
    assert response.status_code == 400
    assert "log probabilities, which take 1 MiB; at most 1 MiB" in message and "--max-answer-mb" in message
    assert not engine.submitted
    assert asked(ScriptedEngine(), fits | exceeds, 2).status_code == 200


def test_the_prompt_of_a_chat_is_told_once_however_many_choices_there_are() -> None:
    fields = HELLO | {"prompt_logprobs": 20, "messages": [{"role": "user", "content": "x" * 450}], "n": 8}
    engine = ScriptedEngine(with_prompt_logprobs(456))
    assert request(engine, "POST", CHAT, load({"max_answer_mb": 1}, env={}), json=fields).status_code == 200
