"""POST /v1/score and POST /v1/rerank: how alike texts are, by the cosine of their vectors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct
from pydantic import BeforeValidator, Field

from weft.api.body import Fields, off_loop, parse
from weft.api.handler import Writer
from weft.api.openai.embeddings import (
    FLOAT_BYTES,
    LARGE_ANSWER_BYTES,
    EmbeddingsRequest,
    EmbeddingsUsage,
    parse_embeddings,
)
from weft.api.openai.openai_schema import Items, Name
from weft.errors import EngineFault, InvalidRequest
from weft.serving.admission import RequestContext
from weft.serving.output_reader import CollectedOutput
from weft.serving.served_model import ServedModel
from weft.types import GenerationRequest


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _document(value: object) -> object:
    """Return the text of a document, which may be an object with it."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


Texts = Annotated[Items[str], Field(min_length=1), BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
Document = Annotated[str, BeforeValidator(_document, json_schema_input_type=str | dict[str, str])]


class ScoreRequest(Fields):
    """POST /v1/score"""

    model: Name
    text_1: Texts = Field(description="One text, or as many as text_2 has.")
    text_2: Texts
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of a longer text; -1: what the context holds."
    )
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")


class RerankRequest(Fields):
    """POST /v1/rerank"""

    model: Name
    query: str
    documents: Annotated[Items[Document], Field(min_length=1)]
    top_n: int = Field(0, ge=0, description="As many of the best; 0: all.")
    return_documents: bool = True
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of a longer text; -1: what the context holds."
    )
    priority: int = Field(0, description="Of a key's waiting requests those of a lower number go first.")
    cache_salt: str = Field("", max_length=256, description="Cached prompts are shared only with the same salt.")


class Score(Struct, frozen=True, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingsUsage


class RankedDocument(Struct, frozen=True):
    text: str


class RerankResult(Struct, frozen=True, kw_only=True):
    index: int
    document: RankedDocument | None
    relevance_score: float


class RerankAnswer(Struct, frozen=True, kw_only=True):
    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[RerankResult]


async def score_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], ScoreWriter]:
    request = await parse(ScoreRequest, body, context)
    await _choose(context, request.model)
    if len(request.text_1) not in (1, len(request.text_2)):
        raise InvalidRequest(
            f"text_1 has {len(request.text_1)} texts and text_2 has {len(request.text_2)}; "
            "text_1 must have one, or as many as text_2.",
            param="text_1",
        )
    writer = ScoreWriter(request)
    return await _vectors(request, [*request.text_1, *request.text_2], context, writer.answer_id), writer


async def rerank_endpoint(body: bytes, context: RequestContext) -> tuple[list[GenerationRequest], RerankWriter]:
    request = await parse(RerankRequest, body, context)
    await _choose(context, request.model)
    writer = RerankWriter(request)
    return await _vectors(request, [request.query, *request.documents], context, writer.answer_id), writer


async def _choose(context: RequestContext, name: str) -> ServedModel:
    served = await context.choose(name)
    served.check_model(name)
    if not served.engine.abilities.embeddings:
        raise InvalidRequest(
            f"The model {name!r:.200} gives no vectors, by which texts could be compared.",
            hint="GET /v1/models lists what each model is capable of: it takes one with embeddings.",
            param="model",
        )
    return served


async def _vectors(
    request: ScoreRequest | RerankRequest, texts: list[str], context: RequestContext, answer_id: str
) -> list[GenerationRequest]:
    if not all(texts):
        raise InvalidRequest("An empty text cannot be compared.")
    embeddings = EmbeddingsRequest.model_construct(
        model=request.model,
        input=texts,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    return await parse_embeddings(embeddings, context.served, request_id=answer_id, tenant=context.tenant)


class _VectorWriter(Writer):
    """Writes an answer made of the likeness of the first vectors to the others."""

    def __init__(self, answer_id: str, model_name: str, num_first: int) -> None:
        super().__init__(answer_id, model_name, stream=False)
        self._num_first = num_first

    async def whole(self, outputs: Sequence[CollectedOutput]) -> bytes:
        vectors: list[bytes] = []
        for output in outputs:
            if output.embedding is None:
                raise EngineFault("The engine ended a text without its vector.")
            vectors.append(output.embedding)
        num_tokens = sum(output.usage.prompt_tokens for output in outputs)
        is_long = len(vectors) * len(vectors[0]) > LARGE_ANSWER_BYTES
        return await off_loop(is_long, self._written, vectors, EmbeddingsUsage(num_tokens, num_tokens))

    def _written(self, vectors: list[bytes], usage: EmbeddingsUsage) -> bytes:
        return msgspec.json.encode(self._answer(cosines(vectors, self._num_first), usage))

    def _answer(self, scores: list[float], usage: EmbeddingsUsage) -> Struct:
        raise NotImplementedError


class ScoreWriter(_VectorWriter):
    def __init__(self, request: ScoreRequest) -> None:
        super().__init__(f"score-{uuid.uuid4().hex}", request.model, len(request.text_1))

    def _answer(self, scores: list[float], usage: EmbeddingsUsage) -> ScoreList:
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return ScoreList(id=self.answer_id, created=int(time.time()), model=self.model_name, data=data, usage=usage)


class RerankWriter(_VectorWriter):
    def __init__(self, request: RerankRequest) -> None:
        super().__init__(f"rerank-{uuid.uuid4().hex}", request.model, 1)
        self._request = request

    def _answer(self, scores: list[float], usage: EmbeddingsUsage) -> RerankAnswer:
        documents = self._request.documents
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._request.top_n or None]
        results = [
            RerankResult(
                index=index,
                document=RankedDocument(documents[index]) if self._request.return_documents else None,
                relevance_score=scores[index],
            )
            for index in best
        ]
        return RerankAnswer(id=self.answer_id, model=self.model_name, usage=usage, results=results)


def cosines(vectors: Sequence[bytes], num_first: int) -> list[float]:
    """Return the cosine of each of the other vectors to the only first one, or to the one of the same place."""
    import numpy as np  # servers that compare no texts start without it

    rows: Any = np.frombuffer(b"".join(vectors), "<f4").reshape(len(vectors), len(vectors[0]) // FLOAT_BYTES)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found: list[float] = (rows[:num_first] * rows[num_first:]).sum(axis=1).tolist()
    return found
