"""Runs a parser of streamed text, written as if all text were there: a generator that waits where it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from weft.text.parsers.pieces import Piece, merged

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A step of a parser, which yields when it needs more text and returns its result."""

SPACES = " \t\r\n"


class TextMachine:
    """Runs `_answer` over the text that is pushed.

    A step decides by the next characters alone, never by where a push ends, so every way to cut the text gives the
    same pieces. It takes what it has read before it waits, or holds no more than a marker: time is linear in the text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """The position up to which `_text` is taken."""
        self._ended = False
        self._is_cut = False
        """True when the answer was ended from outside; known with `_ended`."""
        self._held: list[str] = []
        """Text that was taken, and is not yet known to be content or not."""
        self._pieces: list[Piece] = []
        self._plain: tuple[str, Callable[[str], None]] | None = None
        """While `_until` waits with nothing left: the character that it looks for, and where other text goes."""
        self._work = self._answer()

    def push(self, text: str) -> list[Piece]:
        if self._plain is not None and self._plain[0] not in text:
            # Most text is this, a push for every token.
            self._plain[1](text)
            return self._said()
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._work)
        return self._said()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        self._ended = True
        self._is_cut = is_cut
        next(self._work, None)
        return self._said()

    def _answer(self) -> Wait[None]:
        """Takes the whole answer. Returns when it is over, and not before."""
        raise NotImplementedError

    def _said(self) -> list[Piece]:
        said, self._pieces = self._pieces, []
        return merged(said)

    def _peek(self) -> Wait[str]:
        """Return the next character without taking it; empty at the end of the answer."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _next_in(self, characters: str) -> Wait[bool]:
        """Return whether the next character is one of these."""
        char = yield from self._peek()
        return char != "" and char in characters

    def _sees(self, marker: str) -> Wait[bool]:
        """Return whether the text goes on with this marker, without taking it. What a cut left of one is dropped."""
        while not self._text.startswith(marker, self._at):
            rest = self._text[self._at : self._at + len(marker)]
            if not marker.startswith(rest):
                return False
            if self._ended:
                if self._is_cut and self._is_marker(rest):
                    self._take(len(rest))
                return False
            yield
        return True

    def _is_marker(self, beginning: str) -> bool:
        """Return whether the beginning of a marker, at which the answer was cut, is none of the text."""
        return len(beginning) > 1

    def _take(self, count: int) -> str:
        """Take the next characters, which are known to be there."""
        start, self._at = self._at, self._at + count
        return self._text[start : self._at]

    def _take_run(self, run: re.Pattern[str]) -> str:
        """Take as much of the text that is there as matches."""
        found = run.match(self._text, self._at)
        return self._take(found.end() - self._at) if found else ""

    def _skip(self, characters: str) -> Wait[None]:
        """Takes all of these that come next."""
        while (yield from self._next_in(characters)):
            self._at += 1

    def _until(self, marker: str, write: Callable[[str], None]) -> Wait[bool]:
        """Writes the text before the next marker, and takes the marker. False: the answer ended without one."""
        while True:
            found = self._text.find(marker[0], self._at)
            plain = self._take((len(self._text) if found < 0 else found) - self._at)
            if plain:
                write(plain)
            self._plain = marker[0], write
            more = yield from self._peek()
            self._plain = None
            if not more:
                return False
            if (yield from self._sees(marker)):
                self._take(len(marker))
                return True
            if self._text.startswith(marker[0], self._at):
                write(self._take(1))

    def _let_go(self) -> str:
        """Return the text that was held back, and hold nothing any more."""
        held = "".join(self._held)
        self._held.clear()
        return held
