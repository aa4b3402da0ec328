"""The laws of the buffer, for any timing of the chunks and of whoever sends them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import virtual_time
from weft.api.grpc.prediction import ChunkBuffer

INTERVAL, SLOWEST = 0.05, 2.0

chunks = st.lists(
    st.tuples(st.sampled_from([0.0, 0.001, 0.01, 0.04, 0.05, 0.2]), st.text(min_size=1, max_size=4)), max_size=40
)


async def passed(
    chunks: list[tuple[float, str]], size: int, sending_s: float, slowest_s: float
) -> list[tuple[float, str]]:
    """The messages, with the times at which they left. A chunk comes so many seconds after the one before."""
    buffer = ChunkBuffer(size, INTERVAL, slowest_s)

    async def put() -> None:
        for pause, chunk in chunks:
            await virtual_time.sleep(pause)
            if (room := buffer.put(chunk)) is not None:
                await room
        buffer.end()

    putting = asyncio.create_task(put())
    sent = []
    async for text in buffer:
        sent.append((virtual_time.now(), text))
        await virtual_time.sleep(sending_s)
    await putting
    return sent


def messages(
    chunks: list[tuple[float, str]], size: int = 8, sending_s: float = 0.0, slowest_s: float = 0.0
) -> list[tuple[float, str]]:
    return virtual_time.run(passed(chunks, size, sending_s, slowest_s))


@given(chunks, st.integers(1, 9), st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([0.0, SLOWEST]))
def test_the_text_is_the_same_for_any_timing(
    chunks: list[tuple[float, str]], size: int, sending_s: float, slowest_s: float
) -> None:
    sent = messages(chunks, size, sending_s, slowest_s)
    assert "".join(text for _, text in sent) == "".join(chunk for _, chunk in chunks)
    assert all(text for _, text in sent)


@given(chunks, st.integers(1, 9), st.sampled_from([0.0, 0.06, 0.12]))
def test_no_chunk_waits_longer_than_the_interval(chunks: list[tuple[float, str]], size: int, slowest_s: float) -> None:
    sent = messages(chunks, size, slowest_s=slowest_s)
    left = [time for time, text in sent for _ in text]
    came, now = [], 0.0
    for pause, chunk in chunks:
        now += pause
        came += [now] * len(chunk)
    assert all(out - into <= max(INTERVAL, slowest_s) + 1e-6 for into, out in zip(came, left, strict=True))


@given(chunks.filter(bool), st.integers(1, 9))
def test_the_first_chunk_leaves_at_once(chunks: list[tuple[float, str]], size: int) -> None:
    time, text = messages(chunks, size)[0]
    assert time == chunks[0][0]
    assert text.startswith(chunks[0][1])


def test_a_fast_answer_leaves_in_eights() -> None:
    sent = messages([(0.001, str(i % 10)) for i in range(33)])
    assert [len(text) for _, text in sent] == [1, 8, 8, 8, 8]


def test_a_slow_answer_leaves_by_the_clock() -> None:
    sent = messages([(0.02, str(i)) for i in range(8)])
    assert [text for _, text in sent] == ["0", "123", "456", "7"]
    assert [round(time, 3) for time, _ in sent] == [0.02, 0.09, 0.15, 0.16]


@pytest.mark.parametrize("gap", [0.04, 0.05, 0.2, 0.6])
def test_of_an_answer_slower_than_the_interval_more_than_half_of_the_messages_are_saved(gap: float) -> None:
    sent = messages([(gap, str(i % 10)) for i in range(41)], slowest_s=SLOWEST)
    assert len(sent) < 41 / 2
    assert all(len(text) == 3 for _, text in sent[2:-1])
    alone = messages([(gap, str(i % 10)) for i in range(41)])
    assert gap <= INTERVAL or len(alone) == 41


def test_an_answer_slower_than_the_longest_wait_leaves_as_it_comes() -> None:
    sent = messages([(3.0, str(i)) for i in range(5)], slowest_s=SLOWEST)
    assert [text for _, text in sent] == list("01234")
    assert [round(time, 3) for time, _ in sent[1:-1]] == [8.0, 11.0, 14.0]


def test_a_stalled_answer_does_not_keep_its_tail() -> None:
    sent = messages([(0.0, "a"), (0.001, "b"), (0.001, "c"), (60.0, "d")])
    assert [(round(time, 3), text) for time, text in sent] == [(0.0, "a"), (0.051, "bc"), (60.002, "d")]


def test_a_size_of_one_joins_nothing() -> None:
    assert [text for _, text in messages([(0.001, str(i)) for i in range(5)], size=1)] == list("01234")


def test_an_answer_without_text_sends_nothing() -> None:
    assert messages([]) == []


def test_a_slow_reader_holds_up_who_puts() -> None:
    """What is held never grows beyond the size: the next chunk is not asked for."""

    async def scenario() -> None:
        buffer = ChunkBuffer(4, INTERVAL, SLOWEST)
        assert [buffer.put(chunk) for chunk in "abc"] == [None] * 3
        room = buffer.put("d")
        assert room is not None and not room.done()
        assert await anext(buffer) == "abcd"
        assert room.done()

    virtual_time.run(scenario())


def test_the_time_while_another_message_is_on_its_way_counts() -> None:
    sent = messages([(0.0, "a"), (0.01, "b"), (10.0, "c")], sending_s=0.2)
    assert [(round(time, 3), text) for time, text in sent] == [(0.0, "a"), (0.2, "b"), (10.01, "c")]
