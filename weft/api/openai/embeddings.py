"""POST /v1/embeddings"""

from __future__ import annotations

import base64
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Struct
from pydantic import Field, PlainValidator

from weft.api.body import Fields, off_loop, parse
from weft.api.handler import Writer
from weft.api.openai.openai_answers import with_items
from weft.api.openai.openai_schema import Name, prompts
from weft.api.translate import LONG_PROMPT, given_tokens
from weft.backends.contract import Engine, max_encoded_tokens, tokens_unknown
from weft.errors import EngineFault, InvalidRequest
from weft.options import LimitOptions
from weft.serving.admission import RequestContext
from weft.serving.output_reader import CollectedOutput
from weft.serving.request import requests_like
from weft.serving.served_model import ServedModel
from weft.types import Embed, GenerationRequest, Output, Pooling, Prompt

FLOAT_BYTES = 4
WRITTEN_BYTES = {"float": 22, "base64": 6}
"""The bytes that one value takes in the answer."""
LARGE_ANSWER_BYTES = 64 * 1024
"""Above this vectors are written in a thread."""


class EmbeddingsRequest(Fields):
    """POST /v1/embeddings"""

    place: ClassVar[str] = "embeddings"

    model: Name
    input: Annotated[
        list[str | list[int]],
        PlainValidator(prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of float32, little-endian.")
    dimensions: int | None = Field(None, description="Only the model's own width.")

    pooling: Literal["mean", "last"] = Field("mean", description="How the tokens' vectors become one.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of a longer input; -1: what the context holds."
    )
    add_special_tokens: bool = Field(True, description="Of texts; token ids are taken as they are.")
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
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


async def embeddings_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], EmbeddingsWriter]:
    request = await parse(EmbeddingsRequest, body, context)
    served = await context.choose(request.model)
    served.check_model(request.model)
    writer = EmbeddingsWriter(request, context.config.limits)
    return await parse_embeddings(request, served, request_id=writer.answer_id, tenant=context.tenant), writer


async def parse_embeddings(
    request: EmbeddingsRequest, served: ServedModel, *, request_id: str, tenant: str
) -> list[GenerationRequest]:
    """Turn inputs into requests to the engine, whose ids begin with `request_id`."""
    prompts = await off_loop(sum(map(len, request.input)) > LONG_PROMPT, _encoded, request, served.engine)
    common = GenerationRequest(
        prompt=prompts[0],
        task=Embed(Pooling(request.pooling)),
        request_id=request_id,
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=tenant,
        adapter=served.adapter_for(request.model),
    )
    return requests_like(common, prompts)


class EmbeddingsWriter(Writer):
    """Writes the vectors of all inputs; they are never streamed."""

    def __init__(self, request: EmbeddingsRequest, limits: LimitOptions) -> None:
        super().__init__(f"embd-{uuid.uuid4().hex}", request.model, stream=False)
        self._request = request
        self._limit_mb = limits.max_answer_mb

    def check(self, output: Output) -> None:
        if output.finish:
            self._checked(output.embedding)

    async def whole(self, outputs: Sequence[CollectedOutput]) -> list[bytes]:
        vectors = [self._checked(output.embedding) for output in outputs]
        num_tokens = sum(output.usage.prompt_tokens for output in outputs)
        return await off_loop(len(vectors) * len(vectors[0]) > LARGE_ANSWER_BYTES, self._whole, vectors, num_tokens)

    def _whole(self, vectors: Sequence[bytes], num_tokens: int) -> list[bytes]:
        answer = EmbeddingList(data=[], model=self._request.model, usage=EmbeddingsUsage(num_tokens, num_tokens))
        encoding_format = self._request.encoding_format
        bodies = (
            EmbeddingBody(index=index, embedding=written(vector, encoding_format))
            for index, vector in enumerate(vectors)
        )
        return with_items(answer, "data", bodies)

    def _checked(self, vector: bytes | None) -> bytes:
        if vector is None:
            raise EngineFault("The engine ended an input without its vector.")
        width = len(vector) // FLOAT_BYTES
        if self._request.dimensions not in (None, width):
            raise InvalidRequest(
                f"dimensions is {self._request.dimensions}; this model's vectors have {width}, and are not cut.",
                param="dimensions",
            )
        size = len(self._request.input) * width * WRITTEN_BYTES[self._request.encoding_format]
        if size > self._limit_mb << 20:
            raise InvalidRequest(
                f"{len(self._request.input)} vectors of {width} numbers take {size >> 20} MiB; at most "
                f"{self._limit_mb} MiB are taken.",
                hint="Send fewer inputs, or ask for base64. The operator's setting is --max-answer-mb.",
                param="input",
            )
        return vector


def _encoded(request: EmbeddingsRequest, engine: Engine) -> list[Prompt]:
    if not all(request.input):
        raise InvalidRequest("An empty input has no vector.", param="input")
    if not engine.abilities.tokens:
        return _texts(request, engine)
    longest = _longest(request, engine.model.max_model_len)
    inputs: list[Prompt] = []
    for given in request.input:
        if isinstance(given, str):
            token_ids = engine.text.tokenizer.encode(
                given, add_special_tokens=request.add_special_tokens, max_tokens=max_encoded_tokens(engine)
            )
        else:
            token_ids = given_tokens(given, engine, "input")
        inputs.append(token_ids if longest is None else token_ids[-longest:])
    return inputs


def _texts(request: EmbeddingsRequest, engine: Engine) -> list[Prompt]:
    """Return the inputs, for an engine that is given text."""
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
    # The engine wants space for one token behind every prompt.
    most = max_model_len - 1
    if longest is None or 1 <= longest <= most:
        return longest
    if longest == -1:
        return most
    raise InvalidRequest(
        f"truncate_prompt_tokens is {longest}; it must be -1, or from 1 to {most}.", param="truncate_prompt_tokens"
    )


def written(data: bytes, encoding_format: str) -> list[float] | str:
    return base64.b64encode(data).decode() if encoding_format == "base64" else array("f", data).tolist()
