"""Weft's own engine behind the contract: text is handled on this side of the wire, integers on the other."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Protocol, TypeVar

from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.contract import Abilities, Health, Stream, Take, check_abilities, final_output, tokens_of
from weft.backends.model_text import ModelText, open_model_text
from weft.checkpoint.adapter_files import adapter_paths, allowed_adapter
from weft.checkpoint.model_files import ModelFiles
from weft.checkpoint.tokenizer_assets import text_assets
from weft.engine.client import EngineClient
from weft.engine.journal import Entry
from weft.engine.process import LaunchedEngine, launch_engine
from weft.engine.wire import PrefixDigests, ProcessControl, Vocabulary
from weft.engine_stats import EngineStats
from weft.errors import ConfigError, ContextTooLong, InvalidRequest, ModelError, WeftError
from weft.hub.resolve import find_model
from weft.machine.devices import accelerator
from weft.options import Config
from weft.payloads import NO_CONDITIONING
from weft.text.detokenizer import OutputText
from weft.text.grammars.specs import vocabulary_of
from weft.text.tokenizer import Tokenizer
from weft.types import (
    Adapter,
    Arrival,
    ChunkSize,
    ControlMessage,
    Embed,
    Event,
    GenerateImage,
    GenerationRequest,
    ImageModelInfo,
    ImageParams,
    LoadLora,
    ModelInfo,
    Output,
    Request,
    Sample,
    SamplingParams,
    SetChunkSize,
    UnloadLora,
    Usage,
    check_priority,
    check_token_ids,
)

E = TypeVar("E", bound="NativeEngine")


async def start_native(
    config: Config,
    files: ModelFiles | None = None,
    *,
    launch: Callable[[], LaunchedEngine] = launch_engine,
    on_digests: Callable[[PrefixDigests], None] | None = None,
) -> NativeEngine:
    """Load a model, and return an engine that is ready to generate. `on_digests` is told of its prefix cache."""
    refuse(config, files)
    if files is None:
        files = await asyncio.to_thread(find_model, config)
    if files.draft is not None:
        await asyncio.to_thread(check_vocabulary, files, files.draft)
    return await open_engine(EngineClient(config, files, launch, on_digests=on_digests), NativeEngine)


async def open_engine(client: EngineClient, make: Callable[[EngineClient, ModelText, Adapters], E]) -> E:
    """Start an engine process and open the model's text side by side, and make an engine of both, with the adapters
    that it is configured with. The first error is raised at once, and nothing is left behind."""
    config, files = client.config, client.files
    starting = asyncio.create_task(client.start())
    opening = asyncio.create_task(asyncio.to_thread(open_model_text, files, config.model))
    try:
        # A thread cannot be cancelled: after a cancellation the text is waited for below, to close it.
        await asyncio.gather(starting, asyncio.shield(opening))
        engine = make(client, opening.result(), Adapters(client.model.name, files))
        for name, path in adapter_paths(config).items():
            await engine.control(LoadLora(name, path))
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
    if config.model.speculative_model and config.scheduler.speculative != "off":
        raise ConfigError(
            f"--speculative {config.scheduler.speculative} and --speculative-model are two ways to draft.",
            hint="Leave one of them out.",
        )
    quantization = config.backend.quantization
    if quantization not in ("", "fp8", "int8", "int4", "w4a8"):
        raise ConfigError(
            f"The engine native quantises weights to fp8, int8, int4 or w4a8: --quantization cannot be {quantization}.",
            hint="Leave it out for a checkpoint of FP8, AWQ, GPTQ or compressed-tensors, or take an engine of vLLM.",
        )
    device = accelerator() if config.model.device == "auto" else config.model.device
    if quantization == "int8" and device == "cpu":
        if config.model.dtype != "auto" or find_spec("numba") is None:
            raise ConfigError(
                "On a CPU --quantization int8 needs --dtype auto, and numba, which compiles its kernels.",
                hint="Leave --dtype out." if find_spec("numba") is not None else "Install numba.",
            )
    elif quantization and device == "cpu":
        kind = "FP8" if quantization == "fp8" else quantization
        raise ConfigError(
            f"CPUs do not multiply {kind}: --quantization {quantization} is for GPUs.",
            hint="Take --quantization int8, or serve a GGUF file.",
        )
    if config.cache.kv_cache_dtype == "fp8" and device == "cpu":
        raise ConfigError(
            "CPUs have no kernels for FP8: --kv-cache-dtype fp8 is for GPUs.",
            hint="Take --kv-cache-dtype fp16 or int8.",
        )


def check_vocabulary(files: ModelFiles, draft: ModelFiles) -> None:
    """Raise ConfigError for a draft model whose tokens are not those of the model."""
    ours, theirs = (vocabulary_of(Tokenizer.from_assets(text_assets(one))).tokens for one in (files, draft))
    if ours != theirs:
        differing = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        why = f"has {len(theirs)} tokens, not {len(ours)}" if differing is None else f"has another token {differing}"
        raise ConfigError(
            f"--speculative-model {draft.name} {why}: a draft model needs the vocabulary of {files.name}.",
            hint="Name a smaller model of the same family.",
        )


class RequestClient(Protocol):
    """The client of an engine process, or of several, as far as an engine needs it (`EngineClient`)."""

    config: Config
    state: str
    model: ModelInfo
    vocabulary: Vocabulary | None

    @property
    def is_alive(self) -> bool: ...

    def submit(self, request: Request) -> Entry: ...

    def abort(self, request_id: str) -> None: ...

    def check_capacity(self, tenant: str, num_tokens: int = 1) -> None: ...

    async def control(self, message: ProcessControl) -> str: ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...


class OutputMaker(Protocol):
    """Makes outputs of what arrives for one request. After the output with `finish`, `ended` is true."""

    ended: bool

    def push(self, arrived: Sequence[Arrival]) -> Output | None: ...


class ImageOutputs:
    """The outputs of a request for an image: one for every event, so that no preview is lost."""

    def __init__(self, request: Request, step_tokens: int) -> None:
        """Follow a request whose denoise steps count as `step_tokens` tokens each."""
        self._num_prompt_tokens = request.num_prompt_tokens
        self._step_tokens = step_tokens
        self._step = 0
        self.ended = False

    def push(self, arrived: Sequence[Arrival]) -> Output | None:
        (event,) = arrived
        assert isinstance(event, Event), "an image has no tokens"
        self.ended = event.finish is not None
        self._step = self._step if event.denoise_step is None else event.denoise_step
        completion_tokens = self._step * self._step_tokens
        return Output(
            denoise_step=self._step,
            image=event.image,
            finish=event.finish,
            error=event.error,
            queue_seconds=event.queue_seconds,
            usage=Usage(prompt_tokens=self._num_prompt_tokens, completion_tokens=completion_tokens),
        )


class NativeStream(Stream):
    """The outputs of one request, which is queued when this is made."""

    def __init__(self, client: RequestClient, request: Request, reader: OutputMaker, chunk_size: ChunkSize) -> None:
        self._client = client
        self._reader = reader
        self._chunk_size = chunk_size
        self._has_begun = False
        self._entry = client.submit(request)
        self._loop = asyncio.get_running_loop()
        self._arrival: asyncio.Future[None]

    def __aiter__(self) -> NativeStream:
        return self

    async def __anext__(self) -> Output:
        while not self._reader.ended:
            if self._is_due:
                if (output := self._read()) is not None:
                    return output
                continue
            self._arrival = self._loop.create_future()
            self._entry.listener = self._ring
            await self._arrival
        raise StopAsyncIteration

    async def follow(self, take: Take) -> None:
        while not self._reader.ended:
            taking = await self._take_at_once(take)
            if taking is not None:
                await taking

    async def aclose(self) -> None:
        self._reader.ended = True
        self._abort()

    async def _take_at_once(self, take: Take) -> asyncio.Future[None] | None:
        """Give outputs to `take` as their tokens arrive, until there is something to await or nothing more to come."""
        enough: asyncio.Future[asyncio.Future[None] | None] = self._loop.create_future()

        def hear() -> None:
            if enough.done():
                return
            try:
                while self._is_due and not self._reader.ended:
                    output = self._read()
                    taking = None if output is None else take(output)
                    if taking is not None:
                        enough.set_result(asyncio.ensure_future(taking))
                        return
            except Exception as error:  # noqa: BLE001 - raised again in the task that follows
                enough.set_exception(error)
                return
            if self._reader.ended:
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

    @property
    def _is_due(self) -> bool:
        """True when enough has arrived for an output: with a chunk size, so many tokens, or the first or the last."""
        arrived, size = self._entry.arrived, self._chunk_size.tokens
        if size <= 1 or not self._has_begun or not arrived or len(arrived) >= size:
            return bool(arrived)
        return isinstance(last := arrived[-1], Event) and last.finish is not None

    def _read(self) -> Output | None:
        """Return what is due as an output; None when it is nothing that can be shown yet."""
        size = self._chunk_size.tokens
        output = self._reader.push(self._entry.take(size if self._has_begun else min(size, 1)))
        self._has_begun = self._has_begun or output is not None
        if self._reader.ended:
            self._abort()
        return output

    def _abort(self) -> None:
        """End a request that the engine still works on: after a stop string, or when its reader leaves."""
        if self._entry.is_open:
            self._client.abort(self._entry.id)


AS_MADE = ChunkSize()
ONE_EVENT = ChunkSize(1)
"""The size of the pieces in which an image's events come."""
EMBED_PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=1, ignore_eos=True)
IMAGE_PARAMS = SamplingParams(temperature=0, seed=0, max_tokens=1)
LORA_TRIAL_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class NativeEngine:
    """Weft's own engine: a client of an engine process, and the text of its model."""

    name = "native"
    abilities = Abilities()

    def __init__(self, client: RequestClient, text: ModelText, adapters: Adapters) -> None:
        self.client = client
        self.text = text
        self.chunk_size = ChunkSize(client.config.backend.stream_chunk_size)
        self._adapters = adapters

    @property
    def model(self) -> ModelInfo:
        return self.client.model

    @property
    def adapters(self) -> Collection[Adapter]:
        return tuple(self._adapters)

    def check_capacity(self, tenant: str) -> None:
        self.client.check_capacity(tenant)

    async def submit(self, request: GenerationRequest) -> NativeStream:
        check_abilities(self, request)
        match request.task:
            case Sample(params=params, markers=markers):
                sampled = self._engine_request(request, params)
                if params.grammar:
                    await self._load_vocabulary()
                chunk_size = request.task.chunk_size or self.chunk_size
                return NativeStream(self.client, sampled, OutputText(self.text.tokenizer, sampled, markers), chunk_size)
            case Embed(pooling=pooling):
                embedded = replace(self._engine_request(request, EMBED_PARAMS), pooling=pooling)
                return NativeStream(self.client, embedded, OutputText(self.text.tokenizer, embedded), AS_MADE)
            case GenerateImage():
                return await self._submit_image(request, request.task)

    async def control(self, message: ControlMessage) -> str:
        match message:
            case LoadLora(name=name, path=path, within_roots=within_roots):
                if within_roots:
                    path = await asyncio.to_thread(allowed_adapter, path, self.client.config)
                await self._load_lora(name, path)
                return ""
            case UnloadLora(name=name):
                self._adapters.remove(name)
                return ""
            case SetChunkSize(tokens=tokens):
                self.chunk_size.tokens = tokens
                return ""
        return await self.client.control(message)

    def health(self) -> Health:
        if self.client.state != "ready":
            return Health(False, self.client.state)
        return Health(True) if self.client.is_alive else Health(False, "the engine is silent")

    def stats(self) -> EngineStats:
        return self.client.stats()

    async def close(self) -> None:
        await self.client.close()
        self.text.close()

    def _engine_request(self, request: GenerationRequest, params: SamplingParams) -> Request:
        """Return the request as the engine process sees it, which checks `params`. Raises InvalidRequest for a prompt
        or an adapter that cannot be used."""
        return self.text.engine_request(self.model, request, params, self._adapters.chosen(request.adapter))

    async def _load_vocabulary(self) -> None:
        """Give the client the vocabulary: grammars are about text, and the engine has only tokens."""
        if self.client.vocabulary is None:
            vocabulary = await asyncio.to_thread(vocabulary_of, self.text.tokenizer)
            self.client.vocabulary = Vocabulary(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_token_ids)

    async def _load_lora(self, name: str, path: str) -> None:
        """Add an adapter, and try it with one token: one that the engine cannot read is found here, not by a client."""
        adapter = self._adapters.add(name, await asyncio.to_thread(self._adapters.checked, path))
        trial = GenerationRequest(prompt=[0], task=Sample(params=LORA_TRIAL_PARAMS), adapter=name)
        was_used = False
        try:
            await final_output(await self.submit(trial))
            was_used = True
        except WeftError as error:
            raise ModelError(f"The engine cannot use the adapter {name}: {error}") from error
        finally:
            if not was_used:
                self._adapters.discard(adapter)

    async def _submit_image(self, request: GenerationRequest, task: GenerateImage) -> NativeStream:
        prompt_token_ids, params, conditioning = tokens_of(request.prompt), task.params, task.conditioning
        model = self._image_model(prompt_token_ids, params)
        check_priority(request.priority)
        if request.adapter:
            raise InvalidRequest("Adapters are for text: an image cannot be generated with one.", param="adapter")
        drawn = Request(
            request_id=request.request_id or uuid.uuid4().hex,
            prompt_token_ids=prompt_token_ids,
            params=IMAGE_PARAMS,
            cache_salt=request.tenant_salt,
            priority=request.priority,
            tenant=request.tenant,
            image=params,
            conditioning=conditioning,
            trace=request.trace,
        )
        if conditioning != NO_CONDITIONING:
            # To look at every value takes a while: other streams go on meanwhile.
            await asyncio.to_thread(drawn.check_given, params, model.inputs)
        outputs = ImageOutputs(drawn, model.num_tokens * params.passes_per_step)
        return NativeStream(self.client, drawn, outputs, ONE_EVENT)

    def _image_model(self, prompt_token_ids: list[int], params: ImageParams) -> ImageModelInfo:
        """Return the model that can generate this image; raises InvalidRequest when none can."""
        model = self.model.images
        if model is None:
            raise InvalidRequest(
                "There is no image model here.", hint="Serve with an --image-model for this language model."
            )
        params.check()
        if (params.width, params.height) != (model.width, model.height):
            raise InvalidRequest(
                f"{model.name} draws images of {model.width}x{model.height}, not of {params.width}x{params.height}.",
                param="size",
            )
        params.check_read(prompt_token_ids, reads_text=model.reads_text)
        for param, token_ids in (("prompt", prompt_token_ids), ("negative_prompt", params.negative_token_ids)):
            check_token_ids(token_ids, self.model.logits_width, param)
            if len(token_ids) > model.max_prompt_tokens:
                raise ContextTooLong(
                    f"{param} has {len(token_ids)} tokens; {model.name} draws from at most {model.max_prompt_tokens}.",
                    param=param,
                )
        return model
