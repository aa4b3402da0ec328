"""The loop of the engine process: it loads the model, says so, and steps until it is told to stop."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import queue
import time
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from weft.engine.core import EngineCore
from weft.engine.ranks import Ranks, RunRank, follow
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    Channel,
    ControlCall,
    Done,
    PrefixDigests,
    Ready,
    Shutdown,
    Start,
    Started,
    StepOutput,
    Submit,
    ToEngine,
    Vocabulary,
)
from weft.errors import InvalidRequest, WeftError
from weft.scheduler.prefix_digests import PublishedKeys
from weft.scheduler.scheduler import Scheduler
from weft.switches import is_on
from weft.types import ReadBlocks, ResetPrefixCache, StartProfile, StopProfile
from weft.worker.worker import Worker


class Recorder:
    """The recorder writes traces of the engine's steps with torch's profiler, one at a time."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._file = Path()

    def start(self, folder: str) -> str:
        """Begin a trace, and return the file that it will be in. Raises InvalidRequest when one is being recorded, or
        when the folder cannot be written to."""
        if self._profile is not None:
            raise InvalidRequest("A trace is being recorded already.")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"There can be no traces in the folder: {error.strerror}.") from error
        self._file = Path(folder) / f"weft-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()
        return str(self._file)

    def stop(self) -> str:
        """Write the trace, and return its file. Raises InvalidRequest when none is being recorded."""
        if self._profile is None:
            raise InvalidRequest("No trace is being recorded.")
        ended, self._profile = self._profile, None
        ended.stop()
        ended.export_chrome_trace(str(self._file))
        return str(self._file)


STATS_SECONDS = 0.25
"""The api process is told how the engine stands at least so often, while it computes."""
QUIET_SECONDS = 0.5
"""After so long without work the engine checks its books."""


PUBLISH_SECONDS = 0.25
"""Changes of the prefix cache are told at most so often."""


class DigestPublisher:
    """The publisher tells the api process what changes in the prefix cache, if that asked for it."""

    def __init__(self, core: EngineCore, channel: Channel, *, is_on: bool) -> None:
        self._keys: PublishedKeys | None = core.scheduler.prefixes.publish() if is_on else None
        self._channel = channel
        self._published_at = 0.0
        if is_on:
            channel.send(PrefixDigests(reset=True))

    @property
    def due_in(self) -> float | None:
        """Return the seconds until there is something to publish; None: nothing has changed."""
        return max(0.0, self._published_at + PUBLISH_SECONDS - time.monotonic()) if self._keys else None

    def publish_if_due(self) -> None:
        if self.due_in == 0.0:
            self.publish()

    def publish(self) -> None:
        if self._keys:
            added, removed = self._keys.take()
            self._channel.send(PrefixDigests(reset=False, added=added, removed=removed))
            self._published_at = time.monotonic()


def serve(start: Start, channel: Channel, run_rank: RunRank | None = None) -> None:
    """Load the model and serve one api process until it says Shutdown or is gone; or follow the first rank so long.
    Processes of other ranks call `run_rank`; None: there can be none."""
    if start.rank is not None:
        follow(start, start.rank, channel)
        return
    if start.config.backend.tensor_parallel_size == 1:
        serve_model(start, Worker(start.config, start.files), channel)
        return
    ranks = Ranks(start, channel, run_rank)
    try:
        serve_model(start, Worker(start.config, start.files, ranks.group), channel)
    except WeftError:
        raise
    except Exception:
        # The api process was told of a lost rank already.
        if not ranks.wait_for_loss():
            raise
    finally:
        ranks.close()


def serve_model(start: Start, worker: Worker, channel: Channel) -> None:
    """Say that the model is loaded, and step until the end."""
    overlap = worker.info.device != "cpu" and is_on("overlap")
    core = EngineCore(Scheduler(worker.limits), worker.runner, overlap=overlap, memory=worker.memory)
    gc.collect()
    gc.freeze()
    _return_freed_memory()
    channel.send(Ready(worker.info, core.stats()))
    recorder = Recorder()
    publisher = DigestPublisher(core, channel, is_on=start.publishes_digests)
    told = 0.0
    while _drain(core, channel, recorder, publisher):
        channel.step_began = time.monotonic()
        brought = core.step(on_start=lambda request_ids: channel.send(Started(request_ids, core.stats())))
        # The steps of a long prompt bring nothing before the last of them.
        if brought or channel.step_began - told > STATS_SECONDS:
            told = channel.step_began
            channel.send(StepOutput(brought.tokens, brought.events, core.stats()))
        channel.step_began = 0.0
        publisher.publish_if_due()


def _return_freed_memory() -> None:
    """Give back what loading the model has freed. glibc would keep it for later."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
        ctypes.CDLL(None).malloc_trim(0)


def _idle(
    core: EngineCore, channel: Channel, publisher: DigestPublisher, *, is_settled: bool
) -> tuple[ToEngine | None, bool]:
    """Wait for a message. Meanwhile prepare what makes later steps faster; then check the books, unless they are
    settled already. Return the message, and whether they are."""
    if (due_in := publisher.due_in) is not None:
        with contextlib.suppress(queue.Empty):
            return channel.inbox.get(timeout=due_in), False
        publisher.publish()
    if not core.prepared:
        while core.prepare():
            with contextlib.suppress(queue.Empty):
                return channel.inbox.get_nowait(), False
        channel.send(StepOutput({}, [], core.stats()))
    if not is_settled:
        with contextlib.suppress(queue.Empty):
            return channel.inbox.get(timeout=QUIET_SECONDS), False
        core.settle()
    return channel.inbox.get(), True


def _drain(core: EngineCore, channel: Channel, recorder: Recorder, publisher: DigestPublisher) -> bool:
    """Take in every message that waits; with nothing to compute, sleep until one comes. Return False to stop."""
    is_settled = False
    while True:
        if core.has_work:
            try:
                message = channel.inbox.get_nowait()
            except queue.Empty:
                return True
        else:
            message, is_settled = _idle(core, channel, publisher, is_settled=is_settled)
            is_settled = is_settled and isinstance(message, ControlCall) and isinstance(message.message, ReadBlocks)
        match message:
            case Submit(requests=requests):
                refused = core.submit(requests)
                if refused:
                    channel.send(StepOutput({}, refused, core.stats()))
            case Vocabulary():
                core.learn(message)
            case Abort(request_ids=request_ids):
                core.abort(request_ids)
                channel.send(StepOutput({}, [], core.stats()))
            case Shutdown() | None:
                return False
            case ControlCall():
                channel.send(_carry_out(message, core, recorder))
            case Start():
                raise BrokenFrame("a second start")


def _carry_out(call: ControlCall, core: EngineCore, recorder: Recorder) -> Done:
    try:
        match call.message:
            case ResetPrefixCache():
                result = str(core.reset_prefix_cache())
            case StartProfile(folder=folder):
                result = recorder.start(folder)
            case StopProfile():
                result = recorder.stop()
            case ReadBlocks(first, num_cells, blocks_per_cell):
                cells = core.scheduler.pool.cells(first, num_cells, blocks_per_cell)
                result = msgspec.json.encode(cells).decode()
    except InvalidRequest as error:
        return Done(call.number, error=str(error))
    return Done(call.number, result)
