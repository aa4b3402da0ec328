"""POST /v1/embeddings"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from array import array
from typing import Annotated, Literal

from fastapi import Response
from msgspec import Struct
from pydantic import Field, PlainValidator
from starlette.types import Receive, Scope, Send

from weft.api.body import parse, read_body
from weft.api.error_responses import JsonResponse
from weft.api.openai.openai_schema import Fields, prompts
from weft.api.translate import LONG_PROMPT, given_tokens
from weft.backends.contract import Embedding, Engine, Prompt, Terms, num_tokens, tokens_unknown
from weft.errors import InvalidRequest, Overloaded
from weft.serving.admission import Admission, RequestContext
from weft.serving.guard import ClientGone, guarded, side_by_side
from weft.serving.timing import RequestTimer, all_ended
from weft.types import FinishReason, Pooling

log = logging.getLogger(__name__)

FLOAT_BYTES = 4
MAX_AT_ONCE = 256
"""Inputs of one request that are in the engine's queue together: the rest must not fill it."""


class EmbeddingsRequest(Fields):
    """POST /v1/embeddings"""

    model: str
    input: Annotated[
        list[str | list[int]],
        PlainValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of float32, little-endian.")
    dimensions: int | None = Field(None, description="Only the model's own width.")
    user: str | None = Field(None, description="Accepted, and without meaning here.")

    pooling: Literal["mean", "last"] = Field("mean", description="How the tokens' vectors become one.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of a longer input; -1: what the context holds."
    )
    add_special_tokens: bool = Field(True, description="Of texts; token ids are taken as they are.")
    priority: int = Field(0, description="Waiting requests of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsExchange(Response):
    """A response that does the work itself, next to the socket: it sees the client hang up."""

    def __init__(self, gate: Admission) -> None:
        super().__init__()
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = time.perf_counter()
        options = self._gate.config.server
        with self._gate.admit(receive) as seat:
            try:
                body = await read_body(scope, receive, options.max_body_mb << 20)
                batch = await _batch(body, seat, arrived)
                with all_ended(batch.stopwatches):
                    await guarded(batch.run(), receive, aborted=seat.aborted, timeout_s=options.request_timeout_s)
            except ClientGone:
                log.info("the client hung up")
                return
        response = JsonResponse(batch.answer())
        await response(scope, receive, send)


class Batch:
    """The inputs of one request at the engine. Every one that it took is counted as ended exactly once."""

    def __init__(self, request: EmbeddingsRequest, inputs: list[Prompt], seat: RequestContext, arrived: float) -> None:
        self._request = request
        self._inputs = inputs
        self._seat = seat
        self._arrived = arrived
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._vectors: dict[int, Embedding] = {}
        self.stopwatches: list[RequestTimer] = []
        seat.answer_id = f"embd-{uuid.uuid4().hex}"
        seat.choices = self.stopwatches

    async def run(self) -> None:
        """Raises the first error of any input; the others are ended then."""
        await side_by_side(self._embed(index, given) for index, given in enumerate(self._inputs))

    def answer(self) -> EmbeddingList:
        vectors = [self._vectors[index] for index in range(len(self._inputs))]
        num_tokens = sum(vector.usage.prompt_tokens for vector in vectors)
        return EmbeddingList(
            data=[
                EmbeddingBody(index=index, embedding=_written(vector.data, self._request.encoding_format))
                for index, vector in enumerate(vectors)
            ],
            model=self._request.model,
            usage=EmbeddingsUsage(num_tokens, num_tokens),
        )

    async def _embed(self, index: int, given: Prompt) -> None:
        service, request = self._seat.service, self._request
        async with self._room:
            stopwatch = RequestTimer(
                service.metrics, self._seat.account, self._arrived, num_tokens(given), request.model
            )
            self.stopwatches.append(stopwatch)
            try:
                vector = await service.engine.embed(
                    given,
                    Pooling(request.pooling),
                    Terms(
                        request_id=f"{self._seat.answer_id}-{index}",
                        cache_salt=request.cache_salt,
                        priority=request.priority,
                        tenant=self._seat.tenant,
                        adapter=service.adapter_for(request.model),
                    ),
                )
            except Overloaded:
                self.stopwatches.remove(stopwatch)
                service.metrics.rejected()
                raise
        stopwatch.num_prompt_tokens = vector.usage.prompt_tokens
        self._seat.account.spend_tokens(vector.usage.prompt_tokens)
        stopwatch.end(FinishReason.STOP)
        width = len(vector.data) // FLOAT_BYTES
        if request.dimensions not in (None, width):
            raise InvalidRequest(
                f"dimensions is {request.dimensions}; this model's vectors have {width}, and are not cut.",
                param="dimensions",
            )
        self._vectors[index] = vector


async def _batch(body: bytes, seat: RequestContext, arrived: float) -> Batch:
    request = await parse(EmbeddingsRequest, body, seat.config.limits)
    service = await seat.choose(request.model)
    service.check_model(request.model)
    if sum(map(len, request.input)) > LONG_PROMPT:
        inputs = await asyncio.to_thread(_encoded, request, service.engine)
    else:
        inputs = _encoded(request, service.engine)
    return Batch(request, inputs, seat, arrived)


def _encoded(request: EmbeddingsRequest, engine: Engine) -> list[Prompt]:
    if not all(request.input):
        raise InvalidRequest("An empty input has no vector.", param="input")
    if not engine.abilities.tokens:
        return _texts(request, engine)
    longest = _longest(request, engine.model.max_model_len)
    inputs: list[Prompt] = []
    for given in request.input:
        if isinstance(given, str):
            token_ids = engine.tokenizer.encode(given, add_special_tokens=request.add_special_tokens)
        else:
            token_ids = given_tokens(given, engine, "input")
        inputs.append(token_ids if longest is None else token_ids[-longest:])
    return inputs


def _texts(request: EmbeddingsRequest, engine: Engine) -> list[Prompt]:
    """The inputs, for an engine that is given text."""
    asked = {
        "truncate_prompt_tokens": request.truncate_prompt_tokens is not None,
        "add_special_tokens": not request.add_special_tokens,
        "input": any(isinstance(given, list) for given in request.input),
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise tokens_unknown(engine, "Token ids instead of text" if field == "input" else field, field)
    return [*request.input]


def _longest(request: EmbeddingsRequest, max_model_len: int) -> int | None:
    longest = request.truncate_prompt_tokens
    # The engine wants room for one token behind every prompt.
    most = max_model_len - 1
    if longest is None or 1 <= longest <= most:
        return longest
    if longest == -1:
        return most
    raise InvalidRequest(
        f"truncate_prompt_tokens is {longest}; it must be -1, or from 1 to {most}.", param="truncate_prompt_tokens"
    )


def _written(data: bytes, encoding_format: str) -> list[float] | str:
    return base64.b64encode(data).decode() if encoding_format == "base64" else array("f", data).tolist()
