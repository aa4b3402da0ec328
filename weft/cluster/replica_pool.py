"""The replicas of a model as one client of engines, and the journal of their open requests.

When a replica, its machine or the network between is lost, every open request of it is sent to another replica as its
prompt and the tokens that were delivered, and its stream goes on as if nothing had happened. Requests stay where they
are while their connection lives, so that no token can come from two replicas.

A lost connection alone says nothing against a request. One that two replicas in a row were lost with, before they gave
anything for it, is sent to a replica where no other such request is on trial; when the connection to that one is closed
as well, it is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections.abc import Collection, Iterable, Sequence, Set
from functools import partial

from msgspec.structs import replace

from weft.checkpoint.model_files import ModelFiles
from weft.cluster.membership import Membership, ReplicaAddress, ReplicaTable
from weft.cluster.replica_link import (
    FromReplica,
    Link,
    NotAuthenticated,
    NotTaken,
    ReplicaReady,
    ReplicaStatus,
    StepTokens,
    connect,
    load_of,
    load_tokens,
)
from weft.cluster.router import Router, RouteRequest
from weft.engine.client import TICK_SECONDS, check_capacity, open_entry
from weft.engine.journal import Entry, Journal, Place
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    ControlCall,
    Done,
    Heartbeat,
    PrefixDigests,
    ProcessControl,
    Started,
    Submit,
    Vocabulary,
)
from weft.engine_stats import COUNTERS, EngineStats, ReplicaStats
from weft.errors import InvalidRequest, Unavailable
from weft.options import Config
from weft.scheduler.prefix_digests import prompt_digests, tokens_per_digest
from weft.types import Event, FinishReason, ModelInfo, ReadBlocks, Request

log = logging.getLogger(__name__)

TRIAL_DEATHS = 2
"""So many replicas are lost with a request that has brought nothing there, until it is tried alone."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.1, 1.0
MAX_PAST_REPLICAS = 256


class _Replica:
    """One replica of the table, and the connection to it while there is one."""

    def __init__(self, address: ReplicaAddress) -> None:
        self.address = address
        self.link: Link | None = None
        self.status: ReplicaStatus | None = None
        self.boot = ""
        self.entries: dict[str, Entry] = {}
        """The open requests that it has."""
        self.trial = ""
        """The request that is on trial here; empty: none."""
        self.full_for: set[str] = set()
        """The tenants that it took no more requests of since it said how it stands."""
        self.knows_vocabulary = False
        self.heard = True
        self.failure = ""
        """The reason why the connection was ended on this side."""
        self.task: asyncio.Task[None]

    @property
    def id(self) -> str:
        return self.address.id

    @property
    def state(self) -> str:
        """The state is connecting until the replica has told its own; the table may say that it drains."""
        if self.link is None or self.status is None:
            return "connecting"
        return "draining" if self.address.state == "draining" else self.status.state

    def stats(self) -> ReplicaStats:
        if self.status is None:
            return ReplicaStats(state=self.state)
        load, restarts = load_of(self.id, self.status), self.status.stats.restarts
        return ReplicaStats(
            state=self.state, running=load.running, waiting=load.waiting, kv_usage=load.kv_usage, restarts=restarts
        )

    def send(self, message: Submit | Abort | Vocabulary | ControlCall | Heartbeat) -> None:
        if self.link is not None:
            self.link.send(message)


