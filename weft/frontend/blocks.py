"""An answer as a row of blocks: text, thoughts and calls, in the order in which the model wrote them."""

from __future__ import annotations

import enum

from msgspec import Struct

from weft.frontend.reading import Reader
from weft.text.parsers.pieces import CallArguments, CallStarted, Content, Piece, Reasoning
from weft.types import Delta


class Kind(enum.StrEnum):
    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class Block:
    """One of them, as far as it has come. Of a call, the text is its arguments."""

    def __init__(self, index: int, kind: Kind, call_id: str = "", name: str = "") -> None:
        self.index = index
        self.kind = kind
        self.call_id = call_id
        self.name = name
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)


class Opened(Struct, frozen=True):
    block: Block


class Grown(Struct, frozen=True):
    block: Block
    text: str
    """What is new."""


class Closed(Struct, frozen=True):
    block: Block


Change = Opened | Grown | Closed


class Blocks:
    """A reader's pieces put together: neighbours of one kind are one block, and a call ends where another begins."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._open: Block | None = None
        self.all: list[Block] = []

    def push(self, delta: Delta) -> list[Change]:
        """What the next delta of the answer changes; with its end the last block is closed."""
        changes = [change for piece in self._reader.read(delta) for change in self._changes(piece)]
        return changes + self._close() if delta.finish else changes

    def _changes(self, piece: Piece) -> list[Change]:
        match piece:
            case CallStarted(_, call_id, name):
                return self._begin(Kind.CALL, call_id, name)
            case CallArguments(_, text):
                return self._grow(Kind.CALL, text)
            case Content(text):
                return self._grow(Kind.TEXT, text)
            case Reasoning(text):
                return self._grow(Kind.THINKING, text)

    def _grow(self, kind: Kind, text: str) -> list[Change]:
        changes = [] if self._open is not None and self._open.kind is kind else self._begin(kind)
        block = self.all[-1]
        block.add(text)
        return [*changes, Grown(block, text)]

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> list[Change]:
        changes = self._close()
        self._open = Block(len(self.all), kind, call_id, name)
        self.all.append(self._open)
        return [*changes, Opened(self._open)]

    def _close(self) -> list[Change]:
        closed, self._open = self._open, None
        return [] if closed is None else [Closed(closed)]
