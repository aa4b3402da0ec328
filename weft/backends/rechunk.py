"""The cutting of large pieces of an answer into small ones, for engines that give text in one piece.

Joined, the pieces are the text, always.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from weft.backends.contract import ParsedOutput, Stream
from weft.text.parsers.pieces import Content, Piece, Reasoning
from weft.types import Output

_UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
"""Chinese, Japanese and Korean write a character where others write a word."""
_WORD = re.compile(rf"\s*(?:[{_UNSPACED}]|[^\s{_UNSPACED}]+)|\s+")


def split_words(text: str) -> list[str]:
    """Return the words of a text, each with the spaces before it; joined they are the text."""
    return _WORD.findall(text)


def cut_text(text: str, num_tokens: int, size: Callable[[], int]) -> Iterator[str]:
    """A text of so many tokens, cut after every `size()` of them, which is asked before every cut; below 1 it is 1.

    Where the cuts come is a guess. If there are as many words as tokens, or their number is unknown (0), a word is
    a token; else tokens are taken to be of equal length."""
    words = split_words(text)
    units = words if num_tokens in (0, len(words)) else _equal_parts(text, num_tokens)
    start = 0
    while start < len(units):
        end = start + max(1, size())
        if piece := "".join(units[start:end]):
            yield piece
        start = end


def _equal_parts(text: str, num: int) -> list[str]:
    return [text[len(text) * at // num : len(text) * (at + 1) // num] for at in range(num)]


class RechunkedStream(Stream):
    """A stream of text in pieces of so many tokens at most. What else an output has comes with its last piece."""

    def __init__(self, answer: Stream, size: int) -> None:
        self._answer = answer
        self._size = size
        self._waiting: deque[Output] = deque()
        self._num_tokens = 0

    def __aiter__(self) -> RechunkedStream:
        return self

    async def __anext__(self) -> Output:
        if not self._waiting:
            self._waiting.extend(self._cut(await anext(self._answer)))
        return self._waiting.popleft()

    async def aclose(self) -> None:
        self._waiting.clear()
        await self._answer.aclose()

    def _cut(self, output: Output) -> list[Output]:
        before, self._num_tokens = self._num_tokens, max(self._num_tokens, output.usage.completion_tokens)
        whole = output.pieces if isinstance(output, ParsedOutput) else [Content(output.text)]
        # How many tokens each of several pieces has is unknown.
        num_tokens = self._num_tokens - before if len(whole) == 1 else 0
        parts = [part for piece in whole for part in self._parts(piece, num_tokens)]
        if len(parts) <= len(whole):
            return [output]
        usage = replace(output.usage, completion_tokens=before)
        early = replace(output, finish=None, stop_reason=None, error="", queue_seconds=None, usage=usage)
        return [*(_with(early, part) for part in parts[:-1]), _with(output, parts[-1])]

    def _parts(self, piece: Piece, num_tokens: int) -> list[Piece]:
        if not isinstance(piece, (Content, Reasoning)):
            return [piece]
        return [type(piece)(text) for text in cut_text(piece.text, num_tokens, lambda: self._size)]


def _with(output: Output, piece: Piece) -> Output:
    text = piece.text if isinstance(piece, Content) else ""
    if isinstance(output, ParsedOutput):
        return replace(output, text=text, pieces=[piece])
    return replace(output, text=text)
