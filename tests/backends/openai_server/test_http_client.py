from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.backends.openai_server.http_client import MAX_EVENT_BYTES, EventReader, EventTooLong


def read(*pieces: bytes) -> list[bytes]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.push(piece)]


@pytest.mark.parametrize(
    ("stream", "events"),
    {
        "one": (b"data: a\n\n", [b"a"]),
        "no space": (b"data:a\n\n", [b"a"]),
        "one space goes, the others stay": (b"data:  a \n\n", [b" a "]),
        "several lines": (b"data: a\ndata: b\n\n", [b"a\nb"]),
        "an empty line of data": (b"data\ndata: b\n\n", [b"\nb"]),
        "comments": (b": waiting\n\ndata: a\n: hm\ndata: b\n\n:\n\n", [b"a\nb"]),
        "other fields": (b"event: x\nid: 7\nretry: 10\ndata: a\n\n", [b"a"]),
        "an event without data": (b"event: x\n\ndata: a\n\n", [b"a"]),
        "carriage returns": (b"data: a\r\n\r\ndata: b\r\rdata: c\n\r\n", [b"a", b"b", b"c"]),
        "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        "a colon in the data": (b'data: {"a": 1}\n\n', [b'{"a": 1}']),
        "cut off": (b"data: a\n\ndata: b\n", [b"a"]),
    }.values(),
)
def test_events(stream: bytes, events: list[bytes]) -> None:
    assert read(stream) == events
    assert read(*(bytes([byte]) for byte in stream)) == events


EVENT = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1, max_size=3)


@given(st.lists(EVENT, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_it_does_not_matter_where_the_bytes_are_cut(events: list[list[str]], end: str, data: st.DataObject) -> None:
    """Not even within a character or between the two halves of a line's end."""
    stream = "".join("".join(f"data: {line}{end}" for line in event) + end for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[start:stop] for start, stop in pairwise(edges)]
    assert read(*pieces) == ["\n".join(event).encode() for event in events]


def test_an_event_that_does_not_end_is_not_kept_for_ever() -> None:
    reader = EventReader()
    reader.push(b"data: " + b"x" * (MAX_EVENT_BYTES - 100))
    with pytest.raises(EventTooLong):
        reader.push(b"x" * 200)
    many_lines = EventReader()
    with pytest.raises(EventTooLong):
        for _ in range(20):
            many_lines.push(b"data: " + b"x" * (MAX_EVENT_BYTES // 10) + b"\n")
