"""An OpenAI-compatible server, the peer, behind the engine contract."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from array import array
from collections.abc import Collection
from typing import Any, assert_never

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import (
    EngineText,
    Health,
    OneOutput,
    Stream,
    UnknownText,
    cannot,
    check_abilities,
    not_taken,
    tokens_unknown,
)
from weft.backends.model_text import ModelText
from weft.backends.openai_server.chunks import PeerVectors, read
from weft.backends.openai_server.http_client import FIRST_BYTE_S, EventStream, PeerClient
from weft.backends.openai_server.peer_errors import PeerLost, PeerRefused, error_of
from weft.backends.openai_server.peer_stream import (
    GoOn,
    PeerAnswer,
    PeerChatAnswer,
    PeerTextAnswer,
    PeerTokenAnswer,
    RemoteStream,
)
from weft.backends.openai_server.requests import PeerRequest, PeerRequestWriter
from weft.backends.openai_server.servers import Body, ServerKind, abilities_of
from weft.backends.rechunk import RechunkedStream
from weft.engine_stats import EngineStats
from weft.errors import EngineFault, RequestTimeout, Unavailable
from weft.text.detokenizer import OutputText
from weft.types import (
    Adapter,
    ChunkSize,
    ControlMessage,
    Conversation,
    Embed,
    FinishReason,
    GenerateImage,
    GenerationRequest,
    LoadLora,
    ModelInfo,
    Output,
    ReadBlocks,
    Request,
    ResetPrefixCache,
    Sample,
    SamplingParams,
    SetChunkSize,
    StartProfile,
    StopProfile,
    UnloadLora,
    Usage,
    check_priority,
)

log = logging.getLogger(__name__)

PROBE_S = 5.0
PROBE_WHEN_LOST_S = 1.0
JITTER = 0.2
"""The share of the time between two probes by which it varies: many that watch one peer must not ask it all at once."""
TIMEOUT_S = 5.0


class PeerWatch:
    """The watch probes the peer, and knows whether it is ready."""

    def __init__(self, client: PeerClient, path: str) -> None:
        """Probe the peer at `path`."""
        self._client = client
        self._path = path
        self._look = asyncio.Event()
        self._task = asyncio.create_task(self._keep_watch(), name="weft-remote-watch")
        self.health = Health(True)
        self.num_returns = 0
        """The number of times that the peer came back."""

    def suspect(self, why: PeerLost) -> None:
        """Note that a request was not answered, and probe soon."""
        self._found(str(why), gone=isinstance(why, PeerRefused))
        self.look()

    def look(self) -> None:
        """Probe soon."""
        self._look.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _keep_watch(self) -> None:
        while True:
            await self._pause()
            self._found(await self._trouble())

    async def _pause(self) -> None:
        seconds = PROBE_S if self.health.ready else PROBE_WHEN_LOST_S
        seconds *= random.uniform(1 - JITTER, 1 + JITTER)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._look.wait()
        if self._look.is_set():
            self._look.clear()
            await asyncio.sleep(min(seconds, PROBE_WHEN_LOST_S))

    async def _trouble(self) -> str:
        """Return why the peer is not ready; empty: it is."""
        try:
            answer = await self._client.ask(self._path, timeout_s=TIMEOUT_S)
        except (PeerLost, RequestTimeout) as error:
            return str(error)
        return "" if answer.status == 200 else f"it answers with status {answer.status}"

    def _found(self, trouble: str, *, gone: bool = False) -> None:
        if trouble and self.health.ready:
            log.warning("the remote engine at %s is not there: %s", self._client.shown, trouble)
        elif not trouble and not self.health.ready:
            log.warning("the remote engine at %s is there again", self._client.shown)
            self.num_returns += 1
        if trouble:
            self.health = Health(False, "the remote engine does not answer", gone=gone or self.health.gone)
        else:
            self.health = Health(True)


RETRY_S = 0.2
"""The pause before a peer that could not be reached is tried once more."""


class Peer(Struct, frozen=True, kw_only=True):
    """The facts about the peer that were asked for at the start."""

    kind: ServerKind
    model: str
    """The peer's own name for the model."""
    health_path: str