class ReplicaPool:
    """The replicas of one model, as one client of engines: it takes requests, and hands events to their streams."""

    def __init__(
        self, config: Config, files: ModelFiles, membership: Membership, tls: ssl.SSLContext | None = None
    ) -> None:
        self.config = config
        self.files = files
        self.state = "starting"
        self.model: ModelInfo
        self.vocabulary: Vocabulary | None = None
        self._moved = 0
        self._membership = membership
        self._tls = tls
        self._journal = Journal(config.scheduler.max_embedding_mb << 20)
        self._replicas: dict[str, _Replica] = {}
        self._where: dict[str, tuple[_Replica, RouteRequest]] = {}
        """The replica of every request that is not held."""
        self._pinned: dict[str, str] = {}
        """The replica that a held request is for, and no other."""
        self._resumed: set[str] = set()
        """Requests that went to another replica with tokens, and have brought nothing there yet."""
        self._held_since: dict[str, float] = {}
        self._known_keys: dict[str, Sequence[bytes]] = {}
        """The prefix keys of requests that were taken back: where many move at once, none are computed again."""
        self._router = Router()
        self._excluded: frozenset[str] | None = None
        """The replicas that take no requests now; None: not known since something changed."""
        self._full: set[_Replica] = set()
        """Those that take no requests of some tenants now."""
        self._past: dict[str, EngineStats] = {}
        """The counters of every replica's process so far, those that are gone among them."""
        self._forgotten = EngineStats()
        self._calls: dict[int, tuple[_Replica, asyncio.Future[Done]]] = {}
        self._numbers = itertools.count(1)
        self._has_model: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Wait until one replica is ready. Raises Unavailable when none is within --start-timeout-s."""
        self._tasks = [asyncio.create_task(self._follow_tables()), asyncio.create_task(self._watch())]
        limit_s = self.config.engine.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._has_model
        except TimeoutError:
            whys = "; ".join(f"{one.id}: {one.failure or one.state}" for one in self._replicas.values())
            raise Unavailable(
                f"No replica was ready after {limit_s:.0f} s ({whys or 'there is none'}).",
                hint="Start them with `weft replica`, or give them longer with --start-timeout-s.",
            ) from None
        self.state = "ready"

    async def close(self) -> None:
        """Leave all replicas. Open requests end as aborted."""
        self.state = "closed"
        for request_id in list(self._where):
            self._forget(request_id)
        self._journal.end_all(FinishReason.ABORT, "The server is shutting down.")
        for task in self._tasks:
            task.cancel()
        for replica in list(self._replicas.values()):
            self._leave(replica)
        await asyncio.gather(*self._tasks, *self._leaving, return_exceptions=True)
        await self._membership.close()

    # Requests.

    def submit(self, request: Request) -> Entry:
        """Queue a request, and return the entry where its events arrive. Raises Overloaded and Unavailable."""
        if self.state != "ready":
            raise Unavailable(f"The replicas are not available: {self.state}.")
        entry = open_entry(self._journal, request, self.config.scheduler)
        self._held_since[entry.id] = time.monotonic()
        try:
            self._place(entry)
        except Exception:
            self._forget(entry.id)
            self._journal.close(entry.id)
            raise
        return entry

    def check_capacity(self, tenant: str, num_tokens: int = 1) -> None:
        """Raise Overloaded where a request of this tenant with so many tokens would not be queued now."""
        check_capacity(self._journal.waiting, tenant, num_tokens, self.config.scheduler)

    def abort(self, request_id: str) -> None:
        """End a request, if it is open."""
        entry = self._journal.close(request_id)
        if entry is None:
            return
        if request_id in self._where:
            self._where[request_id][0].send(Abort([request_id]))
        self._forget(request_id)
        self._dispatch()

    def pin(self, request_id: str, replica: str) -> None:
        """Let a request that is submitted next be sent to one replica alone, while that is there."""
        self._pinned[request_id] = replica

    def unpin(self, request_id: str) -> None:
        self._pinned.pop(request_id, None)

    @property
    def ready_ids(self) -> list[str]:
        return [one.id for one in self._replicas.values() if one.state == "ready"]

    @property
    def is_alive(self) -> bool:
        """True while there is a replica that takes requests."""
        return any(one.state in ("ready", "restarting") for one in self._replicas.values())

    def stats(self) -> EngineStats:
        """Return the sums over replicas: gauges of those that are connected, and counters of all so far."""
        stats = _sum([one.status.stats for one in self._replicas.values() if one.status is not None])
        counted = _sum([*self._past.values(), self._forgotten])
        counters = {name: getattr(counted, name) for name in COUNTERS}
        return replace(
            stats,
            **counters | {"moved_requests": self._moved},
            waiting=self._journal.waiting.total.requests,
            open_requests=len(self._journal),
            replicas={one.id: one.stats() for one in self._replicas.values()},
        )

    async def control(self, message: ProcessControl) -> str:
        """Have all replicas carry out a control message, and return their answers: numbers as a sum. Raises
        InvalidRequest when one cannot, and Unavailable when there is none."""
        connected = [one for one in self._replicas.values() if one.link is not None and one.status is not None]
        if not connected:
            raise Unavailable("No replica is connected.")
        if isinstance(message, ReadBlocks) and len(connected) > 1:
            raise InvalidRequest("The blocks of several replicas are not shown as one.")
        answers = await asyncio.gather(*(self._call(one, message) for one in connected))
        if all(answer.isdigit() for answer in answers):
            return str(sum(map(int, answers)))
        return "\n".join(answers)

    async def _call(self, replica: _Replica, message: ProcessControl) -> str:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = replica, answer
        replica.send(ControlCall(number, message))
        try:
            done: Done = await answer
        finally:
            self._calls.pop(number, None)
        if done.error:
            raise InvalidRequest(f"{replica.id}: {done.error}" if len(self._replicas) > 1 else done.error)
        return done.result

    # Which replica.

    def _dispatch(self) -> None:
        """Send the requests that are held to replicas that take them. A tenant that must wait holds up no other."""
        waiting: set[str] = set()
        for entry in list(self._journal.held.values()):
            if len(self._excluded_now) == len(self._replicas):
                return
            if entry.request.tenant not in waiting and not self._place(entry):
                waiting.add(entry.request.tenant)

    def _place(self, entry: Entry) -> bool:
        """Send a request to a replica. Return False when it must wait, as others of its tenant would have to."""
        tenant = entry.request.tenant
        excluded = self._excluded_now
        if self._full:
            excluded = excluded | {one.id for one in self._full if tenant in one.full_for}
        if entry.deaths >= TRIAL_DEATHS:
            excluded = excluded | {one.id for one in self._replicas.values() if one.trial}
        if len(excluded) >= len(self._replicas):
            return False
        route = self._route(entry)
        name = self._choice(entry, route, excluded)
        if name is None:
            return entry.id in self._pinned
        replica = self._replicas[name]
        if entry.request.params.grammar and self.vocabulary is not None and not replica.knows_vocabulary:
            replica.send(self.vocabulary)
            replica.knows_vocabulary = True
        request = entry.resumed()
        if request.trace is not None:
            request = replace(request, trace=replace(request.trace, replica=name))
        replica.send(Submit([request]))
        self._journal.queue(entry)
        self._where[entry.id] = replica, route
        self._held_since.pop(entry.id, None)
        replica.entries[entry.id] = entry
        replica.trial = entry.id if entry.deaths >= TRIAL_DEATHS else replica.trial
        self._router.submitted(name, route)
        if request.output_token_ids:
            self._resumed.add(entry.id)
        return True

    def _route(self, entry: Entry) -> RouteRequest:
        request, keys = entry.request, self._known_keys.pop(entry.id, None)
        if keys is None:
            keys = prompt_digests(request, self.model.block_size) if len(self._replicas) > 1 else ()
        return RouteRequest(
            prefix_keys=keys,
            num_tokens=load_tokens(request, self.model.images) + len(entry.delivered),
            adapter="" if request.adapter is None else request.adapter.name,
            session=request.session,
            tenant=request.tenant,
            is_image=request.image is not None,
        )

    def _choice(self, entry: Entry, route: RouteRequest, excluded: Set[str]) -> str | None:
        pinned = self._replicas.get(self._pinned.get(entry.id, ""))
        if pinned is not None and pinned.link is not None:
            return None if pinned.id in excluded else pinned.id
        leader = self._where.get(entry.request.sibling_of)
        if leader is not None and leader[0].id not in excluded:
            return leader[0].id
        return self._router.choose(route, exclude=excluded)

    @property
    def _excluded_now(self) -> Set[str]:
        """The replicas that take no requests now. While an engine is replaced its replica is the last choice."""
        if self._excluded is None:
            states = {one.id: one.state for one in self._replicas.values()}
            usable = "ready" if "ready" in states.values() else "restarting"
            self._excluded = frozenset(name for name, state in states.items() if state != usable)
        return self._excluded

    def _forget(self, request_id: str) -> None:
        """Forget where a request is, when it has ended or is taken back."""
        self._held_since.pop(request_id, None)
        self._known_keys.pop(request_id, None)
        self._pinned.pop(request_id, None)
        self._resumed.discard(request_id)
        placed = self._where.pop(request_id, None)
        if placed is not None:
            replica, route = placed
            replica.entries.pop(request_id, None)
            replica.trial = "" if replica.trial == request_id else replica.trial
            self._router.ended(replica.id, route)

    def _take_back(self, entries: Iterable[Entry], *, is_evidence: bool = False) -> None:
        for entry in entries:
            is_guilty = is_evidence and entry.deaths >= TRIAL_DEATHS and entry.place is not Place.PROVEN
            keys = self._where[entry.id][1].prefix_keys
            self._forget(entry.id)
            self._journal.take_back(entry, is_evidence=is_evidence)
            if is_guilty:
                error = f"{entry.deaths} replicas were lost while they had this request."
                self._journal.record(Event(request_id=entry.id, finish=FinishReason.ERROR, error=error))
            else:
                self._held_since[entry.id] = time.monotonic()
                if keys:
                    self._known_keys[entry.id] = keys

    # The table.

    async def _follow_tables(self) -> None:
        try:
            async for table in self._membership.tables():
                self._apply(table)
        except Exception:
            log.exception("The table of replicas cannot be read any more: the last one holds.")

    def _apply(self, table: ReplicaTable) -> None:
        """Connect to new replicas, and leave those that are gone or dead; their requests move."""
        wanted = {one.id: one for one in table.replicas if one.state in ("ready", "draining")}
        for replica in list(self._replicas.values()):
            address = wanted.get(replica.id)
            if address is None or (address.host, address.port) != (replica.address.host, replica.address.port):
                replica.failure = "it is not in the table any more"
                self._leave(replica)
            else:
                replica.address = address
        for address in wanted.values():
            if address.id not in self._replicas:
                replica = self._replicas[address.id] = _Replica(address)
                replica.task = asyncio.create_task(self._keep_connected(replica))
        self._tell_router()
        self._dispatch()

    def _leave(self, replica: _Replica) -> None:
        del self._replicas[replica.id]
        replica.task.cancel()
        self._leaving.add(replica.task)
        replica.task.add_done_callback(self._leaving.discard)
        self._lost(replica, is_evidence=False)

    def _tell_router(self) -> None:
        """Tell the router which replicas may be chosen."""
        self._excluded = None
        self._router.set_replicas([one.id for one in self._replicas.values() if one.status is not None])

    # Connections.

    async def _keep_connected(self, replica: _Replica) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                host, port = replica.address.host, replica.address.port
                replica.link = await connect(host, port, self._membership.key, self._tls)
                replica.failure = ""
                await self._read_forever(replica, replica.link)
                pause = FIRST_RETRY_SECONDS
            except (OSError, NotAuthenticated) as error:  # a TimeoutError among them
                if not replica.failure:
                    log.warning("The replica %s cannot be reached: %s", replica.id, error or "it takes too long")
                replica.failure = str(error) or "it takes too long"
            except Exception as error:
                # Whatever the error is, its requests move, and none may wait for good.
                log.exception("The connection to the replica %s failed.", replica.id)
                replica.failure = f"its connection failed: {error}"
            finally:
                if replica.link is not None:
                    replica.link.abort()
                    if replica.id in self._replicas:
                        self._lost(replica, is_evidence=not replica.failure and replica.state != "draining")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_RETRY_SECONDS)

    def _lost(self, replica: _Replica, *, is_evidence: bool) -> None:
        """Move the requests of a replica whose connection is lost."""
        if replica.link is None:
            return
        replica.link.abort()
        entries = list(replica.entries.values())
        if self.state == "closed":
            log.info("The replica %s is left: this server ends.", replica.id)
        else:
            why = replica.failure or "it is gone"
            log.error("The replica %s is lost: %s. %d requests move.", replica.id, why, len(entries))
        replica.link = replica.status = None
        replica.knows_vocabulary = False
        self._is_not_full(replica)
        for owner, answer in self._calls.values():
            if owner is replica and not answer.done():
                answer.set_exception(Unavailable(f"The replica {replica.id} was lost before it was done."))
        for entry in entries:
            if (trace := entry.request.trace) is not None:
                entry.request = replace(entry.request, trace=replace(trace, moves=trace.moves + 1))
        self._take_back(entries, is_evidence=is_evidence)
        self._moved += len(entries)
        self._tell_router()
        self._dispatch()

    async def _read_forever(self, replica: _Replica, link: Link) -> None:
        try:
            await link.follow_replica(partial(self._take, replica))
        except BrokenFrame as error:
            replica.failure = f"it sent what is no message: {error}"

    def _take(self, replica: _Replica, message: FromReplica) -> None:
        replica.heard = True
        match message:
            case StepTokens(tokens=tokens, events=events):
                self._deliver(tokens, events)
            case ReplicaStatus():
                self._take_status(replica, message)
            case Started(request_ids=request_ids):
                self._journal.started(request_ids)
            case NotTaken(request_id=request_id) if request_id in replica.entries:
                entry = replica.entries[request_id]
                replica.full_for.add(entry.request.tenant)
                self._full.add(replica)
                self._take_back([entry])
                self._dispatch()
            case PrefixDigests(reset=reset, added=added, removed=removed):
                self._router.cached(replica.id, added, removed, reset=reset)
            case Done(number=number) if number in self._calls:
                _, answer = self._calls[number]
                if not answer.done():
                    answer.set_result(message)
            case ReplicaReady():
                self._greet(replica, message)

    def _greet(self, replica: _Replica, ready: ReplicaReady) -> None:
        """Begin with a replica, unless it has another model."""
        if not self._has_model.done():
            self.model = ready.model
            self._router = Router(tokens_per_digest(ready.model.block_size))
            self._has_model.set_result(None)
        elif difference := _difference(self.model, ready.model):
            replica.failure = f"it serves another model: {difference}"
            assert replica.link is not None
            replica.link.abort()
            return
        replica.boot = ready.boot
        self._take_status(replica, ready.status)
        log.info("The replica %s is connected.", replica.id)

    def _take_status(self, replica: _Replica, status: ReplicaStatus) -> None:
        is_new = replica.status is None
        if is_new or status.state != replica.state:
            self._excluded = None
        replica.status = status
        self._is_not_full(replica)
        self._past[replica.boot] = status.stats
        if len(self._past) > MAX_PAST_REPLICAS + len(self._replicas):
            living = {one.boot for one in self._replicas.values()}
            oldest = next(boot for boot in self._past if boot not in living)
            self._forgotten = self._past.pop(oldest).with_counters_of(self._forgotten)
        if is_new:
            self._tell_router()
        self._router.update(load_of(replica.id, status, is_draining=replica.state == "draining"))
        if self._journal.held:
            self._dispatch()

    def _is_not_full(self, replica: _Replica) -> None:
        replica.full_for.clear()
        self._full.discard(replica)

    def _deliver(self, tokens: dict[str, int], events: list[Event]) -> None:
        self._journal.record_tokens(tokens)
        if self._resumed:
            for entry_id in self._resumed & tokens.keys():
                self._began(entry_id)
        for event in events:
            entry_id = event.request_id
            if event.finish is not None:
                self._forget(entry_id)
            elif event.cached_tokens is not None or entry_id in self._resumed:
                self._began(entry_id)
            self._journal.record(event)
        if self._journal.held:
            self._dispatch()

    def _began(self, entry_id: str) -> None:
        """Take in that a request has brought something where it is. An image counts until it ends."""
        self._resumed.discard(entry_id)
        if entry_id in self._where:
            replica, route = self._where[entry_id]
            if not route.is_image:
                self._router.began(replica.id, route)

    async def _watch(self) -> None:
        """Give up replicas that are silent, and requests that no replica took in time. A tick that comes late itself
        counts once: a busy edge blames no replica."""
        allowed = self.config.engine.heartbeat_timeout_s / TICK_SECONDS
        missed: dict[str, int] = {}
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for replica in list(self._replicas.values()):
                if replica.link is None:
                    missed.pop(replica.id, None)
                    continue
                replica.send(Heartbeat(0.0))
                missed[replica.id] = 0 if replica.heard else missed.get(replica.id, 0) + 1
                replica.heard = False
                if missed[replica.id] >= allowed:
                    replica.failure = f"it was silent for {self.config.engine.heartbeat_timeout_s:.0f} s"
                    replica.link.abort()
                    self._lost(replica, is_evidence=False)
            self._expire()

    def _expire(self) -> None:
        """End the requests that have waited too long for a replica, where there is none."""
        if self.is_alive:
            return
        limit_s = self.config.cluster.replica_wait_s
        for request_id, since in list(self._held_since.items()):
            if time.monotonic() - since > limit_s:
                self._forget(request_id)
                error = f"No replica of the model was available for {limit_s:.0f} s."
                self._journal.record(Event(request_id=request_id, finish=FinishReason.ABORT, error=error))


def _sum(stats: Collection[EngineStats]) -> EngineStats:
    """Return the sums of all counters and gauges."""
    names = [name for name in EngineStats.__struct_fields__ if name not in ("prepared", "replicas")]
    sums = {name: sum(getattr(one, name) for one in stats) for name in names}
    return EngineStats(**sums, prepared=all(one.prepared for one in stats))


def _difference(ours: ModelInfo, theirs: ModelInfo) -> str:
    """Return what keeps a replica from going on with the requests of another; empty: nothing."""
    for field in ("name", "logits_width", "dtype", "images"):
        if getattr(ours, field) != getattr(theirs, field):
            return f"{field} is {getattr(theirs, field)!r:.200}, not {getattr(ours, field)!r:.200}"
    if theirs.max_model_len < ours.max_model_len:
        return f"its context is {theirs.max_model_len} tokens, not {ours.max_model_len}"
    return ""
