"""What happens to an answer when its peer breaks off, refuses, or is not there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.openai_server.peer import (
    DONE,
    Asked,
    Handler,
    Reply,
    ScriptedPeer,
    all_of,
    chat_chunk,
    connected,
    text_chunk,
    token_chunk,
    usage_chunk,
)
from tests.generation import sample
from tests.waiting import PATIENCE, until
from weft.backends.contract import Conversation, Prompt
from weft.backends.openai_server import http_client, remote_engine
from weft.backends.openai_server.peer_errors import public_words
from weft.errors import (
    EngineFault,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    Unavailable,
    WeftError,
)
from weft.types import FinishReason, Output, SamplingParams

PARAMS = SamplingParams(max_tokens=8, temperature=0)
CHAT = Conversation(messages=[{"role": "user", "content": "hi"}])
A, B, C = 68, 69, 70


def answers(
    path: str, *handlers: Handler, prompt: Prompt = "hi", params: SamplingParams = PARAMS, **settings: Any
) -> tuple[list[Any], list[Asked]]:
    """The deltas, and what the peer was asked, when it answers so to one try after another."""

    async def go() -> tuple[list[Output], list[Asked]]:
        async with ScriptedPeer(settings.pop("owner", "vllm")) as peer:
            tries = iter(handlers)

            async def answer(reply: Reply, asked: Asked) -> None:
                await next(tries)(reply, asked)

            peer.answers[f"/v1/{path}"] = answer
            async with connected(peer, **settings) as engine:
                try:
                    return await all_of(engine, prompt, params), peer.generations()
                finally:
                    assert engine.stats().open_requests == 0

    return asyncio.run(go())


def says(*chunks: Any, end: bytes = DONE) -> Handler:
    async def answer(reply: Reply, asked: Asked) -> None:
        await reply.events(*chunks)
        await reply.write(end)

    return answer


def breaks_off(*chunks: Any) -> Handler:
    async def answer(reply: Reply, asked: Asked) -> None:
        await reply.events(*chunks)
        reply.cut()

    return answer


async def cuts_at_once(reply: Reply, asked: Asked) -> None:
    reply.cut()


async def never_answers(reply: Reply, asked: Asked) -> None:
    await reply.gone()


def text_of(deltas: list[Output]) -> str:
    return "".join(delta.text for delta in deltas)


# Text mode.


def test_text_comes_as_it_is_sent_and_is_counted_by_the_peer() -> None:
    deltas, [asked] = answers(
        "completions", says(text_chunk("Ü"), text_chunk("ber"), text_chunk("", "stop"), usage_chunk(3, 2, 1, 4, 6))
    )
    assert [delta.text for delta in deltas] == ["Ü", "ber", ""]
    assert all(delta.token_ids == [] for delta in deltas)
    assert deltas[-1].finish is FinishReason.STOP
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (3, 2)
    assert deltas[-1].usage.cached_tokens == 1
    assert (deltas[-1].usage.draft_tokens, deltas[-1].usage.accepted_tokens) == (10, 4)
    assert asked.body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_stream_that_ends_without_a_reason_is_an_error_and_no_stop() -> None:
    for end in (DONE, b""):
        deltas, asked = answers("completions", says(text_chunk("half"), end=end))
        assert deltas[-1].finish is FinishReason.ERROR
        assert "without saying why" in deltas[-1].error
        assert len(asked) == 1, "what a client has read cannot be asked for again as text"


def test_a_reason_is_enough_even_when_no_usage_comes() -> None:
    deltas, _ = answers("completions", breaks_off(text_chunk("all"), text_chunk("", "length")))
    assert [delta.finish for delta in deltas] == [None, FinishReason.LENGTH]


def test_an_answer_that_breaks_off_before_its_first_text_is_asked_for_again() -> None:
    whole = says(text_chunk("all", "stop"))
    for broken in (cuts_at_once, breaks_off(), breaks_off(text_chunk(""))):
        deltas, asked = answers("completions", broken, whole)
        assert text_of(deltas) == "all"
        assert len(asked) == 2
        assert asked[0].body == asked[1].body


def test_an_answer_that_breaks_off_twice_is_not_asked_for_a_third_time() -> None:
    deltas, asked = answers("completions", breaks_off(), breaks_off())
    assert deltas[-1].finish is FinishReason.ERROR
    assert len(asked) == 2


def test_a_peer_that_falls_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def falls_silent(reply: Reply, asked: Asked) -> None:
        await reply.events(text_chunk("half"))
        await reply.gone()

    async def go() -> None:
        async with ScriptedPeer() as peer, connected(peer) as engine:
            peer.answers["/v1/completions"] = falls_silent
            answer = await engine.submit(sample("hi", PARAMS))
            assert (await anext(answer)).text == "half"
            monkeypatch.setattr(http_client, "BETWEEN_BYTES_S", 0.01)
            [last] = [delta async for delta in answer]
            assert last.finish is FinishReason.ERROR
            assert "nothing came for" in last.error

    asyncio.run(go())
    monkeypatch.setattr(http_client, "FIRST_BYTE_S", 0.01)
    with pytest.raises(RequestTimeout, match="did not begin"):
        answers("completions", never_answers)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"data: {\n\n",
        b"data: [1, 2]\n\n",
        b'data: {"choices": 7}\n\n',
        b'data: {"choices": [{"text": 7}]}\n\n',
        b'data: "\xff\xfe"\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b"x" * (10 << 20),
        b'data: {"choices": [{"text": "' + b"x" * (10 << 20) + b'"}]}\n\n',
    ],
    ids=["half", "list", "choices", "text", "bytes", "deep", "endless", "long"],
)
def test_nonsense_is_an_error_of_this_request_alone(nonsense: bytes) -> None:
    async def talks_nonsense(reply: Reply, asked: Asked) -> None:
        await reply.events(text_chunk("half"))
        await reply.write(nonsense)
        await reply.gone()

    deltas, _ = answers("completions", talks_nonsense)
    assert deltas[-1].finish is FinishReason.ERROR
    assert len(deltas[-1].error) < 1000


def test_what_is_no_stream_is_an_error() -> None:
    async def page(reply: Reply, asked: Asked) -> None:
        await reply.head(200, "text/html")
        await reply.write(b"<html>Welcome!")

    async def no_http(reply: Reply, asked: Asked) -> None:
        await reply.write(b"220 mail.example.org ESMTP\r\n\r\n")

    with pytest.raises(EngineFault, match="text/html"):
        answers("completions", page)
    with pytest.raises(Unavailable, match="does not answer"):
        answers("completions", no_http, no_http)


REFUSALS: list[tuple[int, type[WeftError]]] = [
    (400, InvalidRequest),
    (401, EngineFault),
    (403, EngineFault),
    (404, ModelNotFound),
    (413, InvalidRequest),
    (422, InvalidRequest),
    (429, Overloaded),
    (500, EngineFault),
    (503, Unavailable),
    (504, RequestTimeout),
]
SHAPES: dict[str, Callable[[int], Any]] = {
    "openai": lambda status: {"error": {"message": "no, no", "type": "x", "param": "seed", "code": status}},
    "tensorrt": lambda status: {"object": "error", "message": "no, no", "type": "x", "param": "seed", "code": status},
    "mindie": lambda status: {"error": "no, no", "error_type": "validation"},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("status", "kind"), REFUSALS)
def test_a_refusal_keeps_its_meaning_and_its_words(status: int, kind: type[WeftError], shape: str) -> None:
    async def refuses(reply: Reply, asked: Asked) -> None:
        await reply.json(SHAPES[shape](status), status, retry_after="7")

    words = "refuses this server's key" if status in (401, 403) else "no, no"
    with pytest.raises(kind, match=words) as refusal:
        answers("completions", refuses)
    if isinstance(refusal.value, Overloaded):
        assert refusal.value.retry_after_s == 7
    if kind is InvalidRequest and shape != "mindie":
        assert refusal.value.param == "seed"


def test_an_error_in_the_stream_ends_it_with_its_words() -> None:
    for error, finish in (
        ({"message": "no", "type": "BadRequestError", "code": 400}, FinishReason.REJECTED),
        ({"message": "no", "type": "server_error", "param": None, "code": "unavailable"}, FinishReason.ABORT),
        ({"message": "no", "type": "server_error", "code": "timeout"}, FinishReason.TIMEOUT),
        ({"message": "no", "type": "InternalServerError", "code": 500}, FinishReason.ERROR),
    ):
        deltas, _ = answers("completions", says(text_chunk("half"), {"error": error}))
        assert (deltas[-1].finish, deltas[-1].error) == (finish, "The remote engine says: no")


PRIVATE = [
    "Incorrect API key provided: sk-proj-1234abcd5678", "Authorization: Bearer abc.def.ghi",
    "token 0123456789abcdef0123456789abcdef0123456789abcdef", "could not read /srv/models/secret/config.json",
    "C:\\models\\secret", "upstream http://10.1.2.3:8000/v1/x refused", "connect to 10.1.2.3:8000 failed",
    "HTTPConnectionPool(host='gpu-17', port=8000)", "gpu-17.internal:8000 is down", "[fe80::1]:8000 is down",
    "boom\nTraceback (most recent call last):\n  File \"/srv/x/y.py\"",
]  # fmt: skip
SECRETS = ("1234abcd", "abc.def", "0123456789abcdef", "secret", "10.1.2.3", "gpu-17", "fe80", "srv", "Traceback")


@pytest.mark.parametrize("said", PRIVATE)
@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_refusal_tells_clients_nothing_of_the_peers_machine(
    status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuses(reply: Reply, asked: Asked) -> None:
        await reply.json({"error": {"message": f"max_tokens is too large: {said}", "param": said}}, status)

    with pytest.raises(WeftError) as refusal:
        answers("completions", refuses)
    told = f"{refusal.value} {refusal.value.param}"
    assert not [secret for secret in SECRETS if secret in told], told
    assert status == 401 or "max_tokens is too large" in told
    assert any(word in caplog.text for word in SECRETS), "the operator's log has it"


def test_a_refusal_that_never_ends_is_cut() -> None:
    async def refuses(reply: Reply, asked: Asked) -> None:
        await reply.json({"error": {"message": "no. " * 10_000}}, 400)

    with pytest.raises(InvalidRequest) as refusal:
        answers("completions", refuses)
    assert len(refusal.value.message) < 600


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4000 in the messages, "
        "1000 in the completion).",
        "temperature must be in [0, 2], got 3.5; top_p and/or min_p too",
        "The model `org/name-7b` does not exist.",
    ],
)
def test_what_a_client_needs_is_left_as_it_is(said: str) -> None:
    assert public_words(said) == said


def test_the_text_of_an_answer_may_speak_of_errors() -> None:
    deltas, _ = answers("completions", says(text_chunk('{"error": "none"}', "stop")))
    assert text_of(deltas) == '{"error": "none"}'
    assert deltas[-1].finish is FinishReason.STOP


def test_a_reason_that_nobody_knows_is_an_error() -> None:
    deltas, _ = answers("completions", says(text_chunk("half", "content_filter")))
    assert deltas[-1].finish is FinishReason.ERROR
    assert "content_filter" in deltas[-1].error


def test_whoever_leaves_early_hangs_up() -> None:
    async def go() -> None:
        hung_up = asyncio.Event()

        async def goes_on(reply: Reply, asked: Asked) -> None:
            await reply.events(text_chunk("a"))
            await reply.gone()
            hung_up.set()

        async with ScriptedPeer() as peer:
            peer.answers["/v1/completions"] = goes_on
            async with connected(peer) as engine:
                answer = await engine.submit(sample("hi", PARAMS))
                assert (await anext(answer)).text == "a"
                assert engine.stats().open_requests == 1
                await answer.aclose()
                await until(hung_up.is_set, "the peer's connection is closed")
                assert engine.stats().open_requests == 0
                await answer.aclose()
                assert engine.stats().open_requests == 0
                unread = await engine.submit(sample("hi", PARAMS))
                await unread.aclose()
                waiting = asyncio.create_task(engine.submit(sample("hi", PARAMS)))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                assert engine.stats().open_requests == 0

    asyncio.run(go())


# Conversations.


def test_thoughts_and_calls_are_passed_on_as_the_peer_tells_them_apart() -> None:
    def call(index: int, call_id: str | None = None, **function: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}

    deltas, _ = answers(
        "chat/completions",
        says(
            chat_chunk(role="assistant", content=""),
            chat_chunk(reasoning_content="Hm", reasoning="Hm"),
            chat_chunk(reasoning="m."),
            chat_chunk(content="Wait."),
            chat_chunk(**call(1, "c1", name="weather", arguments="")),
            chat_chunk(**call(1, arguments='{"city"')),
            chat_chunk(**call(1, arguments=': "Oslo"}')),
            chat_chunk(**call(2, "c2")),
            chat_chunk(**call(2, name="time")),
            chat_chunk("tool_calls"),
        ),
        prompt=CHAT,
    )
    pieces = [json.loads(repr_of(piece)) for delta in deltas for piece in delta.pieces]
    assert pieces == [
        ["Reasoning", "Hm"],
        ["Reasoning", "m."],
        ["Content", "Wait."],
        ["CallStarted", 0, "c1", "weather"],
        ["CallArguments", 0, '{"city"'],
        ["CallArguments", 0, ': "Oslo"}'],
        ["CallStarted", 1, "c2", "time"],
    ]
    assert text_of(deltas) == "Wait."
    assert deltas[-1].finish is FinishReason.STOP


def repr_of(piece: Any) -> str:
    return json.dumps([type(piece).__name__, *(getattr(piece, name) for name in piece.__struct_fields__)])


def test_arguments_of_a_call_without_a_name_are_an_error() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    deltas, _ = answers("chat/completions", *[says(chat_chunk(**call))] * 2, prompt=CHAT)
    assert deltas[-1].finish is FinishReason.ERROR


# Token mode.


def test_tokens_become_text_here(tiny_model: Path) -> None:
    deltas, [asked] = answers(
        "completions",
        says(token_chunk(A), token_chunk(B, C), token_chunk(finish="length"), usage_chunk(9, 9, 2, 3, 1)),
        prompt=[5, 6],
        tokenizer=str(tiny_model),
    )
    assert asked.body["prompt"] == [5, 6]
    assert asked.body["return_token_ids"] is True
    assert [delta.token_ids for delta in deltas] == [[A], [B, C], []]
    assert "?" not in text_of(deltas)
    usage = deltas[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 3, 2)
    assert (usage.draft_tokens, usage.accepted_tokens) == (4, 3)


def test_stop_strings_and_end_tokens_are_found_here(tiny_model: Path) -> None:
    async def goes_on(reply: Reply, asked: Asked) -> None:
        assert "stop" not in asked.body
        await reply.events(token_chunk(A, B, C, A))
        await reply.gone()

    deltas, _ = answers("completions", goes_on, prompt=[5], tokenizer=str(tiny_model), params=stops(tiny_model))
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, letter(tiny_model, B))
    assert text_of(deltas) == letter(tiny_model, A)

    by_id = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(B,))
    deltas, [asked] = answers("completions", goes_on, prompt=[5], tokenizer=str(tiny_model), params=by_id)
    assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, B)
    assert [token for delta in deltas for token in delta.token_ids] == [A, B]
    assert asked.body["stop_token_ids"] == [B]


def letter(model: Path, token: int) -> str:
    from weft.checkpoint.tokenizer_assets import text_assets
    from weft.hub.resolve import resolve
    from weft.text.tokenizer import Tokenizer

    return Tokenizer.from_assets(text_assets(resolve(str(model)))).decode([token])


def stops(model: Path) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=0, stop=(letter(model, B),))


def test_an_answer_that_breaks_off_goes_on_behind_the_tokens_that_came(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=3, temperature=0)
    deltas, asked = answers(
        "completions",
        breaks_off(token_chunk(A), token_chunk(B)),
        breaks_off(token_chunk(C)),
        says(token_chunk(A, finish="length")),
        prompt=[5, 6],
        params=params,
        tokenizer=str(tiny_model),
    )
    assert [token for delta in deltas for token in delta.token_ids] == [A, B, C, A]
    assert text_of(deltas) == "".join(letter(tiny_model, token) for token in (A, B, C, A))
    assert deltas[-1].usage.completion_tokens == 4
    assert [request.body["prompt"] for request in asked] == [[5, 6], [5, 6, A, B], [5, 6, A, B, C]]
    assert [request.body["max_tokens"] for request in asked] == [8, 6, 5]
    assert [request.body.get("min_tokens") for request in asked] == [3, 1, None]


def test_an_answer_of_full_length_needs_no_more_words(tiny_model: Path) -> None:
    deltas, asked = answers(
        "completions",
        breaks_off(token_chunk(A), token_chunk(B, C)),
        prompt=[5],
        params=SamplingParams(max_tokens=3, temperature=0),
        tokenizer=str(tiny_model),
    )
    assert (deltas[-1].finish, deltas[-1].usage.completion_tokens) == (FinishReason.LENGTH, 3)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=8, presence_penalty=0.5),
        SamplingParams(max_tokens=8, frequency_penalty=0.5),
        SamplingParams(max_tokens=8, seed=1),
        SamplingParams(max_tokens=8, grammar="start: /a*/"),
    ],
    ids=["presence", "frequency", "seed", "grammar"],
)
def test_what_cannot_go_on_as_it_was_ends_with_an_error(tiny_model: Path, params: SamplingParams) -> None:
    deltas, asked = answers(
        "completions", breaks_off(token_chunk(A)), prompt=[5], params=params, tokenizer=str(tiny_model)
    )
    assert deltas[-1].finish is FinishReason.ERROR
    assert "lost in the middle" in deltas[-1].error
    assert len(asked) == 1


def test_a_seed_goes_on_where_it_is_bound_to_positions(tiny_model: Path) -> None:
    deltas, asked = answers(
        "completions",
        breaks_off(token_chunk(A)),
        says(token_chunk(B, finish="length")),
        prompt=[5],
        params=SamplingParams(max_tokens=2),
        tokenizer=str(tiny_model),
        owner="weft",
    )
    assert [token for delta in deltas for token in delta.token_ids] == [A, B]
    assert asked[0].body["seed"] == asked[1].body["seed"]


def test_log_probabilities_are_read_by_their_ids(tiny_model: Path) -> None:
    figures = {
        "tokens": [f"token_id:{A}"],
        "token_logprobs": [-1.5],
        "top_logprobs": [{f"token_id:{B}": -0.5, f"token_id:{C}": -0.75, f"token_id:{A}": -1.5}],
        "text_offset": [0],
    }
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=2)
    deltas, [asked] = answers(
        "completions",
        says(token_chunk(A, logprobs=figures, finish="length")),
        prompt=[5],
        params=params,
        tokenizer=str(tiny_model),
    )
    assert asked.body["logprobs"] == 2
    assert asked.body["return_tokens_as_token_ids"] is True
    [figure] = deltas[-1].logprobs or []
    assert (figure.logprob, figure.top) == (-1.5, ((B, -0.5), (C, -0.75)))
    by_text = {**figures, "top_logprobs": [{"a": -0.5}]}
    deltas, _ = answers(
        "completions",
        *[says(token_chunk(A, logprobs=by_text))] * 2,
        prompt=[5],
        params=params,
        tokenizer=str(tiny_model),
    )
    assert deltas[-1].finish is FinishReason.ERROR


def test_a_peer_that_tells_no_ids_is_not_believed(tiny_model: Path) -> None:
    deltas, _ = answers("completions", *[says(text_chunk("a"))] * 2, prompt=[5], tokenizer=str(tiny_model))
    assert deltas[-1].finish is FinishReason.ERROR
    assert "--tokenizer" in deltas[-1].error


def test_where_ids_are_never_told_the_peer_makes_the_text(tiny_model: Path) -> None:
    deltas, [asked] = answers(
        "completions",
        says(text_chunk("a"), text_chunk("b", "stop"), usage_chunk(1, 2)),
        prompt=[5],
        params=stops(tiny_model),
        tokenizer=str(tiny_model),
        owner="llamacpp",
    )
    assert asked.body["prompt"] == [5]
    assert asked.body["stop"] == [letter(tiny_model, B)]
    assert "return_token_ids" not in asked.body
    assert text_of(deltas) == "ab"
    assert deltas[-1].usage.completion_tokens == 2


# Whether the peer is there.


def test_readiness_tells_the_truth_and_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "PROBE_S", 0.05)
    monkeypatch.setattr(remote_engine, "PROBE_WHEN_LOST_S", 0.05)
    monkeypatch.setattr(remote_engine, "TIMEOUT_S", PATIENCE)

    async def go() -> None:
        async def until_ready(ready: bool) -> None:
            await until(lambda: engine.health().ready is ready, f"ready is {ready}")

        async with ScriptedPeer() as peer, connected(peer) as engine:
            assert engine.health().ready
            peer.is_well = False
            await until_ready(False)
            peer.is_well = True
            await until_ready(True)
            await peer.close()
            with pytest.raises(Unavailable):
                await engine.submit(sample("hi", PARAMS))
            assert not engine.health().ready, "a request that finds nobody there is believed at once"
            await peer.open(peer.port)
            await until_ready(True)
            assert engine.stats().restarts == 2

    asyncio.run(go())
