"""What a step brought, as whoever asked hears of it. A request's first event tells how it was admitted."""

from __future__ import annotations

from weft.plan import Drawn, Sampled
from weft.scheduler.cursors import Cursor, DenoiseCursor, RowCursor
from weft.types import Event, FinishReason


def token_event(cursor: RowCursor, sampled: Sampled, finish: FinishReason | None) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    wants_prompt = is_first and cursor.request.params.prompt_logprobs is not None
    return Event(
        request_id=cursor.id,
        token_ids=[sampled.token_id],
        logprobs=None if sampled.logprob is None else [sampled.logprob],
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=finish,
        stop_token_id=sampled.token_id if finish is FinishReason.STOP else None,
        prompt_logprobs=cursor.prompt_logprobs if wants_prompt else None,
        queue_seconds=cursor.queue_seconds if is_first else None,
    )


def vector_event(cursor: Cursor, vector: bytes) -> Event:
    return Event(
        request_id=cursor.id,
        cached_tokens=cursor.cached_tokens,
        finish=FinishReason.STOP,
        queue_seconds=cursor.queue_seconds,
        embedding=vector,
    )


def denoise_event(cursor: DenoiseCursor, drawn: Drawn) -> Event:
    is_first, cursor.reported = not cursor.reported, True
    return Event(
        request_id=cursor.id,
        cached_tokens=cursor.cached_tokens if is_first else None,
        finish=FinishReason.STOP if cursor.done == cursor.known else None,
        queue_seconds=cursor.queue_seconds if is_first else None,
        denoise_step=cursor.done,
        image=drawn.image,
    )


def failure_event(cursor: Cursor, error: str) -> Event:
    return Event(
        request_id=cursor.id,
        cached_tokens=None if cursor.reported else cursor.cached_tokens,
        finish=FinishReason.ERROR,
        error=error,
        queue_seconds=None if cursor.reported else cursor.queue_seconds,
    )
