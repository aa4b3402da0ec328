"""The pieces of an answer from an engine that gives it in pieces of its own: small ones are joined, large ones cut.

Joined, the pieces are the text, always.
"""

from __future__ import annotations

import re
from collections import deque

from msgspec.structs import replace

from weft.backends.contract import ParsedOutput, Stream
from weft.text.parsers.pieces import Content, Piece, Reasoning
from weft.types import ChunkSize, Output

_UNSPACED = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
"""Chinese, Japanese and Korean write a character where others write a word."""
_WORD = re.compile(rf"\s*(?:[{_UNSPACED}]|[^\s{_UNSPACED}]+)|\s+")


def split_words(text: str) -> list[str]:
    """Return the words of a text, each with the spaces before it; joined they are the text."""
    return _WORD.findall(text)


def split_tokens(text: str, num_tokens: int) -> list[str]:
    """Return a text of so many tokens as one piece for each; joined they are the text.

    Where the cuts come is a guess. If there are as many words as tokens, or their number is unknown (0), a word is a
    token; else tokens are taken to be of equal length."""
    words = split_words(text)
    if num_tokens in (0, len(words)):
        return words
    parts = [text[len(text) * at // num_tokens : len(text) * (at + 1) // num_tokens] for at in range(num_tokens)]
    return [part for part in parts if part]


class RechunkedStream(Stream):
    """A stream in pieces of so many tokens: the first token at once, then `chunk_size` at a time, then the rest.

    Outputs with token ids are joined, and never cut. Text whose tokens are unknown is cut where they may be."""

    def __init__(self, answer: Stream, chunk_size: ChunkSize) -> None:
        self._answer = answer
        self._chunk_size = chunk_size
        self._parts: deque[Output] = deque()
        """Outputs that have come, one token each where they were cut."""
        self._piece: list[Output] = []
        """The parts of the next piece, as far as they have come."""
        self._piece_tokens = 0
        self._has_begun = False
        self._num_tokens = 0

    def __aiter__(self) -> RechunkedStream:
        return self

    async def __anext__(self) -> Output:
        while not self._complete_piece():
            try:
                self._parts.extend(self._split(await anext(self._answer)))
            except StopAsyncIteration:
                if not self._piece:
                    raise
                break
        piece, self._piece, self._piece_tokens = self._piece, [], 0
        return _joined(piece)

    async def aclose(self) -> None:
        self._parts.clear()
        self._piece.clear()
        await self._answer.aclose()

    def _complete_piece(self) -> bool:
        """Add what has come to the next piece, and return whether that is complete."""
        while self._parts:
            part = self._parts.popleft()
            self._piece.append(part)
            self._piece_tokens += max(1, len(part.token_ids))
            is_first = not self._has_begun
            self._has_begun = bool(self._has_begun or part.text or part.token_ids or isinstance(part, ParsedOutput))
            if part.finish or is_first or self._piece_tokens >= self._chunk_size.tokens:
                return True
        return False

    def _split(self, output: Output) -> list[Output]:
        before, self._num_tokens = self._num_tokens, max(self._num_tokens, output.usage.completion_tokens)
        if not self._chunk_size.tokens or output.token_ids:
            return [output]
        whole = output.pieces if isinstance(output, ParsedOutput) else [Content(output.text)]
        # How many tokens each of several pieces has is unknown.
        num_tokens = self._num_tokens - before if len(whole) == 1 else 0
        parts = [part for piece in whole for part in _tokens_of(piece, num_tokens)]
        if len(parts) <= len(whole):
            return [output]
        usage = replace(output.usage, completion_tokens=before)
        early = replace(output, finish=None, stop_reason=None, error="", queue_seconds=None, usage=usage)
        return [*(_with(early, part) for part in parts[:-1]), _with(output, parts[-1])]


def _tokens_of(piece: Piece, num_tokens: int) -> list[Piece]:
    if not isinstance(piece, (Content, Reasoning)):
        return [piece]
    return [type(piece)(text) for text in split_tokens(piece.text, num_tokens)]


def _with(output: Output, piece: Piece) -> Output:
    text = piece.text if isinstance(piece, Content) else ""
    if isinstance(output, ParsedOutput):
        return replace(output, text=text, pieces=[piece])
    return replace(output, text=text)


def _joined(outputs: list[Output]) -> Output:
    """Return one output for several in a row."""
    if len(outputs) == 1:
        return outputs[0]
    last = outputs[-1]
    logprobs = [logprob for output in outputs for logprob in output.logprobs or ()]
    joined = replace(
        last,
        text="".join(output.text for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs or last.logprobs,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        queue_seconds=next((o.queue_seconds for o in outputs if o.queue_seconds is not None), None),
    )
    if not isinstance(joined, ParsedOutput):
        return joined
    pieces = list[Piece]()
    for piece in (piece for output in outputs if isinstance(output, ParsedOutput) for piece in output.pieces):
        if pieces and isinstance(piece, (Content, Reasoning)) and type(before := pieces[-1]) is type(piece):
            pieces[-1] = type(piece)(before.text + piece.text)
        else:
            pieces.append(piece)
    return replace(joined, pieces=pieces)
