"""Two ways to read an answer, by iterating and by following, give the same deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from tests.waiting import PATIENCE
from weft.backends.native import ONE_EVENT, ImageOutputs, NativeStream
from weft.engine.journal import Entry, Journal
from weft.text.detokenizer import OutputText
from weft.types import ChunkSize, Event, FinishReason, ImageParams, Output, Request, SamplingParams


class ByteTokenizer:
    """A token is a byte."""

    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


class JournalOnly:
    """A client without an engine: the test puts what would come from one."""

    def __init__(self) -> None:
        self.journal = Journal()
        self.aborted: list[str] = []

    def submit(self, request: Request) -> Entry:
        return self.journal.open(request)

    def abort(self, request_id: str) -> None:
        self.journal.close(request_id)
        self.aborted.append(request_id)

    def bring(self, text: str, finish: FinishReason | None = None) -> None:
        """A step for every byte, the last one with the end."""
        *most, last = text.encode()
        for token in most:
            self.journal.record_tokens({"r": token})
        if finish is None:
            self.journal.record_tokens({"r": last})
        else:
            self.journal.record(Event(request_id="r", token_ids=[last], finish=finish))


def answer_of(client: JournalOnly, stop: tuple[str, ...] = (), chunk_size: int = 0) -> NativeStream:
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(max_tokens=100, stop=stop))
    text = OutputText(ByteTokenizer(), request)  # type: ignore[arg-type]
    return NativeStream(client, request, text, ChunkSize(chunk_size))  # type: ignore[arg-type]


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


def test_a_follower_gets_every_token_when_it_comes() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        deltas: list[Output] = []
        following = asyncio.create_task(answer_of(client).follow(deltas.append))
        await asyncio.sleep(0)
        client.bring("abc")
        assert [delta.text for delta in deltas] == ["a", "b", "c"], "without a turn of the event loop"
        client.bring("d", FinishReason.LENGTH)
        await following
        assert [delta.text for delta in deltas] == ["a", "b", "c", "d"]
        assert deltas[-1].finish is FinishReason.LENGTH and deltas[-1].usage.completion_tokens == 4

    run(scenario)


def test_what_came_before_anybody_followed_is_one_delta() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client)
        client.bring("abc", FinishReason.STOP)
        deltas: list[Output] = []
        await answer.follow(deltas.append)
        assert [(delta.text, delta.token_ids, delta.finish) for delta in deltas] == [
            ("abc", [97, 98, 99], FinishReason.STOP)
        ]

    run(scenario)


@pytest.mark.parametrize("is_late", [False, True])
def test_pieces_have_exactly_so_many_tokens_however_late_they_are_read(is_late: bool) -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client, chunk_size=3)
        deltas: list[Output] = []
        if is_late:
            client.bring("abcdefghi", FinishReason.STOP)
        following = asyncio.create_task(answer.follow(deltas.append))
        await asyncio.sleep(0)
        if not is_late:
            client.bring("ab")
            assert [delta.text for delta in deltas] == ["a"], "the first at once, the next when there are three"
            client.bring("cdefghi", FinishReason.STOP)
        await following
        assert [delta.text for delta in deltas] == ["a", "bcd", "efg", "hi"]

    run(scenario)


def test_while_a_delta_is_being_taken_the_next_one_grows() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        deltas: list[Output] = []
        is_taking, go_on = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            is_taking.set()
            await go_on.wait()

        def take(delta: Output) -> Awaitable[None] | None:
            deltas.append(delta)
            return wait() if delta.text == "b" else None

        following = asyncio.create_task(answer_of(client).follow(take))
        await asyncio.sleep(0)
        client.bring("abcd")
        await is_taking.wait()
        client.bring("ef", FinishReason.LENGTH)
        assert [delta.text for delta in deltas] == ["a", "b"]
        go_on.set()
        await following
        assert [delta.text for delta in deltas] == ["a", "b", "cdef"]

    run(scenario)


def test_an_error_in_taking_is_the_followers_and_nobody_elses() -> None:
    async def scenario() -> None:
        client = JournalOnly()

        def take(delta: Output) -> None:
            raise ArithmeticError(delta.text)

        following = asyncio.create_task(answer_of(client).follow(take))
        await asyncio.sleep(0)
        client.bring("ab")
        with pytest.raises(ArithmeticError, match="a"):
            await following
        client.bring("c")

    run(scenario)


def test_a_cancelled_follower_takes_no_more_and_leaves_the_rest_to_be_read() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client)
        deltas: list[Output] = []
        following = asyncio.create_task(answer.follow(deltas.append))
        await asyncio.sleep(0)
        client.bring("a")
        following.cancel()
        client.bring("b")
        with pytest.raises(asyncio.CancelledError):
            await following
        client.bring("c", FinishReason.LENGTH)
        assert [delta.text for delta in deltas] == ["a"]
        assert [delta.text async for delta in answer] == ["bc"]

    run(scenario)


def test_a_stop_string_ends_the_request_at_the_engine() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        deltas: list[Output] = []
        following = asyncio.create_task(answer_of(client, stop=("bc",)).follow(deltas.append))
        await asyncio.sleep(0)
        client.bring("abcd")
        await following
        assert "".join(delta.text for delta in deltas) == "a"
        assert deltas[-1].finish is FinishReason.STOP and deltas[-1].stop_reason == "bc"
        assert client.aborted == ["r"]

    run(scenario)


def test_a_reader_that_gives_up_waiting_misses_nothing() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client)
        reading = asyncio.create_task(anext(answer))
        await asyncio.sleep(0)
        client.bring("a")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        client.bring("b")
        assert (await anext(answer)).text == "ab"
        client.bring("c", FinishReason.LENGTH)
        assert [delta.text async for delta in answer] == ["c"]

    run(scenario)


def test_closing_ends_the_request_and_the_reading() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client)
        client.bring("a")
        await answer.aclose()
        assert client.aborted == ["r"]
        assert [delta async for delta in answer] == []
        await answer.follow(lambda delta: pytest.fail("nothing is left to take"))

    run(scenario)


def test_a_request_that_the_engine_has_ended_is_not_aborted() -> None:
    async def scenario() -> None:
        client = JournalOnly()
        answer = answer_of(client)
        client.bring("ab", FinishReason.STOP)
        assert "".join([output.text async for output in answer]) == "ab"
        await answer.aclose()
        assert client.aborted == []

    run(scenario)


@pytest.mark.parametrize("following", [False, True])
def test_every_step_of_an_image_is_an_output_however_late_it_is_read(following: bool) -> None:
    image = ImageParams(width=2, height=2, steps=3, guidance_scale=1.0, seed=0)
    request = Request(request_id="r", prompt_token_ids=[1], params=SamplingParams(max_tokens=1), image=image)

    async def scenario() -> None:
        client = JournalOnly()
        stream = NativeStream(client, request, ImageOutputs(request, 10), ONE_EVENT)  # type: ignore[arg-type]
        client.journal.record(Event(request_id="r", denoise_step=1, image=b"first"))
        client.journal.record(Event(request_id="r", denoise_step=2, image=b"second"))
        client.journal.record(Event(request_id="r", denoise_step=3, image=b"third", finish=FinishReason.STOP))
        outputs: list[Output] = []
        if following:
            await stream.follow(outputs.append)
        else:
            outputs = [output async for output in stream]
        assert [(output.denoise_step, output.image) for output in outputs] == [
            (1, b"first"),
            (2, b"second"),
            (3, b"third"),
        ]
        assert [output.usage.completion_tokens for output in outputs] == [10, 20, 30]
        assert outputs[-1].finish is FinishReason.STOP and client.aborted == []

    run(scenario)
