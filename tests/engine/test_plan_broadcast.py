"""Messages through shared memory: in their order, each once, of any size, to every reader."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weft.engine.plan_broadcast import MAX_READERS, NUM_SLOTS, SLOT_BYTES, PlanReader, PlanWriter
from weft.errors import ConfigError

SIZES = [0, 1, 1000, SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES, 7]


def message(number: int) -> bytes:
    size = SIZES[number % len(SIZES)]
    return (number.to_bytes(4) * (size // 4 + 1))[:size]


def test_every_reader_reads_every_message_in_order() -> None:
    """Many times around the ring; the writer waits for the slowest."""
    writer = PlanWriter(3)
    count = 60
    expected = [message(number) for number in range(count)]
    readers = [PlanReader(writer.path, number) for number in (1, 2, 3)]
    with ThreadPoolExecutor(3) as threads:
        reading = [threads.submit(lambda one=one: [one.read(lambda: True) for _ in range(count)]) for one in readers]
        for one in expected:
            writer.write(one, lambda: True)
        assert all(future.result() == expected for future in reading)


def test_a_slot_is_not_used_again_before_all_have_read_it() -> None:
    writer = PlanWriter(2)
    quick, slow = (PlanReader(writer.path, number) for number in (1, 2))
    for number in range(NUM_SLOTS):
        writer.write(b"%d" % number, lambda: True)
    assert [quick.read(lambda: True) for _ in range(NUM_SLOTS)] == [b"0", b"1", b"2", b"3"]
    written = threading.Event()

    def write_one_more() -> None:
        writer.write(b"more", lambda: True)
        written.set()

    thread = threading.Thread(target=write_one_more)
    thread.start()
    assert not written.is_set()
    assert [slow.read(lambda: True) for _ in range(NUM_SLOTS + 1)] == [b"0", b"1", b"2", b"3", b"more"]
    thread.join()
    assert quick.read(lambda: True) == b"more"


def test_neither_side_waits_for_one_that_is_gone() -> None:
    writer = PlanWriter(1)
    reader = PlanReader(writer.path, 1)
    assert reader.read(lambda: False) is None
    for _ in range(NUM_SLOTS):
        writer.write(b"unread", lambda: False)
    writer.write(b"lost", lambda: False)
    assert [reader.read(lambda: False) for _ in range(NUM_SLOTS + 1)] == [b"unread"] * NUM_SLOTS + [None]


def test_memory_of_large_messages_is_given_back() -> None:
    writer = PlanWriter(1)
    reader = PlanReader(writer.path, 1)
    before = len([*Path("/proc/self/fd").iterdir()])
    for number in range(5 * NUM_SLOTS):
        writer.write(bytes(SLOT_BYTES + number + 1), lambda: True)
        assert len(reader.read(lambda: True) or b"") == SLOT_BYTES + number + 1
    assert len([*Path("/proc/self/fd").iterdir()]) - before <= NUM_SLOTS


def test_there_are_no_more_readers_than_counters() -> None:
    with pytest.raises(ConfigError, match="cannot be above 64"):
        PlanWriter(MAX_READERS + 1)
