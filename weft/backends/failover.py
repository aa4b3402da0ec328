"""Several engines in order, as one: when the one in use is lost for good, the next is started and takes over.

New requests go to it, and answers that are under way go on there (`weft.backends.failover`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import (
    PLAIN_TERMS,
    Abilities,
    ChatPrompt,
    ChatStyles,
    Embedding,
    Engine,
    Health,
    ImageUpdates,
    Prompt,
    Stream,
    Take,
    Terms,
    failure_of,
)
from weft.backends.registry import EngineSpec
from weft.backends.safe_loading import load_safely
from weft.backends.starting import Load, chosen_engines, start_first
from weft.errors import EngineFault, Unavailable, WeftError
from weft.options import Config
from weft.payloads import NO_TEXTS, GivenTexts
from weft.text.detokenizer import OutputText
from weft.text.tokenizer import Tokenizer
from weft.types import (
    Adapter,
    EngineStats,
    Event,
    FinishReason,
    ImageParams,
    ModelInfo,
    Output,
    Pooling,
    Request,
    SamplingParams,
)


class Asked(Struct, frozen=True, kw_only=True):
    prompt: Prompt
    params: SamplingParams
    terms: Terms = PLAIN_TERMS
    sibling_of: str = ""
    markers: Collection[str] = ()

    async def submit(self, engine: Engine) -> Stream:
        return await engine.submit(
            self.prompt, self.params, self.terms, sibling_of=self.sibling_of, markers=self.markers
        )


class Succession(Protocol):
    """Knows which engine is in use."""

    def lost(self, engine: Engine) -> bool:
        """Whether it will never answer again."""

    async def successor_of(self, engine: Engine) -> Engine:
        """The engine that takes the place of a lost one. Raises Unavailable when there is none."""


class FailoverStream(Stream):
    def __init__(self, succession: Succession, asked: Asked, engine: Engine, answer: Stream) -> None:
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

    def __aiter__(self) -> FailoverStream:
        return self

    async def __anext__(self) -> Output:
        while not self._ended:
            delta = await anext(self._answer)
            shown = await self._moved(delta) if self._broke_off(delta) else await self._read(delta)
            if shown is not None:
                return shown
        raise StopAsyncIteration

    async def follow(self, take: Take) -> None:
        broken_off: list[Output] = []

        def hear(delta: Output) -> Awaitable[None] | None:
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

    def _broke_off(self, delta: Output) -> bool:
        return delta.finish is not None and failure_of(delta) is not None and self._succession.lost(self._engine)

    def _note(self, delta: Output) -> None:
        self._begun = self._begun or bool(delta.text or delta.token_ids)
        self._delivered += delta.token_ids
        self._ended = delta.finish is not None

    async def _read(self, delta: Output) -> Output | None:
        """What the reader is shown of a delta; None for nothing."""
        if self._text is not None:
            return await self._continued(self._text, delta)
        self._note(delta)
        return delta

    async def _continued(self, text: OutputText, delta: Output) -> Output | None:
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

    async def _moved(self, last: Output) -> Output | None:
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

    async def _go_on(self, engine: Engine, last: Output) -> Output | None:
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


log = logging.getLogger(__name__)

T = TypeVar("T")
StartFirst = Callable[[Sequence[EngineSpec]], Awaitable[tuple[Engine, Sequence[EngineSpec]]]]

TICK_SECONDS = 0.5


async def start_engine(config: Config, load: Load[Engine] = load_safely) -> Engine:
    """The engine that a configuration names: of several in order the first that starts, while the others stand by."""
    engine, others = await start_first(chosen_engines(config), config, load)
    if not others:
        return engine
    restart = partial(start_first, config=config, load=load)
    return FailoverEngine(engine, others, restart, patience_s=config.engine.heartbeat_timeout_s)


class FailoverEngine:
    """Its name, its abilities and its model are those of the engine in use."""

    def __init__(
        self, engine: Engine, others: Sequence[EngineSpec], start_first: StartFirst, *, patience_s: float
    ) -> None:
        """An engine that is not ready for `patience_s` is lost, unless it says that it is being started."""
        self._engine = engine
        self._others = others
        """Not tried yet."""
        self._start_first = start_first
        self._failure = ""
        """Why there is no engine any more."""
        self._taking_over = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        """The end of the engine in use: it comes once, whoever waits for it and whoever gives up waiting."""
        self._patience_s = patience_s
        self._last_well = time.monotonic()
        """When the engine was ready, or on its way to be."""
        self._waiting = 0
        """Requests that wait for the next engine."""
        self._past = EngineStats()
        """What the engines before this one counted."""
        self._past_restarts = 0
        self._look = asyncio.Event()
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has changed, or there is none any more."""
        self._watch = asyncio.create_task(self._keep_watch(), name="weft-hybrid")

    # Who answers.

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def abilities(self) -> Abilities:
        return self._engine.abilities

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def styles(self) -> ChatStyles:
        return self._engine.styles

    @property
    def adapters(self) -> Collection[Adapter]:
        return self._engine.adapters

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        return self._engine.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
        )

    def health(self) -> Health:
        if self._failure:
            return Health(False, "failed")
        if self.lost(self._engine):
            return Health(False, "restarting")
        return self._engine.health()

    def stats(self) -> EngineStats:
        return self._engine.stats().with_counters_of(self._past)

    def restarts(self) -> int:
        return self._engine.restarts() + self._past_restarts

    def open_requests(self) -> int:
        return self._engine.open_requests() + self._waiting

    # Requests.

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> FailoverStream:
        asked = Asked(prompt=prompt, params=params, terms=terms, sibling_of=sibling_of, markers=markers)
        engine, answer = await self._ask(asked.submit)
        return FailoverStream(self, asked, engine, answer)

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        _, embedding = await self._ask(lambda engine: engine.embed(prompt, pooling, terms))
        return embedding

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> ImageUpdates:
        """An image that is under way when its engine is lost ends with an error."""
        _, updates = await self._ask(lambda engine: engine.draw(prompt_token_ids, image, terms, given))
        return updates

    async def load_adapter(self, name: str, path: str) -> None:
        await self._engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._engine.unload_adapter(name)

    async def reset_cache(self) -> int:
        return await self._engine.reset_cache()

    async def start_profile(self, folder: str) -> str:
        return await self._engine.start_profile(folder)

    async def stop_profile(self) -> str:
        return await self._engine.stop_profile()

    async def close(self) -> None:
        self._closed = True
        self._watch.cancel()
        await asyncio.wait([self._watch])
        self._end_turn()
        if self._closing is None:
            self._closing = asyncio.create_task(self._engine.close())
        await asyncio.shield(self._closing)

    # Succession.

    def lost(self, engine: Engine) -> bool:
        """Whether an engine will never answer again. The end of all of them is no loss."""
        if self._closed:
            return False
        if engine is not self._engine or self._taking_over or self._failure:
            return True
        health = engine.health()
        unwell_s = time.monotonic() - self._last_well
        return not health.ready and (health.gone or health.reason == "failed" or unwell_s > self._patience_s)

    async def successor_of(self, engine: Engine) -> Engine:
        """The engine that takes the place of a lost one. Raises Unavailable when there is none."""
        self._waiting += 1
        try:
            while engine is self._engine and not self._failure and not self._closed:
                self._look.set()
                await asyncio.shield(self._turn)
        finally:
            self._waiting -= 1
        if self._failure or self._closed:
            raise Unavailable(self._failure or "The server is shutting down.")
        return self._engine

    async def _ask(self, ask: Callable[[Engine], Awaitable[T]]) -> tuple[Engine, T]:
        """Of the engine in use, or of its successor where it is lost; with the one that answered."""
        engine = self._engine
        while True:
            if self.lost(engine):
                engine = await self.successor_of(engine)
            try:
                return engine, await ask(engine)
            except (Unavailable, EngineFault):
                if not self.lost(engine):
                    raise

    async def _keep_watch(self) -> None:
        while not self._failure:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._look.wait()
            self._look.clear()
            health = self._engine.health()
            if health.ready or health.reason in ("starting", "restarting"):
                self._last_well = time.monotonic()
            if self.lost(self._engine):
                await self._take_over()

    async def _take_over(self) -> None:
        old = self._engine
        log.error("The engine %s is lost: %s. Another takes over.", old.name, old.health().reason)
        self._taking_over = True
        try:
            await self._replace(old)
        finally:
            self._taking_over = False
            self._last_well = time.monotonic()
            self._end_turn()

    async def _replace(self, old: Engine) -> None:
        counted, restarts = old.stats(), old.restarts()
        self._closing = asyncio.create_task(_close_lost(old))
        await asyncio.shield(self._closing)
        try:
            self._engine, self._others = await self._start_next(old)
        except Exception as error:  # noqa: BLE001 - told to everybody who asks from now on
            log.critical("No engine is left: %s: %s", type(error).__name__, error)
            self._failure = f"There is no engine any more: {error}"
            return
        self._closing = None
        log.warning("The engine %s has taken over from %s.", self._engine.name, old.name)
        self._past = counted.with_counters_of(self._past)
        self._past_restarts += restarts + 1
        await self._bring_adapters(old.adapters)

    async def _start_next(self, lost: Engine) -> tuple[Engine, Sequence[EngineSpec]]:
        if not self._others:
            raise Unavailable(f"The engine {lost.name} is lost, and there is no other.")
        return await self._start_first(self._others)

    async def _bring_adapters(self, wanted: Collection[Adapter]) -> None:
        """The engine has those that it was configured with; the operator may have changed them since."""
        there, before = {own.name for own in self._engine.adapters}, {adapter.name for adapter in wanted}
        for name in there - before:
            await _try_adapter(name, self._engine.unload_adapter(name))
        for adapter in wanted:
            if adapter.name not in there:
                await _try_adapter(adapter.name, self._engine.load_adapter(adapter.name, adapter.path))

    def _end_turn(self) -> None:
        """Let those go on who wait for another engine."""
        self._turn.set_result(None)
        self._turn = asyncio.get_running_loop().create_future()


async def _close_lost(engine: Engine) -> None:
    try:
        await engine.close()
    except Exception:
        log.exception("the lost engine did not close")


async def _try_adapter(name: str, change: Awaitable[None]) -> None:
    """An engine with an adapter too many or too few is better than none."""
    try:
        await change
    except WeftError as error:
        log.error("The adapter %s is not as it was before: %s", name, error)
    except Exception:
        log.exception("The adapter %s is not as it was before.", name)
