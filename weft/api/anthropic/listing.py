"""Anthropic's lists, and its list of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

from msgspec import Struct
from starlette.datastructures import QueryParams

from weft.api.openai.openai_answers import ModelCard
from weft.api.paging import Identified, limit_of, page_after, page_before

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000

Item = TypeVar("Item", bound=Identified)


class ModelEntryInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="model"):
    """A model as Anthropic's clients know one."""

    id: str
    display_name: str
    created_at: str


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[ModelEntryInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def timestamp(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def page_of(items: Sequence[Item], query: QueryParams) -> tuple[list[Item], bool]:
    """Return the page that a client asks for by limit, after_id or before_id, and whether there are more."""
    limit = limit_of(query, DEFAULT_LIMIT, MAX_LIMIT)
    if before := query.get("before_id"):
        return page_before(items, before, limit)
    return page_after(items, query.get("after_id"), limit)


def model_info(card: ModelCard) -> ModelEntryInfo:
    return ModelEntryInfo(id=card.id, display_name=card.id, created_at=timestamp(card.created))


def model_list(cards: Sequence[ModelCard], query: QueryParams) -> AnthropicModelList:
    page, has_more = page_of([*map(model_info, cards)], query)
    return AnthropicModelList(
        data=page,
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )
