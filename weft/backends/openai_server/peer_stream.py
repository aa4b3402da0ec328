"""The stream of a peer's answer: its chunks become outputs, and an answer that breaks off is asked for again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from weft.backends.contract import ParsedOutput, Stream
from weft.backends.openai_server.chunks import (
    CallDelta,
    ChatChunk,
    ChatDelta,
    PeerChatChoice,
    PeerUsage,
    TextChoice,
    TextChunk,
    prompt_figures,
    read,
)
from weft.backends.openai_server.http_client import EventStream
from weft.backends.openai_server.peer_errors import PeerLost, error_in_stream, finish_of
from weft.backends.openai_server.requests import PeerRequest
from weft.errors import EngineFault, WeftError
from weft.text.detokenizer import OutputText
from weft.text.parsers.pieces import CallArguments, CallStarted, Content, Piece, Reasoning
from weft.types import Event, FinishReason, Output, Request, TokenLogprob, Usage

FINISHES = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "timeout": FinishReason.TIMEOUT,
}

GoOn = Callable[[list[int]], PeerRequest | None]
"""Writes the request that goes on behind these tokens; None: there can be none."""


class PeerAnswer(Protocol):
    """One answer of the peer, as it is read."""

    @property
    def begun(self) -> bool:
        """True when the client has anything of it."""

    @property
    def ended(self) -> bool:
        """True when it is over on this side, whatever the peer would still send."""

    def take(self, data: bytes) -> Output | None:
        """Return what a chunk adds; the last output is held back. Raises PeerLost."""

    def last(self) -> Output | None:
        """Return the output with `finish`; None while no chunk has told how it ended."""

    def rest(self) -> PeerRequest | None:
        """Return the request for the rest of it, after the connection broke; None: it cannot be had."""


class PeerTokenAnswer:
    """An answer of token ids: stop strings, text and usage are made here, as with every engine of tokens."""

    def __init__(self, text: OutputText, request: Request, go_on: GoOn) -> None:
        self._text = text
        self._request = request
        self._go_on = go_on
        self._stops = frozenset(request.stop_token_ids)
        self._delivered: list[int] = []
        self._told = Usage()
        """The usage of which the peer alone can count a part: cached and drafted tokens."""
        self._is_continued = False
        """The peer takes a part of the answer for its prompt, and finds that in its cache. How long the first part
        waited is not told."""
        self._queue_seconds: float | None = None
        self._last: Output | None = None
        self._peer_ended = False

    @property
    def begun(self) -> bool:
        return bool(self._delivered)

    @property
    def ended(self) -> bool:
        return self._text.ended and not self._peer_ended

    def take(self, data: bytes) -> Output | None:
        chunk = read(data, TextChunk)
        if chunk.usage is not None:
            told = chunk.usage.usage()
            self._told = replace(told, cached_tokens=0) if self._is_continued else told
        for choice in chunk.choices:
            self._queue_seconds = None if self._is_continued else _queue_seconds(choice)
            if not self._text.ended:
                return self._taken(choice)
        return None

    def last(self) -> Output | None:
        if self._last is None and len(self._delivered) == self._request.params.max_tokens:
            # All that was asked for has come, if not the word that it was all.
            self._last = self._text.push([Event(request_id="", finish=FinishReason.LENGTH)])
        if self._last is None:
            return None
        usage = replace(
            self._last.usage,
            cached_tokens=self._told.cached_tokens,
            draft_tokens=self._told.draft_tokens,
            accepted_tokens=self._told.accepted_tokens,
        )
        return replace(self._last, usage=usage, queue_seconds=self._queue_seconds)

    def rest(self) -> PeerRequest | None:
        self._is_continued = True
        return self._go_on(self._delivered)

    def _taken(self, choice: TextChoice) -> Output | None:
        if choice.token_ids is None and choice.text:
            raise PeerLost("it does not tell the ids of its tokens: a newer version may, or leave --tokenizer away")
        ids = choice.token_ids or []
        finish, error = finish_named(choice.finish_reason)
        self._peer_ended = finish is not None
        stop_at = next((i for i, token in enumerate(ids) if token in self._stops), None)
        if stop_at is not None:
            ids, finish, error = ids[: stop_at + 1], FinishReason.STOP, ""
        output = self._text.push(
            [
                Event(
                    request_id="",
                    token_ids=ids,
                    logprobs=self._logprobs(choice, len(ids)),
                    cached_tokens=None if self._delivered else 0,
                    prompt_logprobs=None if self._delivered else self._prompt_logprobs(choice),
                    finish=finish,
                    stop_token_id=ids[-1] if finish is FinishReason.STOP and ids else None,
                    error=error,
                )
            ]
        )
        self._delivered += ids
        if self._text.ended:
            self._last = output
            return None
        return output

    def _logprobs(self, choice: TextChoice, num_tokens: int) -> list[TokenLogprob] | None:
        most = self._request.params.logprobs
        if most is None or not num_tokens:
            return None
        figures = choice.logprobs.logprobs(most) if choice.logprobs is not None else []
        if len(figures) < num_tokens:
            raise PeerLost("it told fewer log probabilities than tokens")
        return figures[:num_tokens]

    def _prompt_logprobs(self, choice: TextChoice) -> list[TokenLogprob] | None:
        most = self._request.params.prompt_logprobs
        if most is None or choice.prompt_logprobs is None:
            return None
        return prompt_figures(choice.prompt_logprobs, self._request.prompt_token_ids, most)


class PeerTextAnswer:
    """An answer of text, which the peer has made and ended. The peer counts its tokens."""

    def __init__(self, num_prompt_tokens: int = 0) -> None:
        self._usage = Usage(prompt_tokens=num_prompt_tokens)
        self._last: Output | None = None
        self.begun = False
        self.ended = False

    def take(self, data: bytes) -> Output | None:
        chunk = read(data, TextChunk)
        self._count(chunk.usage)
        for choice in chunk.choices:
            output = Output(text=choice.text or "")
            return self._shown(output, bool(output.text), choice)
        return None

    def last(self) -> Output | None:
        return None if self._last is None else replace(self._last, usage=self._usage)

    def rest(self) -> PeerRequest | None:
        return None

    def _count(self, usage: PeerUsage | None) -> None:
        if usage is not None:
            told = usage.usage()
            self._usage = replace(told, prompt_tokens=told.prompt_tokens or self._usage.prompt_tokens)

    def _shown(self, output: Output, is_something: bool, choice: TextChoice | PeerChatChoice) -> Output | None:
        finish, error = finish_named(choice.finish_reason)
        if finish is not None and self._last is None:
            self._last = replace(
                output,
                finish=finish,
                error=error,
                stop_reason=choice.stop_reason,
                queue_seconds=_queue_seconds(choice),
            )
            return None
        if not is_something:
            return None
        self.begun = True
        return replace(output, usage=self._usage)


class PeerChatAnswer(PeerTextAnswer):
    """An answer to a conversation: the peer tells content, reasoning and tool calls apart."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = Calls()

    def take(self, data: bytes) -> Output | None:
        chunk = read(data, ChatChunk)
        self._count(chunk.usage)
        for choice in chunk.choices:
            pieces = self._pieces(choice.delta)
            text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
            output = ParsedOutput(text=text, pieces=pieces)
            return self._shown(output, bool(pieces), choice)
        return None

    def _pieces(self, delta: ChatDelta) -> list[Piece]:
        pieces: list[Piece] = []
        if thought := delta.reasoning_content or delta.reasoning:
            pieces.append(Reasoning(thought))
        if content := delta.content or delta.refusal:
            pieces.append(Content(content))
        for call in delta.tool_calls or ():
            pieces += self._calls.take(call)
        return pieces


