"""Answers come in pieces of --stream-chunk-size tokens, whatever pieces their engine gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.backends.openai_server.peer import (
    DONE,
    Asked,
    Reply,
    ScriptedPeer,
    all_of,
    chat_chunk,
    connected,
    text_chunk,
)
from tests.compat.test_adapted import Parrot
from tests.waiting import PATIENCE
from weft import LLM
from weft.backends import create_engine, start_engine
from weft.backends.contract import Conversation, ParsedOutput, Stream
from weft.backends.rechunk import RechunkedStream, split_tokens
from weft.config import load
from weft.text.parsers.pieces import CallArguments, CallStarted, Content, Reasoning
from weft.types import ChunkSize, FinishReason, Output, SamplingParams, TokenLogprob, Usage

pytestmark = pytest.mark.usefixtures("no_weft_environment")

TEXT = "one two three four five six seven eight nine ten"
WORDS = ["one", *(f" {word}" for word in TEXT.split()[1:])]
BY_SIZE = {
    4: ["one", " two three four five", " six seven eight nine", " ten"],
    1: WORDS,
    0: [TEXT],
    99: ["one", TEXT.removeprefix("one")],
}
IN_CHATS = {
    4: [
        [Reasoning("one")],
        [Reasoning(" two three four five")],
        [Reasoning(" six seven eight nine")],
        [Reasoning(" ten"), Content("one two three")],
        [Content(" four five six seven")],
        [Content(" eight nine ten")],
    ],
    1: [[kind(word)] for kind in (Reasoning, Content) for word in WORDS],
    0: [[Reasoning(TEXT)], [Content(TEXT)]],
    99: [[Reasoning("one")], [Reasoning(TEXT.removeprefix("one")), Content(TEXT)]],
}


class Reciter(Parrot):
    """Says all in one piece."""

    def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
        yield TEXT


class Given(Stream):
    def __init__(self, *deltas: Output) -> None:
        self._deltas = list(deltas)
        self.closed = False

    def __aiter__(self) -> Given:
        return self

    async def __anext__(self) -> Output:
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.pop(0)

    async def aclose(self) -> None:
        self.closed = True


def rechunked(size: int, *deltas: Output) -> list[Output]:
    async def go() -> list[Output]:
        return [delta async for delta in RechunkedStream(Given(*deltas), ChunkSize(size))]

    return asyncio.run(go())


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 10, 500])
@pytest.mark.parametrize("text", ["", " ", TEXT, "天气很好，我们去海边吧。", "a" * 30, "\n\n  x\n"])
def test_joined_the_tokens_are_the_text(text: str, num_tokens: int) -> None:
    pieces = split_tokens(text, num_tokens)
    assert "".join(pieces) == text and "" not in pieces


def test_words_are_tokens_where_nobody_counts() -> None:
    assert split_tokens(TEXT, 0) == WORDS
    assert split_tokens("天气很好，", 0) == list("天气很好，")


@pytest.mark.parametrize("size", BY_SIZE)
def test_small_pieces_are_joined_after_the_first(size: int) -> None:
    last = Output(finish=FinishReason.STOP, usage=Usage(prompt_tokens=2, completion_tokens=10))
    deltas = rechunked(size, *(Output(text=word) for word in WORDS), last)
    assert [delta.text for delta in deltas if delta.text] == (BY_SIZE[size] if size else WORDS)
    assert deltas[-1].finish is FinishReason.STOP and deltas[-1].usage == last.usage


def test_outputs_with_token_ids_are_joined_and_never_cut() -> None:
    outputs = [
        Output(text=f"{first}.", token_ids=[*range(first, first + num)], logprobs=[TokenLogprob(-1.0)] * num)
        for first, num in ((0, 1), (1, 2), (3, 5), (8, 1))
    ]
    outputs[0] = replace(outputs[0], queue_seconds=0.5, prompt_logprobs=[])
    deltas = rechunked(4, *outputs, Output(finish=FinishReason.LENGTH))
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("0.", [0]),
        ("1.3.", [1, 2, 3, 4, 5, 6, 7]),
        ("8.", [8]),
    ]
    assert [len(delta.logprobs or ()) for delta in deltas] == [1, 7, 1]
    assert deltas[0].queue_seconds == 0.5 and deltas[0].prompt_logprobs == []


def test_what_has_come_is_given_where_a_stream_ends_without_a_reason() -> None:
    assert [delta.text for delta in rechunked(9, *(Output(text=word) for word in WORDS[:3]))] == ["one", " two three"]


@pytest.mark.parametrize("size", BY_SIZE)
def test_a_class_of_another_package(size: int, add_engine: Callable[..., None]) -> None:
    add_engine("reciter", Reciter)
    with LLM("some/bird", engine="reciter", stream_chunk_size=size) as llm:
        deltas = list(llm.stream("say it"))
    assert [delta.text for delta in deltas if delta.text] == BY_SIZE[size]
    assert deltas[-1].usage == Usage(prompt_tokens=2, completion_tokens=10)


@pytest.mark.parametrize("size", BY_SIZE)
def test_a_remote_server(size: int) -> None:
    async def completion(reply: Reply, asked: Asked) -> None:
        await reply.events(text_chunk(TEXT), text_chunk(finish="stop"))
        await reply.write(DONE)

    async def chat(reply: Reply, asked: Asked) -> None:
        await reply.events(chat_chunk(reasoning_content=TEXT), chat_chunk(content=TEXT), chat_chunk("stop"))
        await reply.write(DONE)

    async def scenario() -> None:
        async with ScriptedPeer(owner="somebody") as peer:
            peer.answers |= {"/v1/completions": completion, "/v1/chat/completions": chat}
            async with connected(peer, stream_chunk_size=size) as engine:
                params = SamplingParams(max_tokens=20)
                deltas = await all_of(engine, "say it", params)
                assert [delta.text for delta in deltas if delta.text] == BY_SIZE[size]
                deltas = await all_of(engine, Conversation(messages=[{"role": "user", "content": "say it"}]), params)
                pieces = [delta.pieces for delta in deltas if isinstance(delta, ParsedOutput) and delta.pieces]
                assert pieces == IN_CHATS[size]

    asyncio.run(scenario())


def test_the_size_changes_while_an_answer_runs(add_engine: Callable[..., None]) -> None:
    """Also to a larger one than the engine was started with, and by a caller of BaseEngine, whose own it is."""
    may_go_on = threading.Event()

    class Hesitant(Parrot):
        def infer(self, prompt: str, **kwargs: Any) -> Generator[str, None, None]:
            yield from WORDS[:3]
            assert may_go_on.wait(PATIENCE)
            yield from WORDS[3:]

    add_engine("hesitant", Hesitant)

    async def start(config: Any) -> Any:
        return await start_engine(load({"engine": "hesitant", "model": "some/bird"}, env={}))

    add_engine("hosted", start)
    engine = create_engine("hosted", stream_chunk_size=1)
    engine.load_model("some/bird")
    chunks = engine.infer("say it", repetition_penalty=1)
    first = [next(chunks) for _ in range(3)]
    engine.stream_chunk_size = 5
    may_go_on.set()
    assert [*first, *chunks] == ["one", " two", " three", " four five six seven eight", " nine ten"]
    engine.unload_model()


def test_the_rest_of_a_delta_comes_with_its_last_piece() -> None:
    whole = Output(
        text="a b c", finish=FinishReason.STOP, stop_reason="x", usage=Usage(prompt_tokens=2, completion_tokens=5)
    )
    first, second, last = rechunked(1, Output(text="z", usage=Usage(completion_tokens=2)), whole)[1:]
    assert [first.text, second.text, last.text] == ["a", " b", " c"]
    assert first.finish is None and first.stop_reason is None and first.usage.completion_tokens == 2
    assert (last.finish, last.stop_reason, last.usage) == (whole.finish, whole.stop_reason, whole.usage)
    ended = Output(finish=FinishReason.ERROR, error="broken")
    assert rechunked(1, ended) == [ended]


def test_calls_stay_whole() -> None:
    call = [CallStarted(0, "call_a", "weather"), CallArguments(0, '{"city": "Oslo", "day": "today"}')]
    alone = ParsedOutput(pieces=call)
    assert rechunked(1, alone) == [alone]
    deltas = rechunked(1, ParsedOutput(text="a b", pieces=[Content("a b"), *call]))
    assert [delta.text for delta in deltas] == ["a", " b", "", ""]
    assert [piece for delta in deltas if isinstance(delta, ParsedOutput) for piece in delta.pieces] == [
        Content("a"),
        Content(" b"),
        *call,
    ]


def test_closing_ends_the_answer() -> None:
    async def scenario() -> None:
        inner = Given(Output(text=TEXT))
        answer = RechunkedStream(inner, ChunkSize(1))
        await anext(answer)
        await answer.aclose()
        assert inner.closed
        with pytest.raises(StopAsyncIteration):
            await anext(answer)

    asyncio.run(scenario())
