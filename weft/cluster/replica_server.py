"""The server of one replica: it holds an engine and its supervision, and serves any number of edges over TCP.

An engine that dies is replaced here, from the journal of its client, and edges only see a pause. Where the engine is
given up, or this process ends, edges lose their connections, and their journals move the requests to other replicas.
An edge that is gone has its requests aborted at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.native import NativeEngine, start_native
from weft.backends.safe_loading import load_safely
from weft.checkpoint.model_files import ModelFiles
from weft.cluster.replica_link import (
    HANDSHAKE_SECONDS,
    Drain,
    Hello,
    Link,
    NotAuthenticated,
    NotTaken,
    ReplicaReady,
    ReplicaStatus,
    StepTokens,
    ToReplica,
    load_of,
    load_tokens,
)
from weft.cluster.router import ReplicaLoad
from weft.engine.client import TICK_SECONDS, EngineClient
from weft.engine.journal import Entry
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    ControlCall,
    Done,
    Heartbeat,
    PrefixDigests,
    Started,
    Submit,
    Vocabulary,
    frame,
)
from weft.errors import ConfigError, Overloaded, Unavailable, WeftError
from weft.observe.traces import ReplicaSpan, Traces, open_traces
from weft.options import Config
from weft.types import Arrival, Event, FinishReason, LatentCheckpoint, Request

try:
    from uvloop import run as run
except ImportError:  # not on Windows
    from asyncio import run as run  # type: ignore[assignment]

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
"""Connections that have proved nothing yet; for one more the oldest is closed."""
MAX_EDGES = 1024
MAX_REQUEST_ID = 256
MAX_CONTROL_CALLS = 16
"""Control calls of one edge at the same time."""
MAX_ADAPTERS = 32
MAX_NUM_IMAGES = 16
"""Images that an engine is taken to generate at the same time where no number is set."""
STATUS_SECONDS = 0.05
"""Edges are told so often how the replica stands, while that changes: the sooner, the better they share it."""
TICKS_PER_HEARTBEAT = round(TICK_SECONDS / STATUS_SECONDS)


class _Relayed(Struct, eq=False):
    """A request of an edge, and what the edge was told of it."""

    entry: Entry
    has_started: bool = False
    checkpoint: LatentCheckpoint | None = None
    """The newest that was sent."""
    span: ReplicaSpan | None = None
    """None: it is not traced."""


class _Edge:
    """One edge, while it is connected. Its request ids get a prefix, so that those of several edges do not collide."""

    def __init__(self, link: Link, number: int, client: EngineClient, traces: Traces | None = None) -> None:
        self.link = link
        self._traces = traces
        self.name = "unnamed"
        self.missed = 0
        self.heard = True
        self.missed_digests = False
        """True when a change of the prefix cache was not sent, because it did not read."""
        self.control_calls: set[asyncio.Task[None]] = set()
        self._prefix = f"{number}."
        self._client = client
        self._requests: dict[str, _Relayed] = {}
        self._unstarted: dict[str, _Relayed] = {}
        self._arrived: dict[str, _Relayed] = {}
        self._is_due = False
        self._loop = asyncio.get_running_loop()
        link.on_resume = self._flush

    def submit(self, request: Request) -> None:
        """Queue a request. Raises WeftError where the engine does not take it."""
        request_id = request.request_id
        if len(request_id) > MAX_REQUEST_ID or request_id in self._requests:
            raise BrokenFrame("a request id that is too long, or open already")
        sibling_of = self._prefix + request.sibling_of if request.sibling_of else ""
        entry = self._client.submit(replace(request, request_id=self._prefix + request_id, sibling_of=sibling_of))
        relayed = _Relayed(entry)
        self._requests[request_id] = self._unstarted[request_id] = relayed
        entry.listener = partial(self._hear, request_id, relayed)
        if self._traces is not None and (span := self._traces.begin_at_replica(request)) is not None:
            relayed.span = span
            entry.listener = partial(self._hear_traced, request_id, relayed, span)

    @property
    def image_tokens(self) -> int:
        """The cost of the denoise steps of its open images."""
        asked = (relayed.entry.request for relayed in self._requests.values())
        return sum(load_tokens(request, self._client.model.images) for request in asked if request.image is not None)

    def abort(self, request_id: str) -> None:
        relayed = self._requests.pop(request_id, None)
        if relayed is not None:
            self._unstarted.pop(request_id, None)
            self._arrived.pop(request_id, None)
            self._client.abort(relayed.entry.id)
            if relayed.span is not None:
                relayed.span.end(FinishReason.ABORT)

    def leave(self) -> None:
        """Abort all that it asked for."""
        for call in self.control_calls:
            call.cancel()
        for request_id in list(self._requests):
            self.abort(request_id)

    def tell_started(self) -> None:
        started = [request_id for request_id, relayed in self._unstarted.items() if not relayed.entry.waits]
        for request_id in started:
            del self._unstarted[request_id]
        if started:
            self.link.send(Started(started))

    def _hear(self, request_id: str, relayed: _Relayed) -> None:
        """Note that something arrived for a request. It is sent when all of the step has been taken in."""
        self._arrived[request_id] = relayed
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _hear_traced(self, request_id: str, relayed: _Relayed, span: ReplicaSpan) -> None:
        span.saw(relayed.entry.arrived[-1], self._client.engine_pid)
        self._hear(request_id, relayed)

    def _flush(self) -> None:
        """Send what has arrived, unless the edge does not read: then it gathers in the entries, which their requests
        bound, until it does or is disconnected."""
        self._is_due = False
        if self.link.is_paused or not self._arrived or self._client.state not in ("ready", "restarting"):
            return
        tokens: dict[str, int] = {}
        events: list[Event] = []
        for request_id, relayed in self._arrived.items():
            entry = relayed.entry
            arrived, entry.arrived = entry.arrived, []
            if len(arrived) == 1 and isinstance(token := arrived[0], int):
                tokens[request_id] = token
            else:
                events += _events(request_id, relayed, arrived)
            if not entry.is_open:
                del self._requests[request_id]
                self._unstarted.pop(request_id, None)
        self._arrived.clear()
        self.link.send(StepTokens(tokens, events))


def _events(request_id: str, relayed: _Relayed, arrived: Iterable[Arrival]) -> Iterator[Event]:
    """Return what arrived for a request as events that an edge's journal can record, in order. The newest checkpoint of
    an image, which this process's journal has kept, goes on with them."""
    for arrival in arrived:
        if isinstance(arrival, int):
            yield Event(request_id=request_id, token_ids=[arrival])
            continue
        newest = relayed.entry.checkpoint
        if newest is not None and newest is not relayed.checkpoint and arrival.finish is None:
            relayed.checkpoint = newest
            yield replace(arrival, request_id=request_id, checkpoint=newest)
        else:
            yield replace(arrival, request_id=request_id)


