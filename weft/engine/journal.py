"""The journal: every open request, with the tokens its user already has. It is the truth: an engine that dies
is replaced, and goes on from here. An image is drawn again from its seed, and its user hears of no step twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from weft.types import Arrival, Event, FinishReason, Request


class Place(enum.Enum):
    """Where an open request is, as far as the api process knows."""

    HELD = "not sent to the engine yet"
    QUEUED = "sent to the engine"
    STARTED = "in the engine's steps, and no result since"
    PROVEN = "in the engine's steps, and this engine has given a token or a denoise step for it"


class Entry:
    """One open request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.delivered: list[int] = []
        self.denoised = 0
        """Denoise steps that the user knows of."""
        self.place = Place.HELD
        self.deaths = 0
        """Engines that died while this request was in their steps."""
        self.listener: Callable[[], None] | None = None
        """Called whenever something has arrived."""
        self._arrived: list[Arrival] = []

    @property
    def id(self) -> str:
        return self.request.request_id

    def resumed(self) -> Request:
        """The request as an engine must see it to go on where the last one stopped."""
        return replace(self.request, output_token_ids=list(self.delivered))

    def put(self, event: Event) -> None:
        self.delivered += event.token_ids
        if event.token_ids or event.denoise_step is not None:
            self.place = Place.PROVEN
        if event.denoise_step is not None:
            if event.denoise_step <= self.denoised and event.finish is None:
                return
            self.denoised = event.denoise_step
        self._arrived.append(event)
        if self.listener is not None:
            self.listener()

    def put_token(self, token_id: int) -> None:
        """The same for a plain event."""
        self.delivered.append(token_id)
        self.place = Place.PROVEN
        self._arrived.append(token_id)
        if self.listener is not None:
            self.listener()

    def take(self) -> list[Arrival]:
        """All that arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived


class Journal:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def open(self, request: Request) -> Entry:
        entry = Entry(request)
        self._entries[entry.id] = entry
        return entry

    def close(self, request_id: str) -> Entry | None:
        return self._entries.pop(request_id, None)

    def started(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.place is not Place.PROVEN:
                entry.place = Place.STARTED

    def record(self, event: Event) -> Entry | None:
        """Hand an event to whoever waits for it; None if the request is closed already."""
        entry = self._entries.get(event.request_id)
        if entry is not None:
            if event.finish is not None:
                del self._entries[event.request_id]
            entry.put(event)
        return entry

    def record_tokens(self, tokens: Mapping[str, int]) -> None:
        """The same for the tokens of a step's plain events, by request id."""
        entries = self._entries
        for request_id, token_id in tokens.items():
            entry = entries.get(request_id)
            if entry is not None:
                entry.put_token(token_id)

    def at(self, *places: Place) -> list[Entry]:
        """The open requests at these places, the oldest first."""
        return [entry for entry in self._entries.values() if entry.place in places]

    def engine_died(self) -> None:
        """Everything that was with the engine is to be sent again; what was in its steps is under suspicion."""
        for entry in self._entries.values():
            if entry.place in (Place.STARTED, Place.PROVEN):
                entry.deaths += 1
            entry.place = Place.HELD

    def end_all(self, reason: FinishReason, error: str) -> None:
        for entry in list(self._entries.values()):
            self.record(Event(request_id=entry.id, finish=reason, error=error))
