"""Answers that a later request may go on from, as many as fit, and each for its tenant alone."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams

from weft.api.openai.responses_schema import DeletedResponse, InputItemList
from weft.api.openai.responses_translate import ChatMessages
from weft.errors import InvalidRequest

TTL_S = 24 * 3600.0


class StoredResponse(Struct, frozen=True, eq=False):
    answer: bytes
    """The answer in JSON, as it was given."""
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """The conversation up to and with this answer, as chat messages, without instructions."""


class _Entry(Struct, frozen=True, eq=False):
    kept: StoredResponse
    num_bytes: int
    expires: float


class _Shelf:
    """The answers of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.num_bytes = 0

    def put(self, response_id: str, entry: _Entry) -> None:
        self.entries[response_id] = entry
        self.num_bytes += entry.num_bytes

    def drop(self, response_id: str) -> int:
        """Drop an answer, and return its bytes."""
        size = self.entries.pop(response_id).num_bytes
        self.num_bytes -= size
        return size


class ResponseStore:
    """The store is bounded by entries, by bytes and by time. What does not fit is taken from the tenant that has most:
    of its answers the one not used for longest. So nobody drives out what a tenant with less has kept."""

    def __init__(
        self, max_entries: int, max_bytes: int, ttl_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._shelves: dict[str, _Shelf] = {}
        """The shelves by owner, none of which is empty."""
        self._num_entries = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._num_entries

    def put(self, owner: str, response_id: str, kept: StoredResponse) -> None:
        """Keep it, unless it is larger than the whole store."""
        size = len(kept.answer) + len(msgspec.json.encode([kept.input_items, kept.messages]))
        now = self._clock()
        for name, shelf in list(self._shelves.items()):
            for old in [old for old, entry in shelf.entries.items() if entry.expires <= now]:
                self._drop(name, old)
        if size > self._max_bytes:
            return
        self._shelves.setdefault(owner, _Shelf()).put(response_id, _Entry(kept, size, now + self._ttl_s))
        self._num_entries += 1
        self.num_bytes += size
        while self._num_entries > self._max_entries or self.num_bytes > self._max_bytes:
            largest = max(self._shelves, key=lambda name: (self._share(name), name == owner))
            self._drop(largest, next(iter(self._shelves[largest].entries)))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(response_id)
        if shelf is None or entry is None or entry.expires <= self._clock():
            return None
        shelf.entries.move_to_end(response_id)
        return entry.kept

    def delete(self, owner: str, response_id: str) -> bool:
        """Delete it, and return whether it was there."""
        if self.get(owner, response_id) is None:
            return False
        self._drop(owner, response_id)
        return True

    def _share(self, owner: str) -> float:
        """Return the part of the store that an owner has, of its entries or of its bytes, whichever is more."""
        shelf = self._shelves[owner]
        return max(len(shelf.entries) / max(1, self._max_entries), shelf.num_bytes / max(1, self._max_bytes))

    def _drop(self, owner: str, response_id: str) -> None:
        shelf = self._shelves[owner]
        self.num_bytes -= shelf.drop(response_id)
        self._num_entries -= 1
        if not shelf.entries:
            del self._shelves[owner]


MAX_LISTED = 100


class ResponseNotFound(InvalidRequest):
    status = 404
    kind = "response_not_found"


class PreviousNotFound(InvalidRequest):
    kind = "previous_response_not_found"


class TenantStore:
    def __init__(self, store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner

    def put(self, response_id: str, kept: StoredResponse) -> None:
        self._store.put(self._owner, response_id, kept)

    def messages_of(self, response_id: str) -> ChatMessages:
        """Return the conversation that a request goes on from."""
        kept = self._store.get(self._owner, response_id)
        if kept is None:
            raise PreviousNotFound(
                f"There is no response {response_id!r:.100}: it was not kept, or not for so long.",
                param="previous_response_id",
            )
        return kept.messages

    def answer(self, response_id: str, query: QueryParams) -> bytes:
        if query.get("stream", "false") != "false":
            raise InvalidRequest("A kept response is not streamed again.", param="stream")
        return self._found(response_id).answer

    def input_items(self, response_id: str, query: QueryParams) -> InputItemList:
        items = self._found(response_id).input_items
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            items = items[ids.index(after) + 1 :] if after in ids else []
        page = items[: _limit(query)]
        return InputItemList(
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=len(page) < len(items),
        )

    def delete(self, response_id: str) -> DeletedResponse:
        if not self._store.delete(self._owner, response_id):
            raise _not_found(response_id)
        return DeletedResponse(id=response_id)

    def _found(self, response_id: str) -> StoredResponse:
        kept = self._store.get(self._owner, response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept


def _limit(query: QueryParams) -> int:
    text = query.get("limit", "20")
    limit = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LISTED)) else 0
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequest(f"limit is {text!r:.20}; it must be from 1 to {MAX_LISTED}.", param="limit")
    return limit


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"There is no response {response_id!r:.100}: it was not kept, or not for so long.", param="response_id"
    )
