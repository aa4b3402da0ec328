"""An engine that knows one text by heart: asked to continue any beginning of it, it goes on to the end, a byte a token.
It may die on the way."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from tests.api.scripted_engine import ScriptedEngine, ScriptedTokenizer
from weft.backends.contract import Health, Stream, tokens_of
from weft.engine_stats import EngineStats
from weft.errors import Unavailable
from weft.text.detokenizer import OutputText
from weft.types import Event, FinishReason, GenerationRequest, Output, Request, Sample, SamplingParams, TokenLogprob

QUESTION = "Q: "
TEXT = "The sea — 🌊 — is wide, and the wind is wild. END of it."


class ByteTokenizer(ScriptedTokenizer):
    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False


class RecitingEngine(ScriptedEngine):
    def __init__(
        self, name: str = "reciting", *, dies_after: int = 10**9, spelling: ByteTokenizer | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.model = replace(self.model, name=name)
        self.tokenizer = spelling or ByteTokenizer()
        self.dies_after = dies_after
        """Tokens, of all requests together."""
        self.generated = 0
        self.asked: list[GenerationRequest] = []

    async def submit(self, request: GenerationRequest) -> Stream:
        if not self.state.ready:
            raise Unavailable("The engine is not available: failed.")
        if not isinstance(request.task, Sample):
            return await super().submit(request)
        self.asked.append(request)
        request_id = request.request_id or f"own-{len(self.asked)}"
        return Recital(self, tokens_of(request.prompt), request.task.params, request_id)

    def stats(self) -> EngineStats:
        num_open = len(self.open)
        return EngineStats(running=num_open, generation_tokens=self.generated, restarts=1, open_requests=num_open)


class Recital(Stream):
    def __init__(self, engine: RecitingEngine, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        assert bytes(prompt) == (QUESTION + TEXT).encode()[: len(prompt)], "only beginnings are known by heart"
        self._engine = engine
        self._params = params
        self._rest = list((QUESTION + TEXT).encode()[len(prompt) :])
        self._text = OutputText(
            engine.text.tokenizer, Request(request_id=request_id, prompt_token_ids=prompt, params=params)
        )
        self._num_given = 0
        self._id = request_id
        engine.open.add(request_id)

    def __aiter__(self) -> Recital:
        return self

    async def __anext__(self) -> Output:
        while not self._text.ended:
            await asyncio.sleep(0)
            delta = self._text.push([self._next()])
            if self._text.ended:
                self._engine.open.discard(self._id)
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._text.ended = True
        self._engine.open.discard(self._id)

    def _next(self) -> Event:
        if not self._engine.state.ready or self._engine.generated == self._engine.dies_after:
            self._engine.state = Health(False, "failed")
            return Event(request_id=self._id, finish=FinishReason.ERROR, error="There is no engine any more.")
        self._engine.generated += 1
        self._num_given += 1
        at_limit = self._num_given == self._params.max_tokens
        token = self._rest.pop(0)
        finish = FinishReason.STOP if not self._rest else FinishReason.LENGTH if at_limit else None
        logprobs = [TokenLogprob(-float(token))] if self._params.logprobs is not None else None
        return Event(request_id=self._id, token_ids=[token], logprobs=logprobs, finish=finish)
