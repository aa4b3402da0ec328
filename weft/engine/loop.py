"""Serving inside the engine process: load the model, say so, then step until told to stop."""

from __future__ import annotations

import contextlib
import gc
import queue
import time

from weft.engine.core import EngineCore
from weft.engine.line import Line
from weft.engine.wire import Abort, BrokenFrame, Ready, Shutdown, Start, Started, Submit, ToEngine, output
from weft.scheduler.scheduler import Scheduler
from weft.switches import is_on
from weft.worker.worker import Worker

QUIET_SECONDS = 0.5
"""Idle for so long, the engine has time for more than the next request."""


def serve(start: Start, line: Line) -> None:
    worker = Worker(start.config, start.files)
    core = EngineCore(Scheduler(worker.limits), worker.runner, overlap=worker.info.device != "cpu" and is_on("overlap"))
    gc.collect()
    gc.freeze()
    line.send(Ready(worker.info))
    while _drain(core, line):
        line.step_began = time.monotonic()
        events = core.step(on_start=lambda request_ids: line.send(Started(request_ids)))
        line.step_began = 0.0
        if events:
            line.send(output(events, core.stats()))


def _idle(core: EngineCore, line: Line) -> ToEngine | None:
    """Wait for a message. Meanwhile prepare what makes later steps faster; then check the books."""
    if not core.prepared:
        while core.prepare():
            with contextlib.suppress(queue.Empty):
                return line.inbox.get_nowait()
        line.send(output([], core.stats()))
    with contextlib.suppress(queue.Empty):
        return line.inbox.get(timeout=QUIET_SECONDS)
    core.settle()
    return line.inbox.get()


def _drain(core: EngineCore, line: Line) -> bool:
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
                    line.send(output(refused, core.stats()))
            case Abort(request_ids=request_ids):
                core.abort(request_ids)
                line.send(output([], core.stats()))
            case Shutdown() | None:
                return False
            case Start():
                raise BrokenFrame("a second start")
