"""A peer behind the contract."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import (
    PLAIN_TERMS,
    ChatPrompt,
    ChatStyles,
    Conversation,
    Embedding,
    Health,
    ImageUpdates,
    Prompt,
    Stream,
    Terms,
    cannot,
    check_abilities,
    not_taken,
    tokens_of,
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
from weft.errors import EngineFault, RequestTimeout, Unavailable
from weft.payloads import NO_TEXTS, GivenTexts
from weft.text.detokenizer import OutputText
from weft.text.tokenizer import Tokenizer
from weft.types import (
    Adapter,
    EngineStats,
    FinishReason,
    ImageParams,
    ModelInfo,
    Output,
    Pooling,
    Request,
    SamplingParams,
    Usage,
    check_priority,
)

log = logging.getLogger(__name__)

PROBE_S = 5.0
PROBE_WHEN_LOST_S = 1.0
JITTER = 0.2
"""Of the time between two probes: many that watch one peer must not ask it all at once."""
TIMEOUT_S = 5.0


class Watch:
    def __init__(self, line: PeerClient, path: str) -> None:
        """`path` is what is asked for."""
        self._line = line
        self._path = path
        self._look = asyncio.Event()
        self._task = asyncio.create_task(self._keep_watch(), name="weft-remote-watch")
        self.health = Health(True)
        self.num_returns = 0
        """How often the peer came back."""

    def suspect(self, why: PeerLost) -> None:
        """A request was not answered."""
        self._found(str(why), gone=isinstance(why, PeerRefused))
        self.look()

    def look(self) -> None:
        """Ask soon."""
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
        """Why the peer is not ready; empty: it is."""
        try:
            answer = await self._line.ask(self._path, timeout_s=TIMEOUT_S)
        except (PeerLost, RequestTimeout) as error:
            return str(error)
        return "" if answer.status == 200 else f"it answers with status {answer.status}"

    def _found(self, trouble: str, *, gone: bool = False) -> None:
        if trouble and self.health.ready:
            log.warning("the remote engine at %s is not there: %s", self._line.shown, trouble)
        elif not trouble and not self.health.ready:
            log.warning("the remote engine at %s is there again", self._line.shown)
            self.num_returns += 1
        if trouble:
            self.health = Health(False, "the remote engine does not answer", gone=gone or self.health.gone)
        else:
            self.health = Health(True)


RETRY_S = 0.2
"""Before a peer that was not to be reached is tried once more."""


class Peer(Struct, frozen=True, kw_only=True):
    """What was found out of it at the start."""

    kind: ServerKind
    model: str
    """Its own name for the model."""
    health_path: str


class RemoteEngine:
    """With a text room, prompts are tokens here and there; without one, text is passed on."""

    adapters: Collection[Adapter] = ()

    def __init__(
        self, name: str, line: PeerClient, peer: Peer, model: ModelInfo, room: ModelText | None, *, chunk_size: int
    ) -> None:
        """`chunk_size`: tokens in a piece of an answer that comes as text."""
        self.name = name
        self.model = model
        self.abilities = abilities_of(peer.kind, tokens=room is not None)
        self._line = line
        self._peer = peer
        self._room = room
        self._chunk_size = chunk_size
        self._asker = PeerRequestWriter(name, peer.kind, peer.model)
        self._watch = Watch(line, peer.health_path)
        self._num_open = 0
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    @property
    def tokenizer(self) -> Tokenizer:
        if self._room is None:
            raise tokens_unknown(self, "This")
        return self._room.tokenizer

    @property
    def styles(self) -> ChatStyles:
        return ChatStyles() if self._room is None else self._room.styles

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        if self._room is None:
            raise tokens_unknown(self, "This")
        return self._room.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_variables=template_variables,
        )

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: Terms = PLAIN_TERMS,
        *,
        sibling_of: str = "",
        markers: Collection[str] = (),
    ) -> Stream:
        """Returns when the peer begins to answer: until then its refusals are raised."""
        check_abilities(self, params, terms)
        check_priority(terms.priority)
        if self._room is not None:
            request = self._room.request_of(self.model, tokens_of(prompt), params, terms)
            question, answer = self._about_tokens(self._room, request, params.seed, markers)
        else:
            question, answer = self._about_text(prompt, params, terms)
        self._num_open += 1
        try:
            stream = await self._open(question)
        except BaseException:
            self._num_open -= 1
            raise
        deltas = RemoteStream(question, stream, answer, self._open, self._ended)
        return deltas if terms.uncut or self.abilities.answer_tokens else RechunkedStream(deltas, self._chunk_size)

    async def embed(self, prompt: Prompt, pooling: Pooling, terms: Terms = PLAIN_TERMS) -> Embedding:
        if not self.abilities.embeddings:
            raise cannot(self.name, "make embeddings")
        if terms.adapter:
            raise not_taken(self.name, "adapter")
        check_priority(terms.priority)
        body: Body = {
            "model": self._peer.model,
            "input": prompt,
            "pooling": str(pooling),
            "priority": terms.priority,
            "cache_salt": terms.cache_salt,
        }
        self._num_open += 1
        try:
            reply = await self._line.ask("embeddings", body, timeout_s=FIRST_BYTE_S)
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
        return Embedding(array("f", vectors.data[0].embedding).tobytes(), usage)

    async def draw(
        self, prompt_token_ids: list[int], image: ImageParams, terms: Terms = PLAIN_TERMS, given: GivenTexts = NO_TEXTS
    ) -> ImageUpdates:
        raise cannot(self.name, "draw images")

    async def load_adapter(self, name: str, path: str) -> None:
        raise not_taken(self.name, "adapter")

    async def unload_adapter(self, name: str) -> None:
        raise not_taken(self.name, "adapter")

    def health(self) -> Health:
        return self._watch.health

    def stats(self) -> EngineStats:
        """What is known on this side: the rest is the peer's to tell."""
        return EngineStats(
            running=self._num_open, prompt_tokens=self._num_prompt_tokens, generation_tokens=self._num_tokens
        )

    def restarts(self) -> int:
        return self._watch.num_returns

    def open_requests(self) -> int:
        return self._num_open

    async def reset_cache(self) -> int:
        raise cannot(self.name, "reset its peer's cache")

    async def start_profile(self, folder: str) -> str:
        raise cannot(self.name, "profile its peer")

    async def stop_profile(self) -> str:
        raise cannot(self.name, "profile its peer")

    async def close(self) -> None:
        await self._watch.close()
        await self._line.close()
        if self._room is not None:
            self._room.close()

    def _about_tokens(
        self, room: ModelText, request: Request, seed: int | None, markers: Collection[str]
    ) -> tuple[PeerRequest, PeerAnswer]:
        """`seed`: that of the client. One that was drawn here is told only to a peer that can go on with it: others
        sample requests with seeds at a price."""
        if not self._peer.kind.seeds_by_position:
            request = replace(request, params=replace(request.params, seed=seed))
        question = self._ask_tokens(request, request.prompt_token_ids, request.params)
        if not self.abilities.answer_tokens:
            return question, PeerTextAnswer(len(request.prompt_token_ids))
        text = OutputText(room.tokenizer, request, markers)
        return question, PeerTokenAnswer(text, request, self._go_on(request))

    def _about_text(self, prompt: Prompt, params: SamplingParams, terms: Terms) -> tuple[PeerRequest, PeerAnswer]:
        params.check()
        asked: dict[str, Any] = {"priority": terms.priority, "cache_salt": terms.cache_salt}
        match prompt:
            case Conversation():
                return self._asker.chat(prompt, params, **asked), PeerChatAnswer()
            case str():
                return self._asker.text(prompt, params, **asked), PeerTextAnswer()
            case _:
                raise tokens_unknown(self, "A prompt of token ids", "prompt")

    def _ask_tokens(self, request: Request, prompt: list[int], params: SamplingParams) -> PeerRequest:
        return self._asker.tokens(prompt, params, priority=request.priority, cache_salt=request.cache_salt)

    def _go_on(self, request: Request) -> GoOn:
        """An answer goes on as if it had never broken off, or not at all."""
        params = request.params
        # These look at what was written, and would not see it in a prompt.
        looks_back = bool(params.grammar or params.presence_penalty or params.frequency_penalty)
        is_seeded = params.seed is not None and params.temperature > 0 and not self._peer.kind.seeds_by_position

        def question(delivered: list[int]) -> PeerRequest | None:
            rest = (params.max_tokens or 0) - len(delivered)
            if looks_back or is_seeded or rest <= 0:
                return None
            least = max(0, params.min_tokens - len(delivered))
            changed = replace(params, max_tokens=rest, min_tokens=least, prompt_logprobs=None)
            return self._ask_tokens(request, request.prompt_token_ids + delivered, changed)

        return question

    async def _open(self, question: PeerRequest) -> EventStream:
        """Ask, and once more when nobody is there. Raises what the peer says, and Unavailable."""
        try:
            return await self._line.stream(question.path, question.body)
        except PeerLost:
            await asyncio.sleep(RETRY_S)
        try:
            return await self._line.stream(question.path, question.body)
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
