"""Serving inside the engine process: load the model, say so, then step until told to stop."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from weft.engine.core import EngineCore
from weft.engine.wire import (
    Abort,
    BrokenFrame,
    Channel,
    ControlCall,
    Done,
    Ready,
    ResetCache,
    Shutdown,
    Start,
    Started,
    StartProfile,
    StopProfile,
    Submit,
    ToEngine,
    Vocabulary,
    step_output,
)
from weft.errors import InvalidRequest
from weft.scheduler.scheduler import Scheduler
from weft.switches import is_on
from weft.worker.worker import Worker


class Recorder:
    def __init__(self) -> None:
        self._profile: profile | None = None
        self._file = Path()

    def start(self, folder: str) -> str:
        """Begin, and return the file that the trace will be in. Raises InvalidRequest when one is being recorded, or
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
        """End, write the trace, and return its file. Raises InvalidRequest when none is being recorded."""
        if self._profile is None:
            raise InvalidRequest("No trace is being recorded.")
        ended, self._profile = self._profile, None
        ended.stop()
        ended.export_chrome_trace(str(self._file))
        return str(self._file)


QUIET_SECONDS = 0.5
"""Idle for so long, the engine has time for more than the next request."""


def serve(start: Start, line: Channel) -> None:
    worker = Worker(start.config, start.files)
    core = EngineCore(Scheduler(worker.limits), worker.runner, overlap=worker.info.device != "cpu" and is_on("overlap"))
    gc.collect()
    gc.freeze()
    line.send(Ready(worker.info))
    recorder = Recorder()
    while _drain(core, line, recorder):
        line.step_began = time.monotonic()
        events = core.step(on_start=lambda request_ids: line.send(Started(request_ids)))
        line.step_began = 0.0
        if events:
            line.send(step_output(events, core.stats()))


def _idle(core: EngineCore, line: Channel) -> ToEngine | None:
    """Wait for a message. Meanwhile prepare what makes later steps faster; then check the books."""
    if not core.prepared:
        while core.prepare():
            with contextlib.suppress(queue.Empty):
                return line.inbox.get_nowait()
        line.send(step_output([], core.stats()))
    with contextlib.suppress(queue.Empty):
        return line.inbox.get(timeout=QUIET_SECONDS)
    core.settle()
    return line.inbox.get()


def _drain(core: EngineCore, line: Channel, recorder: Recorder) -> bool:
    """Take in every message that waits; with nothing to compute, sleep until one comes. False: stop."""
    while True:
        if core.has_work:
            try:
                message = line.inbox.get_nowait()
            except queue.Empty:
                return True
        else:
            message = _idle(core, line)
        match message:
            case Submit(requests=requests):
                refused = core.submit(requests)
                if refused:
                    line.send(step_output(refused, core.stats()))
            case Vocabulary():
                core.learn(message)
            case Abort(request_ids=request_ids):
                core.abort(request_ids)
                line.send(step_output([], core.stats()))
            case Shutdown() | None:
                return False
            case ResetCache() | StartProfile() | StopProfile():
                line.send(_errand(message, core, recorder))
            case Start():
                raise BrokenFrame("a second start")


def _errand(errand: ControlCall, core: EngineCore, recorder: Recorder) -> Done:
    try:
        match errand:
            case ResetCache():
                result = str(core.forget_prompts())
            case StartProfile(folder=folder):
                result = recorder.start(folder)
            case StopProfile():
                result = recorder.stop()
    except InvalidRequest as error:
        return Done(errand.number, error=str(error))
    return Done(errand.number, result)
