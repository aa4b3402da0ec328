"""One answer of a peer, to its end. What breaks off is asked for again where that can be right, and told where not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from weft.backends.contract import Deltas
from weft.backends.remote.answers import Answer
from weft.backends.remote.faults import Lost, error_in_stream, finish_of
from weft.backends.remote.line import EventStream
from weft.backends.remote.questions import Question
from weft.errors import EngineFault, WeftError
from weft.types import Delta

log = logging.getLogger(__name__)

DONE = b"[DONE]"
MAX_TRIES = 3
"""Of one answer that breaks again and again, although a part of it comes every time."""

Open = Callable[[Question], Awaitable[EventStream]]
"""Asks; raises a WeftError when the peer cannot be reached or refuses."""


class RemoteDeltas(Deltas):
    def __init__(
        self, question: Question, stream: EventStream, answer: Answer, ask: Open, ended: Callable[[Delta | None], None]
    ) -> None:
        """`ended` is told the last delta, or nothing when the answer was closed before; once."""
        self._question = question
        self._stream = stream
        self._answer = answer
        self._ask = ask
        self._tell_end = ended
        self._num_tries = 1
        self._ended = False

    def __aiter__(self) -> RemoteDeltas:
        return self

    async def __anext__(self) -> Delta:
        while not self._ended:
            delta = await self._next()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._end(None)

    async def _next(self) -> Delta | None:
        try:
            data = await self._stream.next()
            is_done = data is not None and data.strip() == DONE
            if is_done:
                await self._stream.finish()
            if data is None or is_done:
                return await self._over("it ended the answer without saying why")
            if (error := error_in_stream(data)) is not None:
                return await self._failed(error)
            delta = self._answer.take(data)
        except Lost as lost:
            return await self._over(str(lost))
        return await self._over("") if self._answer.ended else delta

    async def _over(self, why: str) -> Delta | None:
        """No more comes: the last delta, or another try when there is none."""
        if (last := self._answer.last()) is not None:
            await self._end(last)
            return last
        return await self._try_again(why)

    async def _try_again(self, why: str) -> Delta | None:
        await self._stream.aclose()
        fault = EngineFault(f"The remote engine was lost in the middle of the answer: {why}.")
        question = self._answer.rest() if self._answer.begun else self._question
        if question is None or self._num_tries >= (MAX_TRIES if self._answer.begun else 2):
            return await self._failed(fault)
        log.warning("an answer of the remote engine broke off, and is asked for again: %s", why)
        self._num_tries += 1
        try:
            self._stream = await self._ask(question)
        except WeftError as error:
            return await self._failed(EngineFault(f"{fault.message} {error}"))
        return None

    async def _failed(self, error: WeftError) -> Delta:
        last = Delta(finish=finish_of(error), error=str(error))
        await self._end(last)
        return last

    async def _end(self, last: Delta | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._tell_end(last)
        await self._stream.aclose()
