"""Weft's own engine behind the contract: text on this side, integers on the other."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.contract import (
    PLAIN_TERMS,
    Abilities,
    Embedding,
    Health,
    ImageUpdate,
    ImageUpdates,
    Prompt,
    Stream,
    Take,
    Terms,
    check_abilities,
    failure_of,
    tokens_of,
)
from weft.backends.model_text import ModelText, open_model_text
from weft.checkpoint.adapter_files import adapter_paths
from weft.checkpoint.model_files import ModelFiles
from weft.engine.client import EngineClient
from weft.engine.process import EngineProcess, LaunchedEngine
from weft.engine.wire import ResetCache, StartProfile, StopProfile, Vocabulary
from weft.errors import ConfigError, ContextTooLong, EngineFault, InvalidRequest, ModelError, WeftError
from weft.hub.resolve import find_model
from weft.options import Config
from weft.payloads import NO_TEXTS, GivenTexts
from weft.text.detokenizer import OutputText
from weft.text.grammars.specs import vocabulary_of
from weft.types import (
    Adapter,
    Arrival,
    EngineStats,
    Event,
    ImageModelInfo,
    ImageParams,
    ModelInfo,
    Output,
    Pooling,
    Request,
    SamplingParams,
    Usage,
    check_priority,
    check_token_ids,
)

E = TypeVar("E", bound="NativeEngine")


async def start_native(
    config: Config, files: ModelFiles | None = None, *, launch: Callable[[], LaunchedEngine] = EngineProcess
) -> NativeEngine:
    """Load a model and be ready to generate."""
    refuse(config, files)
    if files is None:
        files = await asyncio.to_thread(find_model, config)
    return await open_engine(EngineClient(config, files, launch), NativeEngine)


async def open_engine(client: EngineClient, make: Callable[[EngineClient, ModelText, Adapters], E]) -> E:
    """Start an engine process and open the text room side by side, and make an engine of both, with the adapters that
    it is configured with. The first error is raised, at once, and nothing is left behind."""
    config, files = client.config, client.files
    starting = asyncio.create_task(client.start())
    opening = asyncio.create_task(asyncio.to_thread(open_model_text, files, config.model))
    try:
        # A thread cannot be cancelled: whoever is waits for the room below, to close it.
        await asyncio.gather(starting, asyncio.shield(opening))
        engine = make(client, opening.result(), Adapters(client.model.name, files))
        await engine.load_adapters(adapter_paths(config))
        return engine
    except BaseException:
        starting.cancel()
        await asyncio.wait([starting, opening])
        await client.close()
        if opening.exception() is None:
            opening.result().close()
        raise


def refuse(config: Config, files: ModelFiles | None) -> None:
    """Raise ConfigError for settings of other engines that this one cannot honour."""
    if config.backend.quantization:
        raise ConfigError(
            f"The engine native does not quantise weights: --quantization cannot be {config.backend.quantization}.",
            hint="Serve a GGUF file, whose weights are quantised already, or take an engine of vLLM.",
        )
    if config.backend.tensor_parallel_size > 1:
        raise ConfigError(
            f"The engine native computes on one device: --tensor-parallel-size cannot be "
            f"{config.backend.tensor_parallel_size}.",
            hint="Take an engine of vLLM.",
        )


class NativeStream(Stream):
    """The deltas of one request, which is queued when this is made."""

    def __init__(self, client: EngineClient, request: Request, text: OutputText) -> None:
        self._client = client
        self._text = text
        self._entry = client.submit(request)
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None]

    def __aiter__(self) -> NativeStream:
        return self

    async def __anext__(self) -> Output:
        while not self._text.ended:
            if (delta := self._arrived()) is not None:
                return delta
            self._arrival = self._loop.create_future()
            self._entry.listener = self._ring
            await self._arrival
        raise StopAsyncIteration

    async def follow(self, take: Take) -> None:
        while not self._text.ended:
            taking = await self._take_at_once(take)
            if taking is not None:
                await taking

    async def _take_at_once(self, take: Take) -> asyncio.Future[None] | None:
        """Give deltas to `take` as their tokens arrive, until there is something to await or nothing more to come."""
        enough: asyncio.Future[asyncio.Future[None] | None] = self._loop.create_future()

        def hear() -> None:
            if enough.done():
                return
            try:
                delta = self._arrived()
                taking = None if delta is None else take(delta)
            except Exception as error:  # noqa: BLE001 - raised again in the task that follows
                enough.set_exception(error)
                return
            if taking is not None:
                enough.set_result(asyncio.ensure_future(taking))
            elif self._text.ended:
                enough.set_result(None)

        self._entry.listener = hear
        try:
            hear()
            return await enough
        finally:
            self._entry.listener = None

    def _ring(self) -> None:
        if not self._arrival.done():
            self._arrival.set_result(None)

    def _arrived(self) -> Output | None:
        """All that has arrived since the last call; None for nothing."""
        arrived = self._entry.take()
        if not arrived:
            return None
        delta = self._text.push(arrived)
        if self._text.ended:
            self._client.abort(self._entry.id)
        return delta

    async def aclose(self) -> None:
        self._text.ended = True
        self._client.abort(self._entry.id)


class NativeImageUpdates(ImageUpdates):
    """The updates of one image, which is queued when this is made."""

    def __init__(self, client: EngineClient, request: Request, step_tokens: int) -> None:
        """`step_tokens`: what a step of it counts as."""
        self._client = client
        self._request = request
        self._step_tokens = step_tokens
        self._entry = client.submit(request)
        self._arrived: deque[Arrival] = deque()
        self._step = 0
        self._ended = False

    def __aiter__(self) -> NativeImageUpdates:
        return self

    async def __anext__(self) -> ImageUpdate:
        while not self._ended:
            self._arrived += self._entry.take()
            if self._arrived:
                return self._update(self._arrived.popleft())
            arrival: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._entry.listener = partial(_set_done, arrival)
            await arrival
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._ended = True
        self._client.abort(self._entry.id)

    def _update(self, event: Arrival) -> ImageUpdate:
        assert isinstance(event, Event), "an image has no tokens"
        self._ended = event.finish is not None
        self._step = self._step if event.denoise_step is None else event.denoise_step
        return ImageUpdate(
            step=self._step,
            image=event.image,
            finish=event.finish,
            error=event.error,
            usage=Usage(
                prompt_tokens=self._request.num_prompt_tokens, completion_tokens=self._step * self._step_tokens
            ),
        )


def _set_done(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_result(None)


class NativeEngine:
    name = "native"
    abilities = Abilities()

    def __init__(self, client: EngineClient, room: ModelText, adapters: Adapters) -> None:
        self.client = client
        self._adapters = adapters
        self.tokenizer = room.tokenizer
        self.styles = room.styles
        self.encode_chat = room.encode_chat
        self._room = room

    @property
    def model(self) -> ModelInfo:
        return self.client.model

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> NativeStream:
        request = self._request(prompt, params, terms, sibling_of)
        if params.grammar:
            await self._teach_words()
        return NativeStream(self.client, request, OutputText(self.tokenizer, request, markers))

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        params = SamplingParams(temperature=0, seed=0, max_tokens=1, ignore_eos=True)
        request = replace(self._request(prompt, params, terms), pooling=pooling)
        deltas = NativeStream(self.client, request, OutputText(self.tokenizer, request))
        try:
            async for delta in deltas:
                if failure := failure_of(delta):
                    raise failure
                if delta.embedding is not None:
                    return Embedding(delta.embedding, delta.usage)
        finally:
            await deltas.aclose()
        raise EngineFault("The engine ended a request without its vector.")

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> NativeImageUpdates:
        drawn_by = self._painter_of(prompt_token_ids, image)
        check_priority(terms.priority)
        if terms.adapter:
            raise InvalidRequest("Adapters are for text: no image is drawn with one.", param="adapter")
        request = Request(
            request_id=terms.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=SamplingParams(temperature=0, seed=0, max_tokens=1),
            cache_salt=terms.cache_salt,
            priority=terms.priority,
            tenant=terms.tenant,
            image=image,
            given=given,
        )
        if given != NO_TEXTS:
            # To look at every value takes a while: the streams of others go on meanwhile.
            await asyncio.to_thread(request.check_given, max_rows=drawn_by.max_prompt_tokens, width=drawn_by.text_width)
        return NativeImageUpdates(self.client, request, drawn_by.num_tokens * image.passes_per_step)

    @property
    def adapters(self) -> Collection[Adapter]:
        return tuple(self._adapters)

    async def load_adapters(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            await self.load_adapter(name, path)

    async def load_adapter(self, name: str, path: str) -> None:
        """It is tried with one token: an adapter that the engine cannot read is found out here, and by no client."""
        adapter = self._adapters.add(name, await asyncio.to_thread(self._adapters.checked, path))
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        was_used = False
        try:
            async for delta in await self.submit([0], params, Terms(adapter=name)):
                if failure := failure_of(delta):
                    raise failure
            was_used = True
        except WeftError as error:
            raise ModelError(f"The engine cannot use the adapter {name}: {error}") from error
        finally:
            if not was_used:
                self._adapters.discard(adapter)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.remove(name)

    def health(self) -> Health:
        if self.client.state != "ready":
            return Health(False, self.client.state)
        return Health(True) if self.client.beats else Health(False, "the engine is silent")

    def stats(self) -> EngineStats:
        return self.client.stats()

    def restarts(self) -> int:
        return self.client.restarts

    def open_requests(self) -> int:
        return self.client.num_open

    async def reset_cache(self) -> int:
        return int(await self.client.send_on(ResetCache))

    async def start_profile(self, folder: str) -> str:
        return await self.client.send_on(lambda number: StartProfile(number, folder))

    async def stop_profile(self) -> str:
        return await self.client.send_on(StopProfile)

    async def close(self) -> None:
        await self.client.close()
        self._room.close()

    def _request(self, prompt: Prompt, params: SamplingParams, terms: Terms, sibling_of: str = "") -> Request:
        """As the engine sees it; raises InvalidRequest for what it cannot answer."""
        check_abilities(self, params, terms)
        adapter = self._adapters.chosen(terms.adapter)
        return self._room.request_of(
            self.model, tokens_of(prompt), params, terms, sibling_of=sibling_of, adapter=adapter
        )

    async def _teach_words(self) -> None:
        """Grammars are about text, and the engine has only tokens."""
        if self.client.vocabulary is None:
            words = await asyncio.to_thread(vocabulary_of, self.tokenizer)
            self.client.vocabulary = Vocabulary(words.tokens, words.special_ids, words.eos_token_ids)

    def _painter_of(self, prompt_token_ids: list[int], image: ImageParams) -> ImageModelInfo:
        """The model that can draw this; raises InvalidRequest when none can."""
        drawn_by = self.model.images
        if drawn_by is None:
            raise InvalidRequest(
                "There is no model that draws here.", hint="Serve with an --image-model for this language model."
            )
        image.check()
        if (image.width, image.height) != (drawn_by.width, drawn_by.height):
            raise InvalidRequest(
                f"{drawn_by.name} draws images of {drawn_by.width}x{drawn_by.height}, not of "
                f"{image.width}x{image.height}.",
                param="size",
            )
        image.check_read(prompt_token_ids, reads_text=drawn_by.reads_text)
        for param, token_ids in (("prompt", prompt_token_ids), ("negative_prompt", image.negative_token_ids)):
            check_token_ids(token_ids, self.model.logits_width, param)
            if len(token_ids) > drawn_by.max_prompt_tokens:
                raise ContextTooLong(
                    f"{param} has {len(token_ids)} tokens; {drawn_by.name} draws from at most "
                    f"{drawn_by.max_prompt_tokens}.",
                    param=param,
                )
        return drawn_by
