"""The api process's side of the engine: supervision and the journal.

The engine is disposable. When it dies, hangs or gives up, another is started and every open request is submitted
again as its prompt and the tokens already delivered, so its stream goes on as if nothing had happened. Requests
that were in the dead engine's steps come back one at a time, each alone under suspicion until it gives a token:
one that takes a second engine down ends with an error, alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

import weft.errors
from weft.checkpoint.model_files import ModelFiles
from weft.engine.journal import Entry, Journal, Place
from weft.engine.process import EngineProcess, LaunchedEngine
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    ControlCall,
    Done,
    Failed,
    Heartbeat,
    Inbox,
    Ready,
    Shutdown,
    Start,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    Vocabulary,
    frame,
)
from weft.errors import EngineFault, InvalidRequest, Overloaded, Unavailable, WeftError
from weft.options import Config, SchedulerOptions
from weft.types import EngineStats, Event, FinishReason, ModelInfo, Request

MOST = 2
"""So many times its limit the queue is full for everybody."""


def check_capacity(waiting: Iterable[Request], request: Request, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the queue has no place for a request."""
    waiting = list(waiting)
    if not _fits(waiting, request, limits.max_queued_requests, lambda _: 1):
        raise Overloaded(
            f"{len(waiting)} requests are waiting already.", hint="Try again later (--max-queued-requests)."
        )
    if not _fits(waiting, request, limits.max_queued_tokens, _num_tokens):
        queued = sum(map(_num_tokens, waiting))
        raise Overloaded(
            f"Prompts of {queued} tokens are waiting already.", hint="Try again later (--max-queued-tokens)."
        )


def check_tensor_capacity(others: Iterable[Request], request: Request, limits: SchedulerOptions) -> None:
    """Raise Overloaded where the tensors of clients that are kept for open requests, in case that an engine dies, would
    be too many. One that is too large by itself is for the engine to refuse."""
    held = sum(other.given.num_bytes for other in others)
    if held and held + request.given.num_bytes > limits.max_embedding_mb << 20:
        raise Overloaded(
            f"Images with tensors of {held} bytes are open already.", hint="Try again later (--max-embedding-mb)."
        )


def _fits(waiting: list[Request], request: Request, limit: int, size: Callable[[Request], int]) -> bool:
    total = sum(map(size, waiting)) + size(request)
    if total <= limit or size(request) == 0:
        return True
    if total > MOST * limit:
        return False
    own = sum(size(other) for other in waiting if other.tenant == request.tenant) + size(request)
    return own * len({request.tenant, *(other.tenant for other in waiting)}) <= limit


def _num_tokens(request: Request) -> int:
    """A sibling's prompt is its leader's, and counted there."""
    return 0 if request.sibling_of else request.num_prompt_tokens


log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
SHUTDOWN_SECONDS = 5.0
LATE_BEATS = 3
"""An engine that misses so many beats is not ready, though not yet given up."""


class _Connection(Struct):
    """One engine, while it lives."""

    engine: LaunchedEngine
    transport: asyncio.Transport
    inbox: Inbox
    stats: EngineStats = EngineStats(prepared=False)
    beats_missed: int = 0
    heard: bool = True
    """Whether anything came since the last tick."""
    failure: str = ""
    knows_vocabulary: bool = False

    def send(self, message: ToEngine) -> None:
        self.transport.write(frame(message))


