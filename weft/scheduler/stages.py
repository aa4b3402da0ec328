"""What a request is made of: stages, one after the other, each of them a cursor of its own.

Most requests have one stage. An image has up to three: its prompt and its negative prompt are encoded by the language
model, like everybody's prompts, and then it is drawn. A prompt of no tokens is not encoded: no prompt at all is
something that can be drawn, too.
"""

from __future__ import annotations

from msgspec import Struct

from weft.plan import Limits
from weft.scheduler.cursors import Canvas, Cursor, DenoiseCursor, PoolCursor, TextCursor, TokenCursor
from weft.types import ImageParams, Pooling, Request


class Generate(Struct, frozen=True):
    """Sample an answer to the prompt."""


class Pool(Struct, frozen=True):
    """Make one vector of the prompt."""

    pooling: Pooling


class Encode(Struct, frozen=True):
    """Keep the hidden states of a prompt in the worker."""

    token_ids: list[int]
    is_negative: bool


class Draw(Struct, frozen=True):
    """Denoise an image, step by step."""

    image: ImageParams
    cost: int
    """Of a step."""


Stage = Generate | Pool | Encode | Draw


def stages_of(request: Request, limits: Limits) -> list[Stage]:
    """Of a request that can be served within these limits."""
    image = request.image
    if image is None or limits.image is None:
        return [Generate() if request.pooling is None else Pool(request.pooling)]
    texts = [(request.prompt_token_ids, False)]
    if image.passes > 1:
        texts.append((image.negative_token_ids, True))
    encodes = [Encode(token_ids, is_negative) for token_ids, is_negative in texts if token_ids]
    return [*encodes, Draw(image, limits.image.cost(image))]


def first_cursor(request: Request, limits: Limits, arrival: int, arrived_at: float) -> Cursor:
    return _cursor_of(stages_of(request, limits)[0], request, Canvas(), limits, arrival, arrived_at)


def next_cursor(ended: TextCursor, limits: Limits) -> Cursor:
    """Of the stage that follows on one that has ended."""
    stages = stages_of(ended.request, limits)
    stage = stages[stages.index(Encode(ended.tokens, ended.is_negative)) + 1]
    cursor = _cursor_of(stage, ended.request, ended.canvas, limits, ended.arrival, ended.arrived_at)
    cursor.queue_seconds = ended.queue_seconds
    return cursor


def _cursor_of(
    stage: Stage, request: Request, canvas: Canvas, limits: Limits, arrival: int, arrived_at: float
) -> Cursor:
    match stage:
        case Generate():
            return TokenCursor(request, limits.max_model_len, limits.block_size, arrival, arrived_at)
        case Pool(pooling=pooling):
            return PoolCursor(request, pooling, limits.block_size, arrival, arrived_at)
        case Encode(token_ids=token_ids, is_negative=is_negative):
            return TextCursor(request, token_ids, is_negative, canvas, limits.block_size, arrival, arrived_at)
        case Draw(image=image, cost=cost):
            return DenoiseCursor(request, image, cost, canvas, arrival, arrived_at)
