"""The api process's side of the engine: supervision and the journal.

The engine process is disposable. When it dies, hangs or gives up, another is started and every open request is
submitted again as its prompt and the tokens already delivered, so its stream goes on as if nothing had happened.
Requests that the dead engine had, queued, waiting for an adapter or in its steps, come back one at a time, each alone
under suspicion until it gives a token: one that takes a second engine down ends with an error, alone. An engine that
another process killed or stopped is no evidence against it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

import weft.errors
from weft.checkpoint.model_files import ModelFiles
from weft.engine.child_process import OUTSIDE_ENDS, is_stopped, num_oom_kills
from weft.engine.journal import Entry, Journal, Place, Queued, Waiting, queued_tokens
from weft.engine.process import LaunchedEngine, launch_engine
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    ControlCall,
    Done,
    Failed,
    FromEngine,
    Heartbeat,
    Inbox,
    PrefixDigests,
    ProcessControl,
    Ready,
    Shutdown,
    Start,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    Vocabulary,
    write_frame,
)
from weft.engine_stats import EngineStats
from weft.errors import EngineFault, InvalidRequest, Overloaded, Unavailable, WeftError
from weft.options import Config, SchedulerOptions, ServerOptions
from weft.types import Event, FinishReason, ModelInfo, Request

MOST = 2
"""The queue is full for every tenant at so many times its limit."""


def check_capacity(waiting: Waiting, tenant: str, num_tokens: int, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the queue has no capacity for a request. Up to the limit every request is let in; up to
    twice the limit those of tenants that have less than their equal share of it."""
    total, own = waiting.total, waiting.by_tenant.get(tenant)
    num_tenants = len(waiting.by_tenant) + (own is None)
    own = own or Queued()
    if not _fits(total.requests, own.requests, 1, num_tenants, limits.max_queued_requests):
        raise Overloaded(
            f"{total.requests} requests are waiting already.", hint="Try again later (--max-queued-requests)."
        )
    if not _fits(total.tokens, own.tokens, num_tokens, num_tenants, limits.max_queued_tokens):
        raise Overloaded(
            f"Prompts of {total.tokens} tokens are waiting already.", hint="Try again later (--max-queued-tokens)."
        )


