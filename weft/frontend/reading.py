"""How a chat's answer is read: its reasoning, its content and its tool calls, each in its place."""

from __future__ import annotations

from msgspec import Struct

from weft.text.grammars.specs import Thinking
from weft.text.parsers.pieces import CallArguments, CallStarted, Parser, Piece, PlainParser, Reasoning
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import ToolStyle, parser_for


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
    is_named_call: bool = False
    """The answer is a call of the tool that the request named: OpenAI does not call that a reason to stop."""

    @property
    def is_plain(self) -> bool:
        """All text is content."""
        return self.tools is None and self.reasoning is None

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

    def parser(self) -> Parser:
        """For one answer."""
        if self.is_plain:
            return PlainParser()
        parser = parser_for(self.tools, self.reasoning, declared=self.declared, reasoning_opened=self.reasoning_opened)
        return parser if self.with_reasoning and self.most_calls is None else _Sieve(parser, self)


class _Sieve:
    """Leaves out what the request does not want to see."""

    def __init__(self, parser: Parser, reading: Reading) -> None:
        self._parser = parser
        self._reading = reading

    def push(self, text: str) -> list[Piece]:
        return self._kept(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return self._kept(self._parser.finish())

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._keeps(piece)]

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case Reasoning():
                return self._reading.with_reasoning
            case CallStarted(index=index) | CallArguments(index=index):
                return self._reading.most_calls is None or index < self._reading.most_calls
            case _:
                return True