class RemoteEngine:
    """An engine whose requests a peer answers. With the model's text, prompts are tokens; without it, text and
    conversations are passed on."""

    adapters: Collection[Adapter] = ()

    def __init__(
        self, name: str, client: PeerClient, peer: Peer, model: ModelInfo, text: ModelText | None, *, chunk_size: int
    ) -> None:
        """Use the peer. Answers come in pieces of `chunk_size` tokens; 0: as the peer gives them."""
        self.name = name
        self.model = model
        self.abilities = abilities_of(peer.kind, tokens=text is not None)
        self.text: EngineText = UnknownText(self) if text is None else text
        self._client = client
        self._peer = peer
        self._model_text = text
        self._chunk_size = ChunkSize(chunk_size)
        self._writer = PeerRequestWriter(name, peer.kind, peer.model)
        self._watch = PeerWatch(client, peer.health_path)
        self._num_open = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def check_capacity(self, tenant: str) -> None:
        """Refuse nothing: the queue is the other side's."""

    async def submit(self, request: GenerationRequest) -> Stream:
        """Submit a request, and return when the peer begins to answer: until then its refusals are raised."""
        check_abilities(self, request)
        check_priority(request.priority)
        match request.task:
            case Sample():
                return await self._sample(request, request.task)
            case Embed():
                return OneOutput(await self._embed(request, request.task))
            case GenerateImage():
                raise cannot(self.name, "generate images")

    async def control(self, message: ControlMessage) -> str:
        match message:
            case LoadLora() | UnloadLora():
                raise not_taken(self.name, "adapter")
            case SetChunkSize(tokens=tokens):
                self._chunk_size.tokens = tokens
                return ""
            case ResetPrefixCache():
                raise cannot(self.name, "reset its peer's cache")
            case StartProfile() | StopProfile():
                raise cannot(self.name, "profile its peer")
            case ReadBlocks():
                raise cannot(self.name, "read its peer's blocks")
        assert_never(message)

    def health(self) -> Health:
        return self._watch.health

    def stats(self) -> EngineStats:
        """Return what is known on this side: the rest is the peer's to tell."""
        return EngineStats(
            running=self._num_open,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_tokens,
            restarts=self._watch.num_returns,
            open_requests=self._num_open,
        )

    async def close(self) -> None:
        await self._watch.close()
        await self._client.close()
        if self._model_text is not None:
            self._model_text.close()

    async def _sample(self, request: GenerationRequest, task: Sample) -> Stream:
        task.params.check()
        if self._model_text is not None:
            task.params.check_token_ids(self.model.logits_width)
            asked, answer = self._about_tokens(self._model_text, request, task)
        else:
            asked, answer = self._about_text(request, task.params)
        self._num_open += 1
        try:
            events = await self._open(asked)
        except BaseException:
            self._num_open -= 1
            raise
        stream = RemoteStream(asked, events, answer, self._open, self._ended)
        return RechunkedStream(stream, task.chunk_size or self._chunk_size)

    async def _embed(self, request: GenerationRequest, task: Embed) -> Output:
        body: Body = {
            "model": self._peer.model,
            "input": request.prompt,
            "pooling": str(task.pooling),
            "priority": request.priority,
            "cache_salt": request.tenant_salt,
        }
        self._num_open += 1
        try:
            reply = await self._client.ask("embeddings", body, timeout_s=FIRST_BYTE_S)
            if reply.status != 200:
                raise error_of(reply.status, reply.body, reply.headers)
            vectors = read(reply.body, PeerVectors)
        except PeerLost as lost:
            raise self._not_there(lost) from lost
        finally:
            self._num_open -= 1
        if len(vectors.data) != 1:
            raise EngineFault(f"The remote engine gave {len(vectors.data)} vectors for one input.")
        usage = vectors.usage.usage() if vectors.usage is not None else Usage()
        self._num_prompt_tokens += usage.prompt_tokens
        embedding = array("f", vectors.data[0].embedding).tobytes()
        return Output(embedding=embedding, usage=usage, finish=FinishReason.STOP)

    def _about_tokens(
        self, model_text: ModelText, request: GenerationRequest, task: Sample
    ) -> tuple[PeerRequest, PeerAnswer]:
        resolved = model_text.engine_request(self.model, request, task.params)
        # A seed that was drawn here is told only to a peer that can go on with it: others sample requests with seeds
        # at a price.
        if not self._peer.kind.seeds_by_position:
            resolved = replace(resolved, params=replace(resolved.params, seed=task.params.seed))
        asked = self._ask_tokens(resolved, resolved.prompt_token_ids, resolved.params)
        if not self.abilities.answer_tokens:
            return asked, PeerTextAnswer(len(resolved.prompt_token_ids))
        text = OutputText(model_text.tokenizer, resolved, task.markers)
        return asked, PeerTokenAnswer(text, resolved, self._go_on(resolved))

    def _about_text(self, request: GenerationRequest, params: SamplingParams) -> tuple[PeerRequest, PeerAnswer]:
        options: dict[str, Any] = {"priority": request.priority, "cache_salt": request.tenant_salt}
        match request.prompt:
            case Conversation():
                return self._writer.chat(request.prompt, params, **options), PeerChatAnswer()
            case str():
                return self._writer.text(request.prompt, params, **options), PeerTextAnswer()
            case _:
                raise tokens_unknown(self, "A prompt of token ids", "prompt")

    def _ask_tokens(self, request: Request, prompt: list[int], params: SamplingParams) -> PeerRequest:
        return self._writer.tokens(prompt, params, priority=request.priority, cache_salt=request.cache_salt)

    def _go_on(self, request: Request) -> GoOn:
        """Return what writes the request for the rest of an answer, which goes on as if it had never broken off."""
        params = request.params
        # These look at what was written, and would not see it in a prompt.
        looks_back = bool(params.grammar or params.presence_penalty or params.frequency_penalty)
        is_seeded = params.seed is not None and params.temperature > 0 and not self._peer.kind.seeds_by_position

        def request_rest(delivered: list[int]) -> PeerRequest | None:
            rest = (params.max_tokens or 0) - len(delivered)
            if looks_back or is_seeded or rest <= 0:
                return None
            least = max(0, params.min_tokens - len(delivered))
            changed = replace(params, max_tokens=rest, min_tokens=least, prompt_logprobs=None)
            return self._ask_tokens(request, request.prompt_token_ids + delivered, changed)

        return request_rest

    async def _open(self, request: PeerRequest) -> EventStream:
        """Send a request, and once more when the peer is not there. Raises the peer's error, and Unavailable."""
        try:
            return await self._client.stream(request.path, request.body)
        except PeerLost:
            await asyncio.sleep(RETRY_S)
        try:
            return await self._client.stream(request.path, request.body)
        except PeerLost as lost:
            raise self._not_there(lost) from lost

    def _not_there(self, lost: PeerLost) -> Unavailable:
        self._watch.suspect(lost)
        return Unavailable("The remote engine does not answer.", hint="The log of this server says more.")

    def _ended(self, last: Output | None) -> None:
        self._num_open -= 1
        if last is not None:
            if last.finish is FinishReason.ERROR:
                self._watch.look()
            self._num_prompt_tokens += last.usage.prompt_tokens
            self._num_tokens += last.usage.completion_tokens