class Calls:
    """The calls of one answer, numbered from 0 in the order in which they begin."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._ids: dict[int, str] = {}

    def take(self, call: CallDelta) -> list[Piece]:
        function = call.function
        name = function.name if function is not None else None
        arguments = function.arguments if function is not None else None
        pieces: list[Piece] = []
        if call.id:
            self._ids.setdefault(call.index, call.id)
        if call.index not in self._numbers and name:
            number = self._numbers[call.index] = len(self._numbers)
            pieces.append(CallStarted(number, self._ids.get(call.index) or f"call_{number}", name))
        if arguments:
            if call.index not in self._numbers:
                raise PeerLost("it wrote the arguments of a call before its name")
            pieces.append(CallArguments(self._numbers[call.index], arguments))
        return pieces


def _queue_seconds(choice: TextChoice | PeerChatChoice) -> float | None:
    timings = choice.timings
    return None if timings is None or timings.queue_ms is None else timings.queue_ms / 1000


def finish_named(reason: str | None) -> tuple[FinishReason | None, str]:
    """Return the finish reason of an answer, and the error of one that the peer does not explain."""
    if reason is None:
        return None, ""
    known = FINISHES.get(reason)
    return (known, "") if known is not None else (FinishReason.ERROR, f"The remote engine ended it: {reason:.100}.")


log = logging.getLogger(__name__)

DONE = b"[DONE]"
MAX_TRIES = 3
"""The most tries of one answer that breaks again and again, although a part of it comes every time."""

Open = Callable[[PeerRequest], Awaitable[EventStream]]
"""Asks; raises a WeftError when the peer cannot be reached or refuses."""


class RemoteStream(Stream):
    def __init__(
        self,
        request: PeerRequest,
        stream: EventStream,
        answer: PeerAnswer,
        ask: Open,
        ended: Callable[[Output | None], None],
    ) -> None:
        """Read a stream. `ended` is called once, with the last output, or with None when the stream was closed
        before."""
        self._request_sent = request
        self._stream = stream
        self._answer = answer
        self._ask = ask
        self._tell_end = ended
        self._num_tries = 1
        self._ended = False

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> Output:
        while not self._ended:
            output = await self._next()
            if output is not None:
                return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._end(None)

    async def _next(self) -> Output | None:
        try:
            data = await self._stream.next()
            is_done = data is not None and data.strip() == DONE
            if is_done:
                await self._stream.finish()
            if data is None or is_done:
                return await self._over("it ended the answer without saying why")
            if (error := error_in_stream(data)) is not None:
                return await self._failed(error)
            output = self._answer.take(data)
        except PeerLost as lost:
            return await self._over(str(lost))
        return await self._over("") if self._answer.ended else output

    async def _over(self, why: str) -> Output | None:
        """End the stream with its last output, or try again when there is none."""
        if (last := self._answer.last()) is not None:
            await self._end(last)
            return last
        return await self._try_again(why)

    async def _try_again(self, why: str) -> Output | None:
        await self._stream.aclose()
        fault = EngineFault(f"The remote engine was lost in the middle of the answer: {why}.")
        request = self._answer.rest() if self._answer.begun else self._request_sent
        if request is None or self._num_tries >= (MAX_TRIES if self._answer.begun else 2):
            return await self._failed(fault)
        log.warning("an answer of the remote engine broke off, and is asked for again: %s", why)
        self._num_tries += 1
        try:
            self._stream = await self._ask(request)
        except WeftError as error:
            return await self._failed(EngineFault(f"{fault.message} {error}"))
        return None

    async def _failed(self, error: WeftError) -> Output:
        last = Output(finish=finish_of(error), error=str(error))
        await self._end(last)
        return last

    async def _end(self, last: Output | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._tell_end(last)
        await self._stream.aclose()
