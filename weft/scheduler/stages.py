"""What a request is made of: stages, one after the other, each of them a cursor of its own.

Most requests have one stage. An image has up to three: the prompts that it is drawn from are encoded by the language
model, like everybody's prompts, and then it is drawn. A prompt that its client has encoded itself is not encoded, and
neither is one of no tokens: no prompt at all is something that can be drawn, too. An image waits as its last stage;
once it has been admitted, it skips those that somebody else went through before it.
"""

from __future__ import annotations

from msgspec import Struct

from weft.plan import Limits
from weft.scheduler.cursors import Cursor, DenoiseCursor, PoolCursor, TextCursor, TokenCursor
from weft.scheduler.prompt_embeds import TextKey, Texts, sources_of
from weft.types import ImageParams, Pooling, Request


class Generate(Struct, frozen=True):
    """Sample an answer to the prompt."""


class Pool(Struct, frozen=True):
    """Make one vector of the prompt."""

    pooling: Pooling


class Encode(Struct, frozen=True):
    """Have the hidden states of a prompt in the worker."""

    key: TextKey


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
    keys = dict.fromkeys(source for source in sources_of(request) if isinstance(source, TextKey))
    return [*map(Encode, keys), Draw(image, limits.image.cost(image))]


def first_cursor(request: Request, limits: Limits, arrival: int, arrived_at: float) -> Cursor:
    match stages_of(request, limits)[-1]:
        case Pool(pooling=pooling):
            return PoolCursor(request, pooling, limits.block_size, arrival, arrived_at)
        case Draw(image=image, cost=cost):
            return DenoiseCursor(request, image, cost, arrival, arrived_at)
    return TokenCursor(request, limits.max_model_len, limits.block_size, arrival, arrived_at)


def next_cursor(drawing: DenoiseCursor, texts: Texts, limits: Limits) -> TextCursor | DenoiseCursor | None:
    """Of the stage that comes next for an image that was admitted; None: others encode what is missing."""
    if not drawing.missing:
        return drawing
    for stage in stages_of(drawing.request, limits):
        if isinstance(stage, Encode):
            text = texts.by_key[stage.key]
            if not text.is_whole and not text.is_being_encoded:
                return TextCursor(drawing, text, stage.key, limits.block_size)
    return None