class EngineClient:
    def __init__(self, config: Config, files: ModelFiles, launch: Callable[[], LaunchedEngine] = EngineProcess) -> None:
        self.config = config
        self.files = files
        self.restarts = 0
        self.state = "starting"
        self.model: ModelInfo
        self.vocabulary: Vocabulary | None = None
        """Must be set before the first request that has a grammar."""
        self._launch = launch
        self._journal = Journal()
        self._connection: _Connection | None = None
        self._past = EngineStats()
        """What the engines before this one counted."""
        self._deaths_in_a_row = 0
        self._supervision: asyncio.Task[None] | None = None
        self._errands: dict[int, asyncio.Future[Done]] = {}
        self._num_errands = 0

    async def start(self) -> None:
        """Start the first engine; raises what it said, as the error it was."""
        self.model = await self._connect()
        self.state = "ready"
        self._supervision = asyncio.create_task(self._supervise(), name="weft-supervision")

    async def close(self) -> None:
        """Say goodbye first, then wait, then end it. Open requests end as aborted."""
        was_restarting, self.state = self.state == "restarting", "closed"
        self._journal.end_all(FinishReason.ABORT, "The server is shutting down.")
        if self._connection is not None:
            self._connection.send(Shutdown())
        if self._supervision is not None:
            if was_restarting:
                self._supervision.cancel()
            await asyncio.wait({self._supervision})
        elif self._connection is not None:
            await self._bury(self._connection)

    # Requests.

    def submit(self, request: Request) -> Entry:
        """Queue a request and return where its events arrive, or raise Overloaded or Unavailable."""
        if self.state in ("failed", "closed", "starting"):
            raise Unavailable(f"The engine is not available: {self.state}.")
        if request.request_id in self._journal:
            raise InvalidRequest(f"There is a request {request.request_id!r} already.", param="request_id")
        waiting = self._journal.at(Place.HELD, Place.QUEUED)
        check_capacity((entry.request for entry in waiting), request, self.config.scheduler)
        if request.given.num_bytes:
            everybody = self._journal.at(*Place)
            check_tensor_capacity((entry.request for entry in everybody), request, self.config.scheduler)
        entry = self._journal.open(request)
        try:
            self._dispatch()
        except Exception:
            # What cannot be sent must not be sent again to every engine to come.
            self._journal.close(request.request_id)
            raise
        return entry

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step."""
        entry = self._journal.close(request_id)
        if entry is not None and entry.place is not Place.HELD and self._connection is not None:
            self._connection.send(Abort([request_id]))
        self._dispatch()

    async def send_on(self, errand: Callable[[int], ControlCall]) -> str:
        """Have the engine do something between its steps. `errand` is given its number. Raises InvalidRequest when it
        cannot be done, and Unavailable when there is no engine to do it, or not to its end."""
        if self._connection is None:
            raise Unavailable(f"The engine is not available: {self.state}.")
        self._num_errands += 1
        number = self._num_errands
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._errands[number] = answer
        self._connection.send(errand(number))
        try:
            done = await answer
        finally:
            self._errands.pop(number, None)
        if done.error:
            raise InvalidRequest(done.error)
        return done.result

    @property
    def num_open(self) -> int:
        return len(self._journal)

    @property
    def beats(self) -> bool:
        return self._connection is not None and self._connection.beats_missed < LATE_BEATS

    @property
    def engine_pid(self) -> int | None:
        return None if self._connection is None else self._connection.engine.pid

    def stats(self) -> EngineStats:
        """Gauges of the living engine; counters of all engines so far."""
        now = EngineStats() if self._connection is None else self._connection.stats
        waiting = len(self._journal.at(Place.HELD, Place.QUEUED))
        return replace(now, waiting=waiting).with_counters_of(self._past)

    def _dispatch(self) -> None:
        """Send what may be sent: everything, or the next suspect alone."""
        if self._connection is None or self.state != "ready":
            return
        held = self._journal.at(Place.HELD)
        if not held or any(entry.deaths for entry in self._journal.at(Place.QUEUED, Place.STARTED)):
            return
        suspects = [entry for entry in held if entry.deaths]
        sent = suspects[:1] or held
        for entry in sent:
            entry.place = Place.QUEUED
        self._teach(self._connection, sent)
        for entry in sent:
            # In a message of its own: tensors of several could be more than one may hold.
            self._connection.send(Submit([entry.resumed()]))

    def _teach(self, connection: _Connection, sent: list[Entry]) -> None:
        """An engine that gets its first request with a grammar must know the vocabulary."""
        if connection.knows_vocabulary or self.vocabulary is None:
            return
        if any(entry.request.params.grammar for entry in sent):
            connection.send(self.vocabulary)
            connection.knows_vocabulary = True

    # Supervision.

    async def _connect(self) -> ModelInfo:
        """Launch an engine and wait until it is ready. One that is not waited for to the end is killed."""
        try:
            engine = self._launch()
        except OSError as error:
            raise EngineFault(f"No process could be started for the engine: {error}.") from error
        transport, inbox = await asyncio.get_running_loop().create_unix_connection(Inbox, sock=engine.socket)
        connection = _Connection(engine, transport, inbox)
        connection.send(Start(self.config, self.files))
        try:
            said = await self._first_word(inbox)
        except BaseException:
            engine.kill()
            await self._bury(connection)
            raise
        if isinstance(said, Ready):
            self._connection = connection
            return said.model
        raise self._start_error(said, await self._bury(connection))

    async def _first_word(self, inbox: Inbox) -> Ready | Failed | None:
        """Of an engine that starts; None: it ended without one."""
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
            # Whatever this was, no request may wait for good.
            log.exception("The engine cannot be looked after any more.")
            self._give_up(f"its supervision failed: {error}")
            if self._connection is not None:
                connection, self._connection = self._connection, None
                connection.engine.kill()
                await self._bury(connection)

    async def _keep_one_alive(self) -> None:
        while self._connection is not None:
            connection = self._connection
            watch = asyncio.create_task(self._watch(connection))
            try:
                await self._read_forever(connection)
            finally:
                watch.cancel()
            self._connection = None
            self._forsake_errands()
            self._past = connection.stats.with_counters_of(self._past)
            if self.state != "closed":
                self.state = "restarting"
            end = await self._bury(connection)
            if self.state == "closed":
                return
            self._mourn(connection.failure or f"it ended ({end})")
            await self._replace()

    async def _read_forever(self, connection: _Connection) -> None:
        try:
            while (message := await connection.inbox.read()) is not None:
                connection.heard = True
                match message:
                    case StepOutput():
                        connection.stats = message.stats
                        self._deliver(message)
                    case Started(request_ids=request_ids):
                        self._journal.started(request_ids)
                    case Heartbeat(step_seconds=seconds) if seconds > self.config.engine.step_timeout_s:
                        connection.failure = f"a step took more than {self.config.engine.step_timeout_s:.0f} s"
                        return
                    case Done(number=number) if number in self._errands:
                        _answer(self._errands.pop(number), message)
                    case Failed(kind=kind, message=text):
                        connection.failure = f"{kind}: {text}"
        except BrokenFrame as error:
            connection.failure = f"it sent what is no message: {error}"

    def _forsake_errands(self) -> None:
        for answer in self._errands.values():
            _answer(answer, Unavailable("The engine ended before it was done."))
        self._errands.clear()

    def _deliver(self, output: StepOutput) -> None:
        self._journal.record_tokens(output.tokens)
        for event in output.events:
            self._journal.record(event)
        if output.tokens or output.events:
            self._deaths_in_a_row = 0
            self._dispatch()

    async def _watch(self, connection: _Connection) -> None:
        """Count missed beats. A tick that comes late itself counts once: a busy api process blames nobody."""
        allowed = self.config.engine.heartbeat_timeout_s / TICK_SECONDS
        while connection.beats_missed < allowed:
            await asyncio.sleep(TICK_SECONDS)
            connection.beats_missed = 0 if connection.heard else connection.beats_missed + 1
            connection.heard = False
        connection.failure = f"it was silent for {self.config.engine.heartbeat_timeout_s:.0f} s"
        connection.engine.kill()

    def _mourn(self, why: str) -> None:
        """Note a death, and end the request that caused two of them."""
        self.restarts += 1
        self._deaths_in_a_row += 1
        on_trial = [entry for entry in self._journal.at(Place.STARTED) if entry.deaths]
        self._journal.engine_died()
        log.error("The engine died: %s. %d requests are open; another is started.", why, len(self._journal))
        for entry in on_trial:
            self._journal.record(
                Event(
                    request_id=entry.id,
                    finish=FinishReason.ERROR,
                    error="The engine failed twice while it worked on this request.",
                )
            )

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

    async def _bury(self, connection: _Connection) -> str:
        """Make sure that an engine is gone, and say how it ended."""
        connection.transport.close()
        try:
            end = await asyncio.to_thread(connection.engine.wait, SHUTDOWN_SECONDS)
        except asyncio.CancelledError:
            connection.engine.kill()
            raise
        if end is None:
            connection.engine.kill()
            end = await asyncio.to_thread(connection.engine.wait, SHUTDOWN_SECONDS)
        return end or "it could not be ended"


def _answer(waiting: asyncio.Future[Done], told: Done | Unavailable) -> None:
    """Unless whoever waited has gone."""
    if waiting.done():
        return
    if isinstance(told, Done):
        waiting.set_result(told)
    else:
        waiting.set_exception(told)