class PublishedDigests:
    """The digests of what the engine's prefix cache holds now, and the server that passes changes on."""

    def __init__(self) -> None:
        self.server: ReplicaServer | None = None
        self._digests: set[bytes] = set()

    def take(self, change: PrefixDigests) -> None:
        if change.reset:
            self._digests.clear()
        self._digests.update(change.added)
        self._digests.difference_update(change.removed)
        if self.server is not None:
            self.server.send_to_all(change)

    @property
    def all(self) -> PrefixDigests:
        return PrefixDigests(reset=True, added=list(self._digests))


class ReplicaServer:
    """Serves the engine of one client, which is ready, to edges that know the key."""

    def __init__(
        self,
        client: EngineClient,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        digests: PublishedDigests | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.client = client
        self._traces = traces
        self._digests = digests or PublishedDigests()
        self._digests.server = self
        self.port = 0
        self.is_draining = False
        self.failed = asyncio.Event()
        """Set when the engine was given up: this server is of no more use."""
        self._key = key
        self._tls = tls
        self._boot = secrets.token_hex(8)
        self._edges: set[_Edge] = set()
        self._num_edges = 0
        self._pending: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        """Connections that have proved nothing yet, the oldest first."""
        self._serving: set[asyncio.Task[None]] = set()
        self._adapters: OrderedDict[str, None] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: socket.socket | None = None

    async def listen(self, host: str, port: int) -> None:
        """Take connections from now on; `port` says where. Raises ConfigError for an address that cannot be had."""
        try:
            info = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = info[0]
            self._listener = socket.socket(family, kind, protocol)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(128)
        except OSError as error:
            raise ConfigError(f"A replica cannot listen on {host}:{port}: {error.strerror or error}.") from error
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._tasks = [asyncio.create_task(self._accept(self._listener)), asyncio.create_task(self._watch())]

    def drain(self) -> None:
        """Take no new requests. Those that are open go on."""
        self.is_draining = True

    @property
    def num_open(self) -> int:
        return self.client.num_open

    @property
    def num_edges(self) -> int:
        return len(self._edges)

    def load(self) -> ReplicaLoad:
        """Return the load as the router and whatever scales replicas need it."""
        return load_of("", self._status())

    async def drained(self, timeout_s: float) -> None:
        """Wait until no request is open, or for so long."""
        self.drain()
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_open:
                    await asyncio.sleep(STATUS_SECONDS / 5)
        except TimeoutError:
            log.warning("%d requests are open after %.0f s: their edges move them.", self.num_open, timeout_s)

    async def close(self) -> None:
        """End all connections and the engine."""
        for task in (*self._tasks, *self._pending, *self._serving):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._pending, *self._serving, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        await self.client.close()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    # Connections.

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free, or the client has gone again
                log.warning("A connection could not be taken: %s", error)
                await asyncio.sleep(STATUS_SECONDS)
                continue
            if len(self._pending) >= MAX_UNAUTHENTICATED:
                oldest, _ = self._pending.popitem(last=False)
                oldest.cancel()
            task = asyncio.create_task(self._admit(sock))
            self._pending[task] = None
            task.add_done_callback(lambda done: self._pending.pop(done, None))

    async def _admit(self, sock: socket.socket) -> None:
        """Authenticate a connection, and serve it if it is an edge's."""
        peer = "unknown"
        link: Link | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                peer = str(sock.getpeername()[0])
                tls = {} if self._tls is None else {"ssl": self._tls}
                connecting = asyncio.get_running_loop().connect_accepted_socket(Link, sock, **tls)  # type: ignore[arg-type]
                _, link = await connecting
                await link.prove_to_edge(self._key)
        except (NotAuthenticated, TimeoutError, OSError) as error:
            log.warning("A connection from %s was refused: %s", peer, error or "it took too long")
            _drop(link, sock)
            return
        except BaseException:
            _drop(link, sock)
            raise
        if len(self._edges) >= MAX_EDGES:
            log.warning("A connection from %s was refused: there are %d edges already.", peer, MAX_EDGES)
            link.abort()
            return
        task = asyncio.create_task(self._serve(link, peer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, link: Link, peer: str) -> None:
        self._num_edges += 1
        edge = _Edge(link, self._num_edges, self.client, self._traces)
        self._edges.add(edge)
        try:
            await link.follow_edge(partial(self._take, edge))
        except BrokenFrame as error:
            log.error("An edge at %s sent what is no message: %s", peer, error)
        finally:
            self._edges.discard(edge)
            edge.leave()
            link.abort()

    def _take(self, edge: _Edge, message: ToReplica) -> None:
        edge.heard = True
        match message:
            case Submit(requests=requests):
                for request in requests:
                    self._submit(edge, request)
            case Abort(request_ids=request_ids):
                for request_id in request_ids:
                    edge.abort(request_id)
            case Hello(edge=name):
                edge.name = name[:MAX_REQUEST_ID]
                edge.link.send(ReplicaReady(self._boot, self.client.model, self._status()))
                edge.link.send(self._digests.all)
            case Vocabulary():
                self.client.vocabulary = self.client.vocabulary or message
            case ControlCall():
                if len(edge.control_calls) >= MAX_CONTROL_CALLS:
                    edge.link.send(Done(message.number, error="Too many control calls at the same time."))
                    return
                call = asyncio.create_task(self._control(edge, message))
                edge.control_calls.add(call)
                call.add_done_callback(edge.control_calls.discard)
            case Drain():
                self.drain()
            case Heartbeat():
                pass

    def _submit(self, edge: _Edge, request: Request) -> None:
        if self.is_draining:
            edge.link.send(NotTaken(request.request_id, "it drains"))
            return
        if request.adapter is not None:
            self._adapters[request.adapter.name] = None
            self._adapters.move_to_end(request.adapter.name)
            while len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        try:
            edge.submit(request)
        except (Overloaded, Unavailable) as error:
            edge.link.send(NotTaken(request.request_id, error.message))
        except WeftError as error:
            rejected = Event(request_id=request.request_id, finish=FinishReason.REJECTED, error=str(error))
            edge.link.send(StepTokens({}, [rejected]))

    async def _control(self, edge: _Edge, call: ControlCall) -> None:
        try:
            done = Done(call.number, await self.client.control(call.message))
        except WeftError as error:
            done = Done(call.number, error=str(error))
        edge.link.send(done)

    def send_to_all(self, message: PrefixDigests) -> None:
        """Send a message to every edge that reads. One that does not is told all when it does."""
        encoded = frame(message)
        for edge in self._edges:
            if not edge.link.is_paused:
                edge.link.send_frame(encoded)
            else:
                edge.missed_digests = True

    def _status(self) -> ReplicaStatus:
        state = "draining" if self.is_draining else self.client.state
        stats, waiting_tokens = self.client.stats(), self.client.waiting.total.tokens
        if stats.images_running or stats.images_waiting:
            waiting_tokens += sum(edge.image_tokens for edge in self._edges)
        slots = self.client.config.scheduler.max_num_images or MAX_NUM_IMAGES
        return ReplicaStatus(state, stats, waiting_tokens, slots, list(self._adapters))

    def _shape(self) -> tuple[object, ...]:
        """Return what edges are told of at once when it changes. Counters, and the last percent of the KV cache, wait
        for the next heartbeat."""
        stats, waiting = self.client.gauges, self.client.waiting.total
        kv_percent = 100 * stats.blocks_used // (stats.blocks_total or 1)
        images = stats.images_running, stats.images_waiting
        state = self.is_draining, self.client.state, stats.prepared, self.client.restarts
        return state, waiting.requests, waiting.tokens, stats.running, kv_percent, images, tuple(self._adapters)

    async def _watch(self) -> None:
        """Tell edges how this replica stands, and leave those that are silent or do not read. A tick that comes late
        itself counts once."""
        allowed = self.client.config.engine.heartbeat_timeout_s / STATUS_SECONDS
        last, ticks = self._shape(), 0
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if self.client.state == "failed":
                self.failed.set()
                for edge in list(self._edges):
                    edge.link.abort()
                continue
            shape, ticks = self._shape(), ticks + 1
            told = frame(self._status()) if shape != last or ticks % TICKS_PER_HEARTBEAT == 0 else b""
            last = shape
            for edge in list(self._edges):
                edge.missed = 0 if edge.heard and not edge.link.is_paused else edge.missed + 1
                edge.heard = False if ticks % TICKS_PER_HEARTBEAT == 0 else edge.heard
                if edge.missed >= allowed:
                    log.error("The edge %s is silent or does not read: it is disconnected.", edge.name)
                    edge.link.abort()
                    continue
                edge.tell_started()
                if told and not edge.link.is_paused:
                    edge.link.send_frame(told)
                    if edge.missed_digests:
                        edge.missed_digests = False
                        edge.link.send(self._digests.all)


def _drop(link: Link | None, sock: socket.socket) -> None:
    if link is not None:
        link.abort()
    else:
        sock.close()


async def serve_replica(
    config: Config,
    files: ModelFiles | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    key: bytes,
    tls: ssl.SSLContext | None = None,
) -> ReplicaServer:
    """Load a model, and serve it to edges that know the key. The server, which is returned, listens at its `port`."""
    native = replace(config, backend=replace(config.backend, engine="native"))
    digests = PublishedDigests()
    traces = open_traces(config.server.otlp_endpoint) if config.server.otlp_endpoint else None
    engine = await load_safely(partial(start_native, files=files, on_digests=digests.take), native)
    assert isinstance(engine, NativeEngine) and isinstance(engine.client, EngineClient)
    server = ReplicaServer(engine.client, key, tls, digests, traces)
    engine.text.close()
    try:
        await server.listen(host, port)
    except BaseException:
        await server.close()
        raise
    return server


async def run_replica(
    config: Config, host: str, port: int, *, key: bytes, tls: ssl.SSLContext | None, say: Callable[[str], None]
) -> int:
    """Serve until a signal or a dead engine ends it, and return the exit code. SIGTERM drains first."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = await serve_replica(config, None, host, port, key=key, tls=tls)
    say(f"replica of {server.client.model.name} at {host}:{server.port}")
    waiting = [asyncio.create_task(event.wait()) for event in (stop, server.failed)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    if stop.is_set():
        await server.drained(config.server.drain_timeout_s)
    await server.close()
    return 0 if stop.is_set() else 1
