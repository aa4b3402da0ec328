"""The journal: every open request, with the tokens that its user already has. It is the truth: an engine that dies is
replaced, and goes on from here. An image goes on from the newest checkpoint of its latents, or from its seed before the
first, and its user is told of no step twice.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from weft.types import Arrival, Event, FinishReason, LatentCheckpoint, Request

MAX_OUTSIDE_DEATHS = 3
"""So many engines in a row may be ended by other processes while they try a request, until that is to blame after all:
what ends them may be a guard that kills by its own rules whatever takes too much memory."""


class Place(enum.Enum):
    """The place of an open request, as far as the api process knows it."""

    HELD = "not sent to the engine yet"
    QUEUED = "sent to the engine"
    STARTED = "in the engine's steps, and no result since"
    PROVEN = "in the engine's steps, and this engine has given a token or a denoise step for it"


class Queued(Struct):
    """The number of requests that wait, and of the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


class Waiting:
    """The requests that wait to be computed, counted in all and by tenant."""

    def __init__(self) -> None:
        self.total = Queued()
        self.by_tenant: dict[str, Queued] = {}
        """The tenants that have waiting requests, and no others."""

    def add(self, request: Request) -> None:
        tokens = queued_tokens(request)
        for queued in (self.total, self.by_tenant.setdefault(request.tenant, Queued())):
            queued.requests += 1
            queued.tokens += tokens

    def remove(self, request: Request) -> None:
        tokens, own = queued_tokens(request), self.by_tenant[request.tenant]
        for queued in (self.total, own):
            queued.requests -= 1
            queued.tokens -= tokens
        if not own.requests:
            del self.by_tenant[request.tenant]


def queued_tokens(request: Request) -> int:
    """Return the prompt tokens that a waiting request adds to the queue; a sibling's are counted with its leader."""
    return 0 if request.sibling_of else request.num_prompt_tokens


class Entry:
    """One open request. The journal alone changes its place."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.delivered = list(request.output_token_ids)
        self.denoised = 0
        """Denoise steps that the user has been told of."""
        self.checkpoint: LatentCheckpoint | None = None
        """The newest that has arrived."""
        self.place = Place.HELD
        self.deaths = 0
        """Engines that died while they had this request: queued, waiting for its resources, or in their steps."""
        self.outside_deaths = 0
        """Engines in a row that other processes ended while this request was on trial."""
        self.listener: Callable[[], None] | None = None
        """Called whenever something has arrived."""
        self.is_open = True
        """False once the request has ended, or was aborted."""
        self.arrived: list[Arrival] = []
        """What has arrived and was not taken yet."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def waits(self) -> bool:
        return self.place is Place.HELD or self.place is Place.QUEUED

    @property
    def is_on_trial(self) -> bool:
        """True while an engine has it that was sent it under suspicion, and has given nothing for it yet."""
        return self.deaths > 0 and (self.place is Place.QUEUED or self.place is Place.STARTED)

    def resumed(self) -> Request:
        """Return the request as an engine must see it to go on where the last one stopped."""
        if self.checkpoint is not None:
            return replace(self.request, checkpoint=self.checkpoint)
        return replace(self.request, output_token_ids=list(self.delivered)) if self.delivered else self.request

    @property
    def checkpoint_bytes(self) -> int:
        return 0 if self.checkpoint is None else len(self.checkpoint.latents)

    def put(self, event: Event) -> None:
        self.delivered += event.token_ids
        if event.denoise_step is not None:
            if event.denoise_step <= self.denoised and event.finish is None:
                return
            self.denoised = event.denoise_step
        self.arrived.append(event)
        if self.listener is not None:
            self.listener()

    def take(self, most: int = 0) -> list[Arrival]:
        """Return what arrived and was not taken yet: all of it, or the oldest `most`."""
        if most:
            arrived, self.arrived = self.arrived[:most], self.arrived[most:]
        else:
            arrived, self.arrived = self.arrived, []
        return arrived


