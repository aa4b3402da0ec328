"""The pieces that a parser makes of a model's text: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace


class Content(Struct, frozen=True):
    """The next part of the answer itself."""

    text: str


class Reasoning(Struct, frozen=True):
    """The next part of what the model thought before it answered."""

    text: str


class CallStarted(Struct, frozen=True):
    """The start of a tool call: its name is known and its arguments have begun."""

    index: int
    id: str
    name: str


class CallArguments(Struct, frozen=True):
    """The next part of a call's arguments. The texts of one call, joined, are its arguments as JSON."""

    index: int
    text: str


class CustomCallStarted(CallStarted, frozen=True):
    """The start of a call of a custom tool."""


class CustomCallInput(CallArguments, frozen=True):
    """The next part of a custom tool's input, which is plain text."""


Piece = Content | Reasoning | CallStarted | CallArguments


class Parser(Protocol):
    """A parser takes one answer's text as it comes, and gives its pieces.

    However the text is cut into pushes, the pieces say the same. What was given is never taken back. Without
    streaming, push the whole text at once.
    """

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain now; what could still become a marker or a call is held back."""

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return what was held back, now that the answer is over. Nothing may be pushed later.

        `is_cut`: the answer was ended from outside, by its length or a stop string. What had begun as a call or a
        marker is no content then: of a call its name is given, if that is known, and of a marker nothing.
        """


class PlainParser:
    """The parser of answers without tools and reasoning: all text is content."""

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        return []


class ToolCall(Struct, frozen=True):
    id: str
    name: str
    arguments: str
    """JSON as the model wrote it; not valid JSON when the model wrote none, or was cut off."""
    is_custom: bool = False
    """The arguments are the input of a custom tool, which is plain text."""


class ParsedAnswer(Struct, frozen=True):
    """The pieces of one answer, joined."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def collect(pieces: Iterable[Piece]) -> ParsedAnswer:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallStarted] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStarted():
                calls.append(piece)
                arguments.append([])
            case CallArguments(index, text):
                arguments[index].append(text)
    return ParsedAnswer(
        content="".join(content),
        reasoning="".join(reasoning),
        tool_calls=tuple(
            ToolCall(call.id, call.name, "".join(texts), isinstance(call, CustomCallStarted))
            for call, texts in zip(calls, arguments, strict=True)
        ),
    )


def merged(pieces: list[Piece]) -> list[Piece]:
    """Join neighbouring pieces of one kind."""
    if len(pieces) < 2:
        return pieces
    result: list[Piece] = []
    for _, neighbours in groupby(pieces, _kind):
        first, *rest = neighbours
        if rest and not isinstance(first, CallStarted):
            text = "".join(piece.text for piece in (first, *rest) if not isinstance(piece, CallStarted))
            first = replace(first, text=text)
        result.append(first)
    return result


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    return type(piece), piece.index if isinstance(piece, CallStarted | CallArguments) else 0


class CallShape(Struct, frozen=True, kw_only=True):
    """The literal texts around the names and arguments of an answer that calls tools.

    They are opening, then for each call before_name NAME before_arguments ARGUMENTS after_arguments, with separator
    between two calls, then closing. NAME is a tool's name as it is, ARGUMENTS a JSON object that fits its schema.
    """

    opening: str = ""
    before_name: str
    before_arguments: str
    after_arguments: str = ""
    separator: str
    closing: str = ""

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text that makes these calls, each a name and its arguments as JSON."""
        written = (
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_arguments}"
            for name, arguments in calls
        )
        return self.opening + self.separator.join(written) + self.closing
