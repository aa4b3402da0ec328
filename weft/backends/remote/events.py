"""Server-sent events, read strictly from bytes that are cut anywhere."""

from __future__ import annotations

MAX_EVENT_BYTES = 8 << 20
"""Of one event: a peer must not fill this process's memory with a line that never ends."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLong(ValueError):
    """More came without an end than any event has."""


class EventReader:
    """Gives the data of every event, once it is whole. Comments, and fields other than `data`, are read over: this
    interface gives them no meaning."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a line."""
        self._data: list[bytes] = []
        self._size = 0
        """Of the data so far."""
        self._begun = False
        self._at_return = False
        """Whether the last byte was a carriage return."""

    def push(self, more: bytes) -> list[bytes]:
        """The data of the events that are complete now; raises EventTooLong."""
        if self._at_return and more.startswith(b"\n"):
            # The second half of an end of line, whose first half has done.
            more = more[1:]
            self._at_return = False
        if more:
            self._at_return = more.endswith(b"\r")
        self._rest += more
        events: list[bytes] = []
        for line in self._lines() if b"\n" in more or b"\r" in more else ():
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._rest) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event has more than {MAX_EVENT_BYTES >> 20} MiB")
        return events

    def _lines(self) -> list[bytes]:
        """The lines that have an end: a line feed, a carriage return, or both."""
        lines = bytes(self._rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = bytearray(lines.pop())
        if lines and not self._begun:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            self._begun = True
        return lines

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(line)
