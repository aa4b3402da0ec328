"""Parses the reasoning before an answer: `<think>` ... `</think>`."""

from __future__ import annotations

from msgspec import Struct

from weft.text.parsers.pieces import Parser, Piece, Reasoning
from weft.text.parsers.streaming import SPACES, TextMachine, Wait

_NEWLINES = "\r\n"


class ReasoningStyle(Struct, frozen=True):
    """The marks that a model puts around its reasoning."""

    name: str
    begin: str
    end: str

    def fits(self, chat_template: str) -> bool:
        return self.begin in chat_template or self.end in chat_template


class ReasoningParser(TextMachine):
    """The parser of reasoning, which stands only at the beginning of an answer; what follows goes to the content
    parser.

    Newlines next to a mark belong to the mark. Reasoning that is never closed is all reasoning.
    """

    def __init__(self, style: ReasoningStyle, content: Parser, opened: bool = False) -> None:
        """`opened` means that the prompt ended inside reasoning (see `opens_reasoning`), so the answer begins there."""
        super().__init__()
        self._style = style
        self._content = content
        self._opened = opened
        self._over = False
        """True behind the reasoning: all that comes is content."""

    def push(self, text: str) -> list[Piece]:
        return self._content.push(text) if self._over else super().push(text)

    def _answer(self) -> Wait[None]:
        while (yield from self._next_in(SPACES)):
            self._held.append(self._take(1))
        if (yield from self._sees(self._style.begin)):
            self._take(len(self._style.begin))
            self._held.clear()
            self._opened = True
        before = self._let_go()
        if self._opened:
            before = before.lstrip(_NEWLINES)
            if not before:
                yield from self._skip(_NEWLINES)
            self._reasoning(before)
            closed = yield from self._until(self._style.end, self._reasoning)
            newlines = self._let_go()
            if newlines and not closed:
                self._pieces.append(Reasoning(newlines))
            yield from self._skip(_NEWLINES)
        elif before:
            self._pieces += self._content.push(before)
        yield from self._peek()
        self._pieces += self._content.push(self._take(len(self._text) - self._at))
        self._over = True
        if not self._ended:
            yield
        self._pieces += self._content.finish(is_cut=self._is_cut)

    def _reasoning(self, text: str) -> None:
        body = text.rstrip(_NEWLINES)
        if body:
            self._pieces.append(Reasoning(self._let_go() + body))
        if len(body) < len(text):
            self._held.append(text[len(body) :])


def opens_reasoning(style: ReasoningStyle, prompt_tail: str) -> bool:
    """Return whether a prompt with this end has opened the reasoning for the model, as some chat templates do."""
    return prompt_tail.rstrip(SPACES).endswith(style.begin)
