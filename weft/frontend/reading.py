"""How a chat's answer is read: its reasoning, its content and its tool calls, each in its place."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from weft.backends.contract import ReadDelta
from weft.text.grammars.specs import Thinking
from weft.text.parsers.pieces import CallArguments, CallStarted, Parser, Piece, PlainParser, Reasoning
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle, parser_for
from weft.types import Delta


class Reading(Struct, frozen=True, kw_only=True):
    tools: ToolStyle | None = None
    """None: the request has no tools, or may not call them."""
    declared: tuple[str, ...] = ()
    """The names of the request's tools."""
    most_calls: int | None = None
    reasoning: ReasoningStyle | None = None
    reasoning_opened: bool = False
    """Whether the prompt's own end has opened the reasoning."""
    with_reasoning: bool = True
    is_read: bool = False
    """The engine tells thoughts and calls apart itself."""
    is_named_call: bool = False
    """The answer is a call of the tool that the request named: OpenAI does not call that a reason to stop."""

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.tools is None and self.reasoning is None and not self.is_read

    @property
    def markers(self) -> tuple[str, ...]:
        tools = self.tools.markers if self.tools is not None else ()
        return tools + ((self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ())

    @property
    def thinking(self) -> Thinking | None:
        """What may stand before an output that is in form."""
        if self.reasoning is None:
            return None
        return Thinking(begin=self.reasoning.begin, end=self.reasoning.end, is_open=self.reasoning_opened)

    def reader(self) -> Reader:
        """For one answer."""
        return Reader(self)

    def parser(self) -> Parser:
        if self.tools is None and self.reasoning is None:
            return PlainParser()
        return parser_for(self.tools, self.reasoning, declared=self.declared, reasoning_opened=self.reasoning_opened)


class Reader:
    """The pieces of one answer's deltas, without those that the request does not want to see."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._parser = reading.parser()

    def read(self, delta: Delta) -> list[Piece]:
        """With the last delta, whatever was held back comes too."""
        if isinstance(delta, ReadDelta):
            return self._kept(delta.pieces)
        pieces = self._parser.push(delta.text)
        return self._kept([*pieces, *self._parser.finish()] if delta.finish else pieces)

    def _kept(self, pieces: Iterable[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._keeps(piece)]

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case Reasoning():
                return self._reading.with_reasoning
            case CallStarted(index=index) | CallArguments(index=index):
                return self._reading.most_calls is None or index < self._reading.most_calls
            case _:
                return True
