"""Frames on a stream socket: whole, in pieces, several at once, and what is no frame at all."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import wire_costs
from tests.scheduler.simulation import request
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    ControlCall,
    FromEngine,
    Heartbeat,
    Inbox,
    Shutdown,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    frame,
    receive,
    receive_from,
    write_frame,
)
from weft.engine_stats import EngineStats
from weft.payloads import PromptEmbeds
from weft.types import Event, MixedPrompt, ResetPrefixCache, StartProfile

MESSAGES: list[FromEngine] = [
    Heartbeat(0.5),
    Started(["a", "b"]),
    StepOutput({"a": 1, "b": 70000}, [Event(request_id="c", token_ids=[5], cached_tokens=0)], EngineStats(running=3)),
    StepOutput({}, [], EngineStats()),
]
NO_MESSAGES = [struct.pack("<I", 2**31), struct.pack("<I", 3) + b"\xc1\xc1\xc1"]


async def read_all(inbox: Inbox) -> list[FromEngine]:
    messages = []
    while (message := await inbox.read()) is not None:
        messages.append(message)
    return messages


@settings(max_examples=100)
@given(cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=8))
def test_messages_come_out_however_their_bytes_are_cut(cuts: list[int]) -> None:
    data = b"".join(map(frame, MESSAGES))
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})

    async def scenario() -> list[FromEngine]:
        inbox = Inbox()
        reading = asyncio.create_task(read_all(inbox))
        for begin, end in itertools.pairwise(bounds):
            inbox.data_received(data[begin:end])
            await asyncio.sleep(0)
        inbox.connection_lost(None)
        return await reading

    assert asyncio.run(scenario()) == MESSAGES


def test_half_a_frame_at_the_end_is_the_end() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        inbox.data_received(frame(Heartbeat(1.0)) + frame(Heartbeat(2.0))[:-1])
        inbox.connection_lost(ConnectionResetError())
        assert await inbox.read() == Heartbeat(1.0)
        assert await inbox.read() is None

    asyncio.run(scenario())


@pytest.mark.parametrize("data", NO_MESSAGES)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    async def scenario() -> None:
        inbox = Inbox()
        inbox.data_received(data)
        with pytest.raises(BrokenFrame):
            await inbox.read()

    asyncio.run(scenario())


def read_to_the_end(data: bytes) -> list[ToEngine]:
    """As an engine on an event loop does."""

    async def scenario() -> list[ToEngine]:
        reader, messages = asyncio.StreamReader(), []
        reader.feed_data(data)
        reader.feed_eof()
        while (message := await receive_from(reader)) is not None:
            messages.append(message)
        return messages

    return asyncio.run(scenario())


def test_an_engine_on_an_event_loop_reads_the_same_frames() -> None:
    sent = [Abort(["a"]), ControlCall(3, StartProfile("/folder")), ControlCall(4, ResetPrefixCache()), Shutdown()]
    assert read_to_the_end(b"".join(map(frame, sent)) + frame(Shutdown())[:-1]) == sent
    for data in NO_MESSAGES:
        with pytest.raises(BrokenFrame):
            read_to_the_end(data)


def test_the_command_behind_the_decision_s_figures_measures_every_encoding() -> None:
    measured = wire_costs.measure(seconds=0, repeat=1)
    assert measured.keys() == wire_costs.MESSAGES.keys()
    for costs in measured.values():
        assert costs["msgspec, msgpack"].num_bytes == min(cost.num_bytes for cost in costs.values())
        assert all(cost.encode_us > 0 and cost.decode_us > 0 for cost in costs.values())


def test_a_message_with_tensors_arrives_whole() -> None:
    rows = PromptEmbeds(data=memoryview(bytes(range(250)) * 16_000), shape=(1000, 1000), dtype="float32")
    asked = request("r", MixedPrompt.of([[1], rows]))

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_unix_connection(Inbox, sock=ours)
        write_frame(transport, Submit([asked]))
        write_frame(transport, Abort(["r"]))
        received = [await asyncio.to_thread(receive, theirs) for _ in range(2)]
        assert received == [Submit([asked]), Abort(["r"])]
        transport.close()
        theirs.close()

    asyncio.run(scenario())


def follow_all(pieces: list[bytes], stop_at: Heartbeat | None = None) -> list[FromEngine]:
    """What is taken of pieces of bytes that arrive one after the other, before the other side is gone."""
    taken: list[FromEngine] = []

    def take(message: FromEngine) -> bool:
        taken.append(message)
        return message == stop_at

    async def scenario() -> None:
        inbox = Inbox()
        inbox.data_received(pieces[0])
        following = asyncio.create_task(inbox.follow_messages(take))
        await asyncio.sleep(0)
        for piece in pieces[1:]:
            inbox.data_received(piece)
        num_taken = len(taken)
        inbox.connection_lost(None)
        await following
        assert len(taken) == num_taken, "messages are taken as they arrive"

    asyncio.run(scenario())
    return taken


def test_messages_are_taken_as_they_arrive_until_one_says_stop() -> None:
    sent = [Heartbeat(float(number)) for number in range(4)]
    whole = b"".join(map(frame, sent))
    assert follow_all([whole]) == sent
    assert follow_all([whole[i : i + 1] for i in range(len(whole))]) == sent
    assert follow_all([whole[:9], whole[9:]], stop_at=sent[1]) == sent[:2]
    assert follow_all([b"", whole], stop_at=sent[0]) == sent[:1]


def test_what_a_taker_raises_is_raised_where_it_is_followed() -> None:
    broken = struct.pack("<I", 3) + b"\xff\xff\xff"
    for pieces in ([broken], [frame(Heartbeat(1.0)), broken], [b"", broken[:2], broken[2:]]):
        with pytest.raises(BrokenFrame):
            follow_all(pieces)
