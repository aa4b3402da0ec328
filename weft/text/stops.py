"""Stop strings in streamed text: found wherever the stream is cut, and never leaked in part."""

from __future__ import annotations

from msgspec import Struct

from weft.errors import InvalidRequest


class StopMatch(Struct, frozen=True):
    """Text that may be shown now, and the stop string that ended it, once one has."""

    text: str
    matched: str | None = None


class _Pattern:
    """One stop string, and how much of it the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.progress = 0
        self._fallback = [0] * len(stop)
        """For each length of match, less one: the next shorter beginning of the stop string that also fits."""
        length = 0
        for at in range(1, len(stop)):
            while length and stop[at] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[at] == stop[length]
            self._fallback[at] = length

    def feed(self, char: str) -> bool:
        """Take one more character; True when it completes the stop string, after which nothing may be fed."""
        while self.progress and char != self.stop[self.progress]:
            self.progress = self._fallback[self.progress - 1]
        self.progress += char == self.stop[self.progress]
        return self.progress == len(self.stop)


class StopStrings:
    """Watches one output for its stop strings.

    The earliest match is the first to be complete, so that generation can end there; of several that are complete
    at the same character, the longest. After a match the output is over, and text pushed later is dropped.
    """

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        if "" in stops:
            raise InvalidRequest("A stop string is empty.", param="stop")
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> StopMatch:
        """The text that is safe to show, less what could still become a stop string."""
        if not self._patterns:
            return StopMatch(text)
        if self._matched is not None:
            return StopMatch("", self._matched)
        for at, char in enumerate(text):
            complete = [pattern.stop for pattern in self._patterns if pattern.feed(char)]
            if complete:
                return self._end(self._held + text[: at + 1], complete[0])
        shown = self._held + text
        safe = len(shown) - max(pattern.progress for pattern in self._patterns)
        self._held = shown[safe:]
        return StopMatch(shown[:safe])

    def flush(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> StopMatch:
        self._matched, self._held = stop, ""
        return StopMatch(text if self._include else text[: -len(stop)], stop)
