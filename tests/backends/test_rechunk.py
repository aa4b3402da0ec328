"""Text that comes in one piece is cut, wherever it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest

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
from weft import LLM
from weft.backends import create_engine, start_engine
from weft.backends.contract import Conversation, ParsedOutput, Stream
from weft.backends.rechunk import RechunkedStream, cut_text
from weft.config import load
from weft.text.parsers.pieces import CallArguments, CallStarted, Content, Reasoning
from weft.types import FinishReason, Output, SamplingParams, Usage

pytestmark = pytest.mark.usefixtures("no_weft_environment")

TEXT = "one two three four five six seven eight nine ten"
BY_SIZE = {
    4: ["one two three four", " five six seven eight", " nine ten"],
    0: [word if word == "one" else f" {word}" for word in TEXT.split()],
    99: [TEXT],
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


def cut(size: int, *deltas: Output) -> list[Output]:
    async def go() -> list[Output]:
        return [delta async for delta in RechunkedStream(Given(*deltas), size)]

    return asyncio.run(go())


@pytest.mark.parametrize("size", [1, 2, 4, 7, -1])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 10, 500])
@pytest.mark.parametrize("text", ["", " ", TEXT, "天气很好，我们去海边吧。", "a" * 30, "\n\n  x\n"])
def test_joined_the_pieces_are_the_text(text: str, num_tokens: int, size: int) -> None:
    pieces = list(cut_text(text, num_tokens, lambda: size))
    assert "".join(pieces) == text and "" not in pieces


@pytest.mark.parametrize("size", BY_SIZE)
def test_words_are_tokens_where_nobody_counts(size: int) -> None:
    assert list(cut_text(TEXT, 0, lambda: size)) == BY_SIZE[size]
    assert list(cut_text("天气很好，", 0, lambda: 2)) == ["天气", "很好", "，"]


@pytest.mark.parametrize("size", BY_SIZE)
def test_a_class_of_another_package(size: int, add_engine: Callable[..., None]) -> None:
    add_engine("reciter", Reciter)
    with LLM("some/bird", engine="reciter", stream_chunk_size=size) as llm:
        deltas = list(llm.stream("say it"))
    assert [delta.text for delta in deltas] == [*BY_SIZE[size], ""]
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
                assert [delta.text for delta in deltas] == [*BY_SIZE[size], ""]
                deltas = await all_of(engine, Conversation(messages=[{"role": "user", "content": "say it"}]), params)
                pieces = [piece for delta in deltas if isinstance(delta, ParsedOutput) for piece in delta.pieces]
                assert pieces == [*map(Reasoning, BY_SIZE[size]), *map(Content, BY_SIZE[size])]

    asyncio.run(scenario())


def test_a_caller_that_waits_changes_the_size_while_it_reads(add_engine: Callable[..., None]) -> None:
    """Also to a larger one than the engine was started with."""
    add_engine("reciter", Reciter)

    async def start(config: Any) -> Any:
        return await start_engine(load({"engine": "reciter", "model": "some/bird"}, env={}))

    add_engine("hosted", start)
    engine = create_engine("hosted", stream_chunk_size=1)
    engine.load_model("some/bird")
    chunks = engine.infer("say it", repetition_penalty=1)
    first = next(chunks)
    engine.stream_chunk_size = 5
    assert [first, *chunks] == ["one", " two three four five six", " seven eight nine ten"]
    engine.unload_model()


def test_the_rest_of_a_delta_comes_with_its_last_piece() -> None:
    whole = Output(
        text="a b c", finish=FinishReason.STOP, stop_reason="x", usage=Usage(prompt_tokens=2, completion_tokens=5)
    )
    first, second, last = cut(1, Output(text="z", usage=Usage(completion_tokens=2)), whole)[1:]
    assert [first.text, second.text, last.text] == ["a", " b", " c"]
    assert first.finish is None and first.stop_reason is None and first.usage.completion_tokens == 2
    assert (last.finish, last.stop_reason, last.usage) == (whole.finish, whole.stop_reason, whole.usage)
    ended = Output(finish=FinishReason.ERROR, error="broken")
    assert cut(1, ended) == [ended]


def test_calls_stay_whole() -> None:
    call = [CallStarted(0, "call_a", "weather"), CallArguments(0, '{"city": "Oslo", "day": "today"}')]
    alone = ParsedOutput(pieces=call)
    assert cut(1, alone) == [alone]
    deltas = cut(1, ParsedOutput(text="a b", pieces=[Content("a b"), *call]))
    assert [delta.text for delta in deltas] == ["a", " b", "", ""]
    assert [piece for delta in deltas if isinstance(delta, ParsedOutput) for piece in delta.pieces] == [
        Content("a"),
        Content(" b"),
        *call,
    ]


def test_closing_ends_the_answer() -> None:
    async def scenario() -> None:
        inner = Given(Output(text=TEXT))
        answer = RechunkedStream(inner, 1)
        await anext(answer)
        await answer.aclose()
        assert inner.closed
        with pytest.raises(StopAsyncIteration):
            await anext(answer)

    asyncio.run(scenario())
