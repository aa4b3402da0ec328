"""The pages of a list that a client asks for by the id of the last thing it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from starlette.datastructures import QueryParams

from weft.errors import InvalidRequest


class Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=Identified)


def limit_of(query: QueryParams, default: int, most: int) -> int:
    """Return how many things a client wants. Raises InvalidRequest."""
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(most)) else 0
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit is {text!r:.20}; it must be from 1 to {most}.", param="limit")
    return limit


def page_after(items: Sequence[Item], last_seen: str | None, limit: int) -> tuple[list[Item], bool]:
    """Return the items behind one, and whether there are more; none where that one is not there."""
    begin = 0 if not last_seen else _place(items, last_seen, len(items) - 1) + 1
    return list(items[begin : begin + limit]), begin + limit < len(items)


def page_before(items: Sequence[Item], first_seen: str, limit: int) -> tuple[list[Item], bool]:
    """Return the items just before one, and whether there are more before those."""
    end = _place(items, first_seen, 0)
    begin = max(0, end - limit)
    return list(items[begin:end]), begin > 0


def _place(items: Sequence[Item], item_id: str, absent: int) -> int:
    return next((index for index, item in enumerate(items) if item.id == item_id), absent)
