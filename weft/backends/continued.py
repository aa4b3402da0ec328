"""One answer, whichever engine gives it: when the engine that it comes from is lost, the next one goes on with it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from msgspec.structs import replace

from weft.backends.asking import Asked
from weft.backends.contract import Deltas, Engine, Take, failure_of
from weft.errors import Unavailable, WeftError
from weft.text.output import OutputText
from weft.types import Delta, Event, FinishReason, Request


class Succession(Protocol):
    """Knows which engine is in use."""

    def lost(self, engine: Engine) -> bool:
        """Whether it will never answer again."""

    async def successor_of(self, engine: Engine) -> Engine:
        """The engine that takes the place of a lost one. Raises Unavailable when there is none."""


class ContinuedDeltas(Deltas):
    def __init__(self, succession: Succession, asked: Asked, engine: Engine, answer: Deltas) -> None:
        self._succession = succession
        self._asked = asked
        self._engine = engine
        self._answer = answer
        self._delivered: list[int] = []
        self._begun = False
        """Whether the reader has anything of the answer."""
        self._text: OutputText | None = None
        """Since an engine was lost after the answer had begun: it makes the text, from the first token on."""
        self._ended = False

    def __aiter__(self) -> ContinuedDeltas:
        return self

    async def __anext__(self) -> Delta:
        while not self._ended:
            delta = await anext(self._answer)
            shown = await self._moved(delta) if self._broke_off(delta) else await self._read(delta)
            if shown is not None:
                return shown
        raise StopAsyncIteration

    async def follow(self, take: Take) -> None:
        broken_off: list[Delta] = []

        def hear(delta: Delta) -> Awaitable[None] | None:
            if self._broke_off(delta):
                broken_off.append(delta)
                return None
            self._note(delta)
            return take(delta)

        if self._text is None and not self._ended:
            await self._answer.follow(hear)
        for delta in broken_off:
            shown = await self._moved(delta)
            if shown is not None and (taking := take(shown)) is not None:
                await taking
        await super().follow(take)

    async def aclose(self) -> None:
        self._ended = True
        await self._answer.aclose()

    def _broke_off(self, delta: Delta) -> bool:
        return delta.finish is not None and failure_of(delta) is not None and self._succession.lost(self._engine)

    def _note(self, delta: Delta) -> None:
        self._begun = self._begun or bool(delta.text or delta.token_ids)
        self._delivered += delta.token_ids
        self._ended = delta.finish is not None

    async def _read(self, delta: Delta) -> Delta | None:
        """What the reader is shown of a delta; None for nothing."""
        if self._text is not None:
            return await self._continued(self._text, delta)
        self._note(delta)
        return delta

    async def _continued(self, text: OutputText, delta: Delta) -> Delta | None:
        stop_reason = delta.stop_reason
        self._delivered += delta.token_ids
        shown = text.push(
            [
                Event(
                    request_id="",
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                    finish=delta.finish,
                    stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
                    error=delta.error,
                )
            ]
        )
        self._ended = text.ended
        if self._ended and delta.finish is None:
            await self._answer.aclose()
        return shown

    async def _moved(self, last: Delta) -> Delta | None:
        """Go on with another engine. Where that cannot be, the reader is shown how the answer ends."""
        try:
            engine = await self._succession.successor_of(self._engine)
            if self._begun:
                return await self._go_on(engine, last)
            self._answer = await replace(self._asked, sibling_of="").submit(engine)
        except WeftError as error:
            self._ended = True
            return replace(last, finish=FinishReason.ERROR, error=f"{last.error} {error}".strip())
        self._engine = engine
        return None

    async def _go_on(self, engine: Engine, last: Delta) -> Delta | None:
        prompt, params, delivered = self._asked.prompt, self._asked.params, self._delivered
        if not isinstance(prompt, list) or params.grammar or not _same_words(self._engine, engine, delivered):
            raise Unavailable("What was answered so far cannot be continued by another engine.")
        request = Request(request_id="", prompt_token_ids=prompt, params=params)
        self._text = text = OutputText(self._engine.tokenizer, request, self._asked.markers)
        text.push(delivered)
        room = engine.model.max_model_len - len(prompt) - len(delivered)
        rest = room if params.max_tokens is None else min(room, params.max_tokens - len(delivered))
        if rest <= 0:
            return await self._continued(text, replace(last, token_ids=[], finish=FinishReason.LENGTH, error=""))
        asked = replace(
            self._asked,
            prompt=prompt + delivered,
            params=replace(
                params,
                max_tokens=rest,
                min_tokens=min(rest, max(0, params.min_tokens - len(delivered))),
                stop=(),
                prompt_logprobs=None,
            ),
            sibling_of="",
        )
        self._answer = await asked.submit(engine)
        self._engine = engine
        return None


def _same_words(one: Engine, other: Engine, tokens: list[int]) -> bool:
    """Whether these tokens, which must be all that was delivered, mean the same to both engines."""
    if not all(engine.abilities.tokens and engine.abilities.answer_tokens for engine in (one, other)):
        return False
    return all(one.tokenizer.token_bytes(token) == other.tokenizer.token_bytes(token) for token in set(tokens))