def check_tensor_capacity(held: int, request: Request, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the `held` bytes of clients' tensors, kept for open requests in case that an engine dies,
    would become too many: those that run may have the limit, and as many more may wait for them. A tensor that is too
    large by itself is for the engine to refuse."""
    if held and held + request.tensor_bytes > MOST * limits.max_embedding_mb << 20:
        raise Overloaded(
            f"Requests with tensors of {held} bytes are open already.", hint="Try again later (--max-embedding-mb)."
        )


def open_entry(journal: Journal, request: Request, limits: SchedulerOptions) -> Entry:
    """Write a request to the journal. Raises InvalidRequest for an id that is open, and Overloaded where there is no
    capacity."""
    if request.request_id in journal:
        raise InvalidRequest(f"There is a request {request.request_id!r} already.", param="request_id")
    check_capacity(journal.waiting, request.tenant, queued_tokens(request), limits)
    if request.tensor_bytes:
        check_tensor_capacity(journal.tensor_bytes, request, limits)
    return journal.open(request)


def _fits(total: int, own: int, size: int, num_tenants: int, limit: int) -> bool:
    if total + size <= limit or size == 0:
        return True
    return total + size <= MOST * limit and (own + size) * num_tenants <= limit


def engine_config(config: Config) -> Config:
    """Return the part of a configuration that an engine process needs: no keys, no addresses, no paths of others."""
    server = ServerOptions(log_level=config.server.log_level, log_format=config.server.log_format)
    return Config(
        model=config.model,
        backend=replace(config.backend, engine_url="", engine_api_key=""),
        cache=config.cache,
        scheduler=config.scheduler,
        engine=config.engine,
        server=server,
        limits=config.limits,
    )


log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
SHUTDOWN_SECONDS = 5.0
LATE_HEARTBEATS = 3
"""An engine that misses so many heartbeats is not ready, though not yet given up."""


class _Connection(Struct):
    """The connection to one engine process, while that lives."""

    engine: LaunchedEngine
    transport: asyncio.Transport
    inbox: Inbox
    oom_kills: int
    """Processes that the kernel had killed for want of memory when this one was launched."""
    stats: EngineStats = EngineStats(prepared=False)
    heartbeats_missed: int = 0
    heard: bool = True
    """True when anything came since the last tick."""
    failure: str = ""
    was_stopped: bool = False
    """True when it was silent because a signal had stopped it, or failed because a rank of it was ended so."""
    knows_vocabulary: bool = False

    def ended_from_outside(self, end: str) -> bool:
        """Return whether another process ended or stopped it, which no request can have caused: it had no fault of its
        own, and it was not the kernel for want of memory."""
        if self.failure:
            return self.was_stopped
        return end in OUTSIDE_ENDS and num_oom_kills() == self.oom_kills

    def send(self, message: ToEngine) -> None:
        """Send a message, unless the engine is gone and that is noticed in a moment: the journal has what it needs."""
        if not self.transport.is_closing():
            write_frame(self.transport, message)


class EngineClient:
    """The client keeps one engine process alive, and hands requests to it and events to their streams."""

    def __init__(
        self, config: Config, files: ModelFiles, launch: Callable[[], LaunchedEngine] = launch_engine,
        *, on_digests: Callable[[PrefixDigests], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_digests` is called with what changes in the engine's prefix cache; None: it is not told."""
        self.config = config
        self.files = files
        self.restarts = 0
        self.state = "starting"
        self.model: ModelInfo
        self.vocabulary: Vocabulary | None = None
        """The vocabulary, which must be set before the first request that has a grammar."""
        self._launch = launch
        self._on_digests = on_digests
        self._journal = Journal(config.scheduler.max_embedding_mb << 20)
        self._connection: _Connection | None = None
        self._past = EngineStats()
        """The counters of the engine processes before this one."""
        self._deaths_in_a_row = 0
        self._supervision: asyncio.Task[None] | None = None
        self._control_calls: dict[int, asyncio.Future[Done]] = {}
        self._num_control_calls = 0

    async def start(self) -> None:
        """Start the first engine process. Raises the error that kept it from starting."""
        self.model = await self._connect()
        self.state = "ready"
        self._supervision = asyncio.create_task(self._supervise(), name="weft-supervision")

    async def close(self) -> None:
        """Ask the engine process to end, wait, then kill it. Open requests end as aborted."""
        was_restarting, self.state = self.state == "restarting", "closed"
        self._journal.end_all(FinishReason.ABORT, "The server is shutting down.")
        if self._connection is not None:
            self._connection.send(Shutdown())
        if self._supervision is not None:
            if was_restarting:
                self._supervision.cancel()
            done, _ = await asyncio.wait({self._supervision}, timeout=SHUTDOWN_SECONDS)
            if not done and self._connection is not None:
                self._connection.engine.kill()
            await asyncio.wait({self._supervision})
        elif self._connection is not None:
            await self._reap(self._connection)

    # Requests.

    def submit(self, request: Request) -> Entry:
        """Queue a request, and return the entry where its events arrive. Raises Overloaded and Unavailable."""
        if self.state in ("failed", "closed", "starting"):
            raise Unavailable(f"The engine is not available: {self.state}.")
        entry = open_entry(self._journal, request, self.config.scheduler)
        try:
            self._dispatch()
        except Exception:
            # What cannot be sent must not be sent again to every engine to come.
            self._journal.close(request.request_id)
            raise
        return entry

    def check_capacity(self, tenant: str, num_tokens: int = 1) -> None:
        """Raise Overloaded where a request of this tenant with so many tokens would not be queued now."""
        check_capacity(self._journal.waiting, tenant, num_tokens, self.config.scheduler)

    def abort(self, request_id: str) -> None:
        """End a request, if it is open; its blocks are free before the next step."""
        entry = self._journal.close(request_id)
        if entry is None:
            return
        if entry.place is not Place.HELD and self._connection is not None:
            self._connection.send(Abort([request_id]))
        self._dispatch()

    async def control(self, message: ProcessControl) -> str:
        """Have the engine process carry out a control message between its steps, and return its answer. Raises
        InvalidRequest when it cannot be done, and Unavailable when there is no engine to do it, or not to its end."""
        if self._connection is None:
            raise Unavailable(f"The engine is not available: {self.state}.")
        self._num_control_calls += 1
        number = self._num_control_calls
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._control_calls[number] = answer
        self._connection.send(ControlCall(number, message))
        try:
            done = await answer
        finally:
            self._control_calls.pop(number, None)
        if done.error:
            raise InvalidRequest(done.error)
        return done.result

    @property
    def num_open(self) -> int:
        return len(self._journal)

    @property
    def waiting(self) -> Waiting:
        return self._journal.waiting

    @property
    def is_alive(self) -> bool:
        """True while heartbeats come."""
        return self._connection is not None and self._connection.heartbeats_missed < LATE_HEARTBEATS

    @property
    def engine_pid(self) -> int | None:
        return None if self._connection is None else self._connection.engine.pid

    @property
    def gauges(self) -> EngineStats:
        """The figures that the living engine process sent last; they know nothing of earlier processes."""
        return EngineStats() if self._connection is None else self._connection.stats

    def stats(self) -> EngineStats:
        """Return gauges of the living engine process, and counters of all so far."""
        return replace(
            self.gauges,
            waiting=self._journal.waiting.total.requests,
            restarts=self.restarts,
            open_requests=len(self._journal),
        ).with_counters_of(self._past)

    def _dispatch(self) -> None:
        """Send the engine the requests that it may have now."""
        if self._connection is None or self.state != "ready":
            return
        sent = self._journal.send()
        if not sent:
            return
        self._send_vocabulary(self._connection, sent)
        for entry in sent:
            # In a message of its own: tensors of several could be more than one may hold.
            self._connection.send(Submit([entry.resumed()]))

    def _send_vocabulary(self, connection: _Connection, sent: list[Entry]) -> None:
        """Send the vocabulary before the first request that has a grammar."""
        if connection.knows_vocabulary or self.vocabulary is None:
            return
        if any(entry.request.params.grammar for entry in sent):
            connection.send(self.vocabulary)
            connection.knows_vocabulary = True

    # Supervision.

    async def _connect(self) -> ModelInfo:
        """Launch an engine process and wait until it is ready. When the wait is cancelled, the process is killed."""
        try:
            engine = self._launch()
        except OSError as error:
            raise EngineFault(f"No process could be started for the engine: {error}.") from error
        try:
            transport, inbox = await asyncio.get_running_loop().create_unix_connection(Inbox, sock=engine.socket)
        except BaseException:
            engine.socket.close()
            engine.kill()
            await asyncio.to_thread(engine.wait, SHUTDOWN_SECONDS)
            raise
        connection = _Connection(engine, transport, inbox, num_oom_kills())
        connection.send(Start(engine_config(self.config), self.files, self._on_digests is not None))
        try:
            said = await self._first_message(inbox)
        except BaseException:
            engine.kill()
            await self._reap(connection)
            raise
        if isinstance(said, Ready):
            connection.stats = said.stats
            self._connection = connection
            return said.model
        raise self._start_error(said, await self._reap(connection))

    async def _first_message(self, inbox: Inbox) -> Ready | Failed | None:
        """Wait until a starting engine is ready or has failed; None when it ended without a message."""
        limit_s = self.config.engine.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while (said := await inbox.read()) is not None:
                    if isinstance(said, Ready | Failed):
                        return said
                return None
        except TimeoutError:
            raise Unavailable(
                f"The engine was not ready after {limit_s:.0f} s.", hint="Give it longer with --start-timeout-s."
            ) from None
        except BrokenFrame as error:
            raise EngineFault(f"The engine sent what is no message while it started: {error}.") from error

    def _start_error(self, said: Failed | None, end: str) -> WeftError:
        if said is None:
            return EngineFault(f"The engine process ended while it started ({end}).")
        kind = getattr(weft.errors, said.kind, None)
        if isinstance(kind, type) and issubclass(kind, WeftError):
            return kind(said.message, hint=said.hint)
        return EngineFault(f"The engine could not start: {said.kind}: {said.message}")

    async def _supervise(self) -> None:
        try:
            await self._keep_one_alive()
        except Exception as error:
            # Whatever the error is, no request may wait for good.
            log.exception("The supervision of the engine failed.")
            self._give_up(f"its supervision failed: {error}")
            if self._connection is not None:
                connection, self._connection = self._connection, None
                connection.engine.kill()
                await self._reap(connection)

    async def _keep_one_alive(self) -> None:
        while self._connection is not None:
            connection = self._connection
            watch = asyncio.create_task(self._watch(connection))
            try:
                await self._read_forever(connection)
            finally:
                watch.cancel()
            self._connection = None
            self._fail_control_calls()
            if self._on_digests is not None:
                self._on_digests(PrefixDigests(reset=True))
            self._past = connection.stats.with_counters_of(self._past)
            if self.state != "closed":
                self.state = "restarting"
            end = await self._reap(connection)
            if self.state == "closed":
                return
            why = connection.failure or f"it ended ({end})"
            self._on_engine_death(why, from_outside=connection.ended_from_outside(end))
            await self._replace()

    async def _read_forever(self, connection: _Connection) -> None:
        try:
            await connection.inbox.follow_messages(partial(self._take, connection))
        except BrokenFrame as error:
            connection.failure = f"it sent what is no message: {error}"

    def _take(self, connection: _Connection, message: FromEngine) -> bool:
        """Take in a message of the engine. Return True when the engine must be given up."""
        connection.heard = True
        match message:
            case StepOutput():
                connection.stats = message.stats
                self._deliver(message)
            case Started(request_ids=request_ids, stats=stats):
                connection.stats = stats or connection.stats
                self._journal.started(request_ids)
            case Heartbeat(step_seconds=seconds) if seconds > self.config.engine.step_timeout_s:
                connection.failure = f"a step took more than {self.config.engine.step_timeout_s:.0f} s"
                return True
            case Done(number=number) if number in self._control_calls:
                _answer(self._control_calls.pop(number), message)
            case PrefixDigests() if self._on_digests is not None:
                self._on_digests(message)
            case Failed(kind=kind, message=text, from_outside=from_outside):
                connection.failure = f"{kind}: {text}"
                connection.was_stopped = from_outside
        return False

    def _fail_control_calls(self) -> None:
        for answer in self._control_calls.values():
            _answer(answer, Unavailable("The engine ended before it was done."))
        self._control_calls.clear()

    def _deliver(self, output: StepOutput) -> None:
        self._journal.record_tokens(output.tokens)
        for event in output.events:
            self._journal.record(event)
        if output.tokens or output.events:
            self._deaths_in_a_row = 0
            self._dispatch()

    async def _watch(self, connection: _Connection) -> None:
        """Count missed heartbeats. A tick that comes late itself counts once: a busy api process blames no engine."""
        allowed = self.config.engine.heartbeat_timeout_s / TICK_SECONDS
        while connection.heartbeats_missed < allowed:
            await asyncio.sleep(TICK_SECONDS)
            connection.heartbeats_missed = 0 if connection.heard else connection.heartbeats_missed + 1
            connection.heard = False
        connection.was_stopped = is_stopped(connection.engine.pid)
        reason = ", stopped by a signal" if connection.was_stopped else ""
        connection.failure = f"it was silent for {self.config.engine.heartbeat_timeout_s:.0f} s{reason}"
        connection.engine.kill()

    def _on_engine_death(self, why: str, *, from_outside: bool) -> None:
        """Count a death, and end the request that caused two of them."""
        self.restarts += 1
        self._deaths_in_a_row += 1
        guilty = self._journal.engine_died(from_outside=from_outside)
        log.error("The engine died: %s. %d requests are open; another is started.", why, len(self._journal))
        for entry in guilty:
            times = "twice" if entry.deaths == 2 else f"{entry.deaths} times"
            error = f"The engine failed {times} while it had this request."
            self._journal.record(Event(request_id=entry.id, finish=FinishReason.ERROR, error=error))

    async def _replace(self) -> None:
        while self.state == "restarting":
            if self._deaths_in_a_row > self.config.engine.max_restarts:
                self._give_up(f"it died {self._deaths_in_a_row} times in a row")
                return
            try:
                await self._connect()
            except (EngineFault, Unavailable) as error:
                self._deaths_in_a_row += 1
                log.error("The engine could not be started again: %s", error)
            except WeftError as error:
                self._give_up(str(error))
                return
            else:
                if self.state == "restarting":
                    self.state = "ready"
                    self._dispatch()
                elif self._connection is not None:
                    self._connection.send(Shutdown())

    def _give_up(self, why: str) -> None:
        log.critical("No engine: %s", why)
        self.state = "failed"
        self._journal.end_all(FinishReason.ERROR, f"There is no engine any more: {why}.")

    async def _reap(self, connection: _Connection) -> str:
        """Make sure that an engine process is gone, and return how it ended."""
        connection.transport.close()
        waiting = asyncio.create_task(asyncio.to_thread(connection.engine.wait, SHUTDOWN_SECONDS))
        try:
            end = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            connection.engine.kill()
            await asyncio.wait({waiting})
            raise
        if end is not None:
            return end
        connection.engine.kill()
        end = await asyncio.to_thread(connection.engine.wait, SHUTDOWN_SECONDS)
        return "it could not be ended" if end is None else "it had to be killed"


def _answer(waiting: asyncio.Future[Done], told: Done | Unavailable) -> None:
    """Give a control call its answer, unless its caller has gone."""
    if waiting.done():
        return
    if isinstance(told, Done):
        waiting.set_result(told)
    else:
        waiting.set_exception(told)
