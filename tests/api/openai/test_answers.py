"""What a client receives: whole or streamed, chat or completion."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.http import chat, complete, events
from tests.api.scripted_engine import ScriptedEngine, answer, with_logprobs
from weft import __version__
from weft.types import FinishReason, Output, TokenLogprob, Usage


def test_a_chat_answer_has_openai_s_shape() -> None:
    body = chat(ScriptedEngine()).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "system_fingerprint": f"weft-{__version__}",
    }


def test_a_completion_has_openai_s_shape() -> None:
    body = complete(ScriptedEngine(answer("a", "b", finish=FinishReason.LENGTH))).json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
        "system_fingerprint": f"weft-{__version__}",
    }


def test_a_chat_stream_gives_the_role_once_and_the_reason_last() -> None:
    chunks = events(chat(ScriptedEngine(), stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [delta["content"] for delta in deltas[1:-1]] == ["Hello", ", ", "world"]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"]) for chunk in chunks}) == 1


def test_a_completion_stream_ends_with_its_reason() -> None:
    chunks = events(complete(ScriptedEngine(), stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", ", ", "world"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_include_usage_adds_one_chunk_without_choices() -> None:
    for endpoint in (chat, complete):
        *chunks, last = events(endpoint(ScriptedEngine(), stream=True, stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 15
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_delta_without_text_gives_no_chunk() -> None:
    script = [Output(token_ids=[1]), Output(text="x", token_ids=[2], finish=FinishReason.STOP)]
    assert len(events(complete(ScriptedEngine(script), stream=True))) == 1
    assert len(events(chat(ScriptedEngine(script), stream=True))) == 3


def test_several_prompts_give_a_choice_each() -> None:
    engine = ScriptedEngine()
    body = complete(engine, prompt=["one", "two", "three"]).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {"Hello, world"}
    assert body["usage"]["completion_tokens"] == 36
    assert [bytes(s.prompt).decode() for s in engine.submitted] == ["one", "two", "three"]
    assert len({s.request_id for s in engine.submitted}) == 3


def test_several_prompts_stream_side_by_side() -> None:
    engine = ScriptedEngine()
    chunks = events(complete(engine, prompt=[[1, 2], [3]], stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "Hello, world"
        assert mine[-1]["finish_reason"] == "stop"
    assert chunks[-1]["usage"]["completion_tokens"] == 24


CHAT_TOP = [
    {"token": "a", "logprob": -0.25, "bytes": [97]},
    {"token": "b", "logprob": -9999.0, "bytes": [98]},
]


def test_chat_logprobs_whole_and_streamed() -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = chat(ScriptedEngine(with_logprobs("xyz")), **fields).json()["choices"][0]["logprobs"]
    assert whole["content"][0] == {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": CHAT_TOP}
    chunks = events(chat(ScriptedEngine(with_logprobs("xyz")), stream=True, **fields))
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == whole["content"]


@pytest.mark.parametrize(("skips", "shown"), [(True, "xy"), (False, "xy\0")])
def test_chat_logprobs_leave_out_the_token_that_ended_it_unless_it_is_shown(skips: bool, shown: str) -> None:
    def script() -> ScriptedEngine:
        usage = Usage(prompt_tokens=3, completion_tokens=3)
        figures = [TokenLogprob(-0.5)]
        end = Output(token_ids=[0], logprobs=figures, finish=FinishReason.STOP, usage=usage)
        return ScriptedEngine([Output(text="xy", token_ids=[120, 121], logprobs=figures * 2), end])

    fields: dict[str, Any] = {"logprobs": True, "skip_special_tokens": skips}
    content = chat(script(), **fields).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(shown)
    chunks = [chunk["choices"][0] for chunk in events(chat(script(), stream=True, **fields))]
    assert [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]] == content
    tokens = complete(script(), logprobs=0).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == ["x", "y", "\0"], "a completion tells of it"


def test_completion_logprobs_whole_and_streamed() -> None:
    whole = complete(ScriptedEngine(with_logprobs("xya")), logprobs=2).json()["choices"][0]["logprobs"]
    assert whole == {
        "tokens": ["x", "y", "a"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"a": -0.25, "b": -9999.0, "x": -0.5},
            {"a": -0.25, "b": -9999.0, "y": -0.5},
            {"a": -0.5, "b": -9999.0},
        ],
        "text_offset": [0, 1, 2],
    }
    chunks = events(complete(ScriptedEngine(with_logprobs("xya")), logprobs=2, stream=True))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in whole.items():
        assert [value for logprobs in streamed for value in logprobs[name]] == values


@settings(max_examples=30)
@given(texts=st.lists(st.text(max_size=8), min_size=1, max_size=6))
def test_the_pieces_of_a_stream_are_the_whole(texts: list[str]) -> None:
    script = answer(*texts)
    whole = chat(ScriptedEngine(script)).json()["choices"][0]["message"]["content"]
    chunks = events(chat(ScriptedEngine(script), stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole == "".join(texts)
    chunks = events(complete(ScriptedEngine(script), stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_usage_is_the_last_delta_s() -> None:
    script = [
        Output(text="a", token_ids=[1], usage=Usage(prompt_tokens=1, completion_tokens=1)),
        Output(text="b", token_ids=[2], usage=Usage(prompt_tokens=1, completion_tokens=2), finish=FinishReason.STOP),
    ]
    assert chat(ScriptedEngine(script)).json()["usage"]["total_tokens"] == 3


def test_usage_tells_how_much_of_the_drafts_was_right() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=9, draft_tokens=8, accepted_tokens=5)
    engine = ScriptedEngine([Output(text="a", token_ids=[1], usage=usage, finish=FinishReason.STOP)])
    expected = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 3}
    for endpoint in (chat, complete):
        assert endpoint(engine).json()["usage"]["completion_tokens_details"] == expected
        *_, last = events(endpoint(engine, stream=True, stream_options={"include_usage": True}))
        assert last["usage"]["completion_tokens_details"] == expected
    both = complete(engine, n=2).json()["usage"]["completion_tokens_details"]
    assert both == {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 6}


def test_the_answer_s_id_holds_the_client_s() -> None:
    engine = ScriptedEngine()
    assert chat(engine, request_id="mine-1").json()["id"] == "chatcmpl-mine-1"
    chat(engine, request_id="mine-1")
    first, second = engine.submitted
    assert first.request_id != second.request_id, "two requests of one id are two requests for the engine"
