"""The failover of engines: when the one in use is lost for good, the next in order is started and takes over.

New requests go to it, and streams that are under way go on there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from msgspec.structs import replace

from weft.backends.contract import Abilities, Engine, EngineText, Health, Stream, Take, failure_of
from weft.backends.registry import EngineSpec
from weft.backends.safe_loading import load_safely
from weft.backends.starting import Load, chosen_engines, start_first
from weft.engine_stats import EngineStats
from weft.errors import EngineFault, Unavailable, WeftError
from weft.options import Config
from weft.text.detokenizer import OutputText
from weft.types import (
    Adapter,
    ControlMessage,
    Event,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    LoadLora,
    ModelInfo,
    Output,
    Request,
    Sample,
    SetChunkSize,
    UnloadLora,
)


class FailoverStream(Stream):
    """A stream that goes on with the next engine when its own is lost, if what was delivered can be continued."""

    def __init__(self, failover: FailoverEngine, request: GenerationRequest, engine: Engine, stream: Stream) -> None:
        self._failover = failover
        self._request = request
        self._engine = engine
        self._stream = stream
        self._delivered: list[int] = []
        self._begun = False
        """True when the reader has anything of the answer."""
        self._text: OutputText | None = None
        """Set once an engine was lost after the answer had begun: it makes the text, from the first token on."""
        self._ended = False

    def __aiter__(self) -> FailoverStream:
        return self

    async def __anext__(self) -> Output:
        while not self._ended:
            output = await anext(self._stream)
            shown = await self._moved(output) if self._broke_off(output) else await self._read(output)
            if shown is not None:
                return shown
        raise StopAsyncIteration

    async def follow(self, take: Take) -> None:
        broken_off: list[Output] = []

        def hear(output: Output) -> Awaitable[None] | None:
            if self._broke_off(output):
                broken_off.append(output)
                return None
            self._note(output)
            return take(output)

        if self._text is None and not self._ended:
            await self._stream.follow(hear)
        for output in broken_off:
            shown = await self._moved(output)
            if shown is not None and (taking := take(shown)) is not None:
                await taking
        await super().follow(take)

    async def aclose(self) -> None:
        self._ended = True
        await self._stream.aclose()

    def _broke_off(self, output: Output) -> bool:
        """True when an output ends the stream because its engine is lost. An image that is under way ends with it."""
        if output.finish is None or isinstance(self._request.task, GenerateImage):
            return False
        return failure_of(output) is not None and self._failover.lost(self._engine)

    def _note(self, output: Output) -> None:
        self._begun = self._begun or bool(output.text or output.token_ids)
        self._delivered += output.token_ids
        self._ended = output.finish is not None

    async def _read(self, output: Output) -> Output | None:
        """Return what the reader is shown of an output; None for nothing."""
        if self._text is not None:
            return await self._continued(self._text, output)
        self._note(output)
        return output

    async def _continued(self, text: OutputText, output: Output) -> Output | None:
        stop_reason = output.stop_reason
        self._delivered += output.token_ids
        shown = text.push(
            [
                Event(
                    request_id="",
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    finish=output.finish,
                    stop_token_id=stop_reason if isinstance(stop_reason, int) else None,
                    error=output.error,
                )
            ]
        )
        self._ended = text.ended
        if self._ended and output.finish is None:
            await self._stream.aclose()
        return shown

    async def _moved(self, last: Output) -> Output | None:
        """Go on with another engine. Where that cannot be, the reader is shown how the stream ends."""
        try:
            engine = await self._failover.successor_of(self._engine)
            if self._begun:
                return await self._go_on(engine, last)
            self._stream = await engine.submit(replace(self._request, sibling_of=""))
        except WeftError as error:
            self._ended = True
            return replace(last, finish=FinishReason.ERROR, error=f"{last.error} {error}".strip())
        self._engine = engine
        return None

    async def _go_on(self, engine: Engine, last: Output) -> Output | None:
        prompt, task, delivered = self._request.prompt, self._request.task, self._delivered
        assert isinstance(task, Sample), "other tasks have nothing to go on with"
        params = task.params
        if not isinstance(prompt, list) or params.grammar or not _same_vocabulary(self._engine, engine, delivered):
            raise Unavailable("What was answered so far cannot be continued by another engine.")
        resolved = Request(request_id="", prompt_token_ids=prompt, params=params)
        self._text = text = OutputText(self._engine.text.tokenizer, resolved, task.markers)
        text.push(delivered)
        capacity = engine.model.max_model_len - len(prompt) - len(delivered)
        rest = capacity if params.max_tokens is None else min(capacity, params.max_tokens - len(delivered))
        if rest <= 0:
            return await self._continued(text, replace(last, token_ids=[], finish=FinishReason.LENGTH, error=""))
        rest_params = replace(
            params,
            max_tokens=rest,
            min_tokens=min(rest, max(0, params.min_tokens - len(delivered))),
            stop=(),
            prompt_logprobs=None,
        )
        rest_task = replace(task, params=rest_params)
        self._stream = await engine.submit(
            replace(self._request, prompt=prompt + delivered, task=rest_task, sibling_of="")
        )
        self._engine = engine
        return None


def _same_vocabulary(one: Engine, other: Engine, tokens: list[int]) -> bool:
    """Return whether these tokens, which must be all that was delivered, mean the same to both engines."""
    if not all(engine.abilities.tokens and engine.abilities.answer_tokens for engine in (one, other)):
        return False
    ours, theirs = one.text.tokenizer, other.text.tokenizer
    return all(ours.token_bytes(token) == theirs.token_bytes(token) for token in set(tokens))


log = logging.getLogger(__name__)

StartFirst = Callable[[Sequence[EngineSpec]], Awaitable[tuple[Engine, Sequence[EngineSpec]]]]

TICK_SECONDS = 0.5


async def start_engine(config: Config, load: Load[Engine] = load_safely) -> Engine:
    """Start the engine that a configuration names: of several in order the first that starts; the others stand by."""
    engine, others = await start_first(chosen_engines(config), config, load)
    if not others:
        return engine
    restart = partial(start_first, config=config, load=load)
    return FailoverEngine(engine, others, restart, patience_s=config.engine.heartbeat_timeout_s)


class FailoverEngine:
    """The engine in use, and those that stand by. Its name, its abilities and its model are those of the one in use."""

    def __init__(
        self, engine: Engine, others: Sequence[EngineSpec], start_first: StartFirst, *, patience_s: float
    ) -> None:
        """An engine that is not ready for `patience_s` is lost, unless it says that it is being started."""
        self._engine = engine
        self._others = others
        """The engines that were not tried yet."""
        self._start_first = start_first
        self._failure = ""
        """The reason why there is no engine any more."""
        self._taking_over = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None
        """The task that closes the engine in use. There is one, however many callers wait for it or give up."""
        self._patience_s = patience_s
        self._last_well = time.monotonic()
        """The time when the engine was ready, or starting, last."""
        self._waiting = 0
        """Requests that wait for the next engine."""
        self._past = EngineStats()
        self._chunk_size: SetChunkSize | None = None
        """The size of pieces that the operator has set; None: the configured one."""
        """The counters of the engines before this one."""
        self._look = asyncio.Event()
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has changed, or there is none any more."""
        self._watch = asyncio.create_task(self._keep_watch(), name="weft-failover")

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
    def text(self) -> EngineText:
        return self._engine.text

    @property
    def adapters(self) -> Collection[Adapter]:
        return self._engine.adapters

    def health(self) -> Health:
        if self._failure:
            return Health(False, "failed")
        if self.lost(self._engine):
            return Health(False, "restarting")
        return self._engine.health()

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        return replace(stats, open_requests=stats.open_requests + self._waiting).with_counters_of(self._past)

    def check_capacity(self, tenant: str) -> None:
        self._engine.check_capacity(tenant)

    async def submit(self, request: GenerationRequest) -> FailoverStream:
        """Submit to the engine in use, or to its successor where it is lost."""
        engine = self._engine
        while True:
            if self.lost(engine):
                engine = await self.successor_of(engine)
            try:
                return FailoverStream(self, request, engine, await engine.submit(request))
            except (Unavailable, EngineFault):
                if not self.lost(engine):
                    raise

    async def control(self, message: ControlMessage) -> str:
        if isinstance(message, SetChunkSize):
            self._chunk_size = message
        return await self._engine.control(message)

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
        """Return whether an engine will never answer again. When all are closed, none is lost."""
        if self._closed:
            return False
        if engine is not self._engine or self._taking_over or self._failure:
            return True
        health = engine.health()
        unwell_s = time.monotonic() - self._last_well
        return not health.ready and (health.gone or health.reason == "failed" or unwell_s > self._patience_s)

    async def successor_of(self, engine: Engine) -> Engine:
        """Wait for the engine that takes the place of a lost one. Raises Unavailable when there is none."""
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
        counted = old.stats()
        self._closing = asyncio.create_task(_close_lost(old))
        await asyncio.shield(self._closing)
        try:
            self._engine, self._others = await self._start_next(old)
        except Exception as error:  # noqa: BLE001 - told to every request from now on
            log.critical("No engine is left: %s: %s", type(error).__name__, error)
            self._failure = f"There is no engine any more: {error}"
            return
        self._closing = None
        log.warning("The engine %s has taken over from %s.", self._engine.name, old.name)
        self._past = replace(counted, restarts=counted.restarts + 1).with_counters_of(self._past)
        await self._bring_adapters(old.adapters)
        if self._chunk_size is not None:
            await self._engine.control(self._chunk_size)

    async def _start_next(self, lost: Engine) -> tuple[Engine, Sequence[EngineSpec]]:
        if not self._others:
            raise Unavailable(f"The engine {lost.name} is lost, and there is no other.")
        return await self._start_first(self._others)

    async def _bring_adapters(self, wanted: Collection[Adapter]) -> None:
        """Give the engine the adapters of the one before: the operator may have changed those that it was configured
        with."""
        there, before = {own.name for own in self._engine.adapters}, {adapter.name for adapter in wanted}
        for name in there - before:
            await self._change_adapter(UnloadLora(name))
        for adapter in wanted:
            if adapter.name not in there:
                await self._change_adapter(LoadLora(adapter.name, adapter.path))

    async def _change_adapter(self, change: LoadLora | UnloadLora) -> None:
        """Load or unload an adapter. An engine with one too many or too few is better than none."""
        try:
            await self._engine.control(change)
        except WeftError as error:
            log.error("The adapter %s is not as it was before: %s", change.name, error)
        except Exception:
            log.exception("The adapter %s is not as it was before.", change.name)

    def _end_turn(self) -> None:
        """Wake the requests that wait for another engine."""
        self._turn.set_result(None)
        self._turn = asyncio.get_running_loop().create_future()


async def _close_lost(engine: Engine) -> None:
    try:
        await engine.close()
    except Exception:
        log.exception("the lost engine did not close")
