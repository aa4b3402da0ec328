"""Answers that a later request may go on from, as many as fit, and each for its tenant alone."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct
from starlette.datastructures import QueryParams

from weft.api.event_log import EventLog
from weft.api.openai.responses_schema import DeletedResponse, InputItemList
from weft.api.openai.responses_translate import ChatMessages
from weft.api.paging import limit_of
from weft.errors import InvalidRequest
from weft.serving.data_store import DataStore, NoStore, ResponseRecord

log = logging.getLogger(__name__)

TTL_S = 24 * 3600.0


class StoredResponse(Struct, frozen=True, eq=False):
    answer: bytes
    """The answer in JSON, as it was given."""
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """The conversation up to and with this answer, as chat messages, without instructions."""
    log: EventLog | None = None
    """The events of an answer in the background."""
    is_on_disk: bool = False
    """It is an answer in the background, or was one of an earlier server."""


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
    of its answers the one not used for longest. So no tenant drives out what one with less has kept."""

    def __init__(
        self,
        max_entries: int,
        max_bytes: int,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        on_drop: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_drop` gets the id of an answer on disk that is kept no longer."""
        self._on_drop = on_drop
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

    @property
    def keeps(self) -> bool:
        return self._max_entries > 0 and self._max_bytes > 0

    def put(self, owner: str, response_id: str, kept: StoredResponse, age_s: float = 0.0) -> None:
        """Keep it in the place of what has the same id, unless it is larger than the whole store."""
        size = len(kept.answer) + len(msgspec.json.encode([kept.input_items, kept.messages]))
        size += kept.log.num_bytes if kept.log is not None else 0
        self._take_out(owner, response_id)
        now = self._clock()
        for name, shelf in list(self._shelves.items()):
            for old in [old for old, entry in shelf.entries.items() if entry.expires <= now]:
                self._drop(name, old)
        if size > self._max_bytes or age_s >= self._ttl_s:
            if kept.is_on_disk:
                self._on_drop(response_id)
            return
        self._shelves.setdefault(owner, _Shelf()).put(response_id, _Entry(kept, size, now + self._ttl_s - age_s))
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
        kept = self._take_out(owner, response_id)
        if kept is not None and kept.is_on_disk:
            self._on_drop(response_id)

    def _take_out(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return what has this id, which is no longer there; None: nothing had it."""
        shelf = self._shelves.get(owner)
        if shelf is None or response_id not in shelf.entries:
            return None
        kept = shelf.entries[response_id].kept
        self.num_bytes -= shelf.drop(response_id)
        self._num_entries -= 1
        if not shelf.entries:
            del self._shelves[owner]
        return kept


MAX_LISTED = 100


class ResponseNotFound(InvalidRequest):
    status = 404
    kind = "response_not_found"


class PreviousNotFound(InvalidRequest):
    kind = "previous_response_not_found"


class TenantStore:
    def __init__(self, store: ResponseStore, owner: str, data: DataStore) -> None:
        self._store = store
        self._owner = owner
        self._data = data
        self.keeps = store.keeps

    async def save(self, response_id: str, created_at: int, kept: StoredResponse) -> None:
        """Keep an answer in the background, on disk as well where there is a folder for it, and there first."""
        answer = Raw(kept.answer)
        record = ResponseRecord(response_id, self._owner, created_at, answer, kept.input_items, kept.messages)
        try:
            await self._data.keep_response(record)
        except (NoStore, OSError) as error:
            log.warning("the response %s is kept in memory alone: %s", response_id, error)
        self.put(response_id, kept)

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
        if kept.log is not None and not kept.log.ended:
            raise InvalidRequest(
                f"The response {response_id!r:.100} is still in progress.", param="previous_response_id"
            )
        return kept.messages

    def answer(self, response_id: str) -> bytes:
        return self._found(response_id).answer

    def events(self, response_id: str, query: QueryParams) -> tuple[EventLog, int]:
        """Return the events of an answer, and the number of the first that is wanted."""
        log = self._found(response_id).log
        if log is None or not log.keeps_events:
            raise InvalidRequest(
                "This response is not streamed again: it was not asked for with background and stream.", param="stream"
            )
        after = query.get("starting_after", "-1")
        if not (after == "-1" or (after.isascii() and after.isdigit() and len(after) < 10)):
            raise InvalidRequest(f"starting_after is {after!r:.20}; it is an event's number.", param="starting_after")
        return log, int(after) + 1

    async def cancel(self, response_id: str) -> bytes:
        """End an answer in the background, and return it; one that has ended is returned as it is."""
        kept = self._found(response_id)
        if not kept.is_on_disk:
            raise InvalidRequest("Only a response with background can be cancelled.", param="response_id")
        if kept.log is not None:
            await kept.log.cancel()
        return self.answer(response_id)

    def input_items(self, response_id: str, query: QueryParams) -> InputItemList:
        items = self._found(response_id).input_items
        if query.get("order", "desc") != "asc":
            items = items[::-1]
        if after := query.get("after"):
            ids = [item["id"] for item in items]
            items = items[ids.index(after) + 1 :] if after in ids else []
        page = items[: limit_of(query, 20, MAX_LISTED)]
        return InputItemList(
            data=page,
            first_id=page[0]["id"] if page else "",
            last_id=page[-1]["id"] if page else "",
            has_more=len(page) < len(items),
        )

    async def delete(self, response_id: str) -> DeletedResponse:
        if (log := self._found(response_id).log) is not None:
            await log.cancel()
        self._store.delete(self._owner, response_id)
        return DeletedResponse(id=response_id)

    def _found(self, response_id: str) -> StoredResponse:
        kept = self._store.get(self._owner, response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept


def _not_found(response_id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"There is no response {response_id!r:.100}: it was not kept, or not for so long.", param="response_id"
    )