class Journal:
    """The open requests. What every submit and every output needs of them is counted as they change."""

    def __init__(self, max_checkpoint_bytes: int = 2**30) -> None:
        self._max_checkpoint_bytes = max_checkpoint_bytes
        self.checkpoint_bytes = 0
        """Bytes of the checkpoints of open images."""
        self._entries: dict[str, Entry] = {}
        self.held: dict[str, Entry] = {}
        """The requests that are not with an engine, the oldest first."""
        self.waiting = Waiting()
        """The requests that are held or queued."""
        self.num_on_trial = 0
        self.tensor_bytes = 0
        """Bytes of the tensors that clients sent with open requests."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def open(self, request: Request) -> Entry:
        entry = Entry(request)
        self._entries[entry.id] = entry
        self.tensor_bytes += request.tensor_bytes
        self._count(entry)
        return entry

    def close(self, request_id: str) -> Entry | None:
        """Forget a request; None if it is closed already."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            entry.is_open = False
            self._discount(entry)
            self.tensor_bytes -= entry.request.tensor_bytes
            self.checkpoint_bytes -= entry.checkpoint_bytes
        return entry

    def send(self) -> list[Entry]:
        """Return the requests that may be sent to the engine now, as queued: all that are held, or, after a death, the
        next of those under suspicion alone."""
        if not self.held or self.num_on_trial:
            return []
        suspect = next((entry for entry in self.held.values() if entry.deaths), None)
        sent = list(self.held.values()) if suspect is None else [suspect]
        for entry in sent:
            self._move(entry, Place.QUEUED)
        return sent

    def started(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.place is Place.QUEUED:
                self._move(entry, Place.STARTED)

    def record(self, event: Event) -> None:
        """Hand an event to the stream of its request, unless that is closed already."""
        entry = self._entries.get(event.request_id)
        if entry is None:
            return
        if event.finish is not None:
            self.close(event.request_id)
        elif entry.place is not Place.PROVEN and (event.token_ids or event.denoise_step is not None):
            self._move(entry, Place.PROVEN)
        if event.checkpoint is not None and entry.is_open:
            self._keep(entry, event.checkpoint)
            event = replace(event, checkpoint=None)
        entry.put(event)

    def record_tokens(self, tokens: Mapping[str, int]) -> None:
        """Hand tokens that came without events to the streams of their requests."""
        entries = self._entries
        for request_id, token_id in tokens.items():
            entry = entries.get(request_id)
            if entry is not None:
                if entry.place is not Place.PROVEN:
                    self._move(entry, Place.PROVEN)
                entry.delivered.append(token_id)
                entry.arrived.append(token_id)
                if entry.listener is not None:
                    entry.listener()

    def engine_died(self, *, from_outside: bool = False) -> list[Entry]:
        """Take back everything that was with the engine, to be sent again under suspicion: a request can end an engine
        before it is in a step, as it is taken in or while its adapter is read. Return the request that was on trial,
        if there was one: two engines have died with it. It is not to blame, and on trial again, when the engine was
        ended from outside."""
        guilty = [entry for entry in self._entries.values() if entry.is_on_trial]
        if from_outside:
            for entry in guilty:
                entry.outside_deaths += 1
            guilty = [entry for entry in guilty if entry.outside_deaths > MAX_OUTSIDE_DEATHS]
        for entry in self._entries.values():
            self._discount(entry)
            entry.deaths += entry.place is not Place.HELD
            entry.place = Place.HELD
        # Counted anew, one after the other: those that had not been sent are behind older ones again.
        for entry in self._entries.values():
            self._count(entry)
        return guilty

    def queue(self, entry: Entry) -> None:
        """Note that a held request was sent to an engine of several."""
        self._move(entry, Place.QUEUED)

    def take_back(self, entry: Entry, *, is_evidence: bool = False) -> None:
        """Hold a request again that an engine of several does not have any more. `is_evidence`: it may have caused
        that, unless it has brought anything there."""
        self._discount(entry)
        entry.deaths += is_evidence and entry.place is not Place.PROVEN
        entry.place = Place.HELD
        self._count(entry)

    def end_all(self, reason: FinishReason, error: str) -> None:
        for entry in list(self._entries.values()):
            self.record(Event(request_id=entry.id, finish=reason, error=error))

    def _keep(self, entry: Entry, checkpoint: LatentCheckpoint) -> None:
        """Keep a checkpoint instead of the one before it, if there are bytes for it."""
        grown = self.checkpoint_bytes + len(checkpoint.latents) - entry.checkpoint_bytes
        if grown <= self._max_checkpoint_bytes:
            self.checkpoint_bytes = grown
            entry.checkpoint = checkpoint

    def _move(self, entry: Entry, place: Place) -> None:
        self._discount(entry)
        entry.place = place
        if place is Place.PROVEN:
            entry.outside_deaths = 0
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        if entry.waits:
            self.waiting.add(entry.request)
        if entry.place is Place.HELD:
            self.held[entry.id] = entry
        self.num_on_trial += entry.is_on_trial

    def _discount(self, entry: Entry) -> None:
        if entry.waits:
            self.waiting.remove(entry.request)
        if entry.place is Place.HELD:
            del self.held[entry.id]
        self.num_on_trial -= entry.is_on_trial
