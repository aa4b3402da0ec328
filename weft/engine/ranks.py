"""The ranks of an engine: the first is the engine process itself, and starts the others, each a process of its own.

A rank that ends, or is silent for as long as an engine may be, ends the engine: nothing that is left of it could go on,
and the api process replaces all of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

import weft.errors
from weft.engine.child_process import (
    OUTSIDE_ENDS,
    end_with_parent,
    exit_text,
    is_stopped,
    name_process,
    num_oom_kills,
)
from weft.engine.plan_broadcast import PlanReader, PlanWriter
from weft.engine.wire import Channel, Failed, RankPlace, Start, frame, receive_from_rank
from weft.errors import ConfigError, EngineFault
from weft.worker.tensor_parallel import LOOPBACK, FollowingRunner, RankGroup, ToRank
from weft.worker.worker import Worker

log = logging.getLogger(__name__)

RunRank = Callable[[socket.socket], int]
"""Runs an engine process whose channel is this socket, and returns its exit code."""
END_SECONDS = 2.0
RANK_NAME = b"weft-rank"
"""The name of a rank's process in `ps -o comm` and `top`."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class ForkedRank:
    """A rank that was forked from the first one, which has imported all that it needs and computed nothing yet."""

    def __init__(self, run: RunRank, not_its_own: list[int]) -> None:
        """Fork a process that runs, without these files of the first rank's."""
        self.socket, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_rank(run, theirs, [*not_its_own, self.socket.fileno()], parent)
        theirs.close()
        self.pid = pid
        self._process = os.pidfd_open(pid)
        self._end: str | None = None

    def kill(self) -> None:
        if self._end is None:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self, timeout_s: float) -> str | None:
        if self._end is None and select.select([self._process], [], [], timeout_s)[0]:
            self._end = exit_text(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))
        return self._end


def _be_a_rank(run: RunRank, sock: socket.socket, not_its_own: list[int], parent: int) -> None:
    """Be the process of a rank, to its end."""
    code = 1
    try:
        end_with_parent()
        name_process(RANK_NAME)
        for fd in not_its_own:
            os.close(fd)
        if os.getppid() == parent:
            code = run(sock)
        logging.shutdown()
    except BaseException:  # noqa: BLE001 - nothing may return into the first rank's code
        traceback.print_exc()
    finally:
        os._exit(code)


class Ranks:
    """The other ranks as the first one sees them."""

    def __init__(self, start: Start, channel: Channel, run: RunRank | None) -> None:
        """Start the processes; they load their parts of the model while this one does."""
        if run is None or sys.platform != "linux":
            raise ConfigError(
                "--tensor-parallel-size needs an engine in a process of its own, on Linux.", hint="Leave it out."
            )
        size = start.config.backend.tensor_parallel_size
        self._channel = channel
        self._silence_s = start.config.engine.heartbeat_timeout_s
        self._oom_kills = num_oom_kills()
        self._writer = PlanWriter(size - 1)
        self._is_open = True
        self._lost = threading.Event()
        """Set when the api process was told of the first rank that was lost."""
        self._lock = threading.Lock()
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self.group = RankGroup(0, size, port, listener=listener)
        self.group.tell = self._tell
        self._engines: list[ForkedRank] = []
        for _ in range(1, size):
            theirs = [channel.fileno(), listener.fileno(), *(engine.socket.fileno() for engine in self._engines)]
            self._engines.append(ForkedRank(run, theirs))
        for rank, engine in enumerate(self._engines, start=1):
            engine.socket.sendall(frame(replace(start, rank=RankPlace(rank, size, port, self._writer.path))))
            watch = threading.Thread(target=self._watch, args=(rank, engine), name=f"weft-rank-{rank}", daemon=True)
            watch.start()

    def close(self) -> None:
        self._is_open = False
        for engine in self._engines:
            with contextlib.suppress(OSError):  # it has gone first
                engine.socket.shutdown(socket.SHUT_RDWR)
        self.group.close()

    def wait_for_loss(self) -> bool:
        """Return whether a rank was lost, after a moment in which that may be noticed: what fails here then, failed for
        that reason."""
        return self._lost.wait(END_SECONDS)

    def _tell(self, message: ToRank) -> None:
        self._writer.write(_encoder.encode(message), lambda: self._is_open and not self._lost.is_set())

    def _watch(self, rank: int, engine: ForkedRank) -> None:
        """Wait for the end of a rank, and tell the api process of it, which replaces the engine."""
        why, from_outside = "", False
        engine.socket.settimeout(self._silence_s)
        try:
            while (message := receive_from_rank(engine.socket)) is not None:
                if isinstance(message, Failed):
                    if not hasattr(weft.errors, message.kind):
                        # It may have failed because another has ended, which is heard of in a moment.
                        self._lost.wait(END_SECONDS / 2)
                    self._fail(message)
                    return
        except TimeoutError:
            from_outside = is_stopped(engine.pid)
            why = f"was silent for {self._silence_s:.0f} s{', stopped by a signal' if from_outside else ''}"
        if not self._is_open:
            return
        if not why:
            end = engine.wait(END_SECONDS) or "it closed its socket"
            from_outside = end in OUTSIDE_ENDS and num_oom_kills() == self._oom_kills
            why = f"ended ({end})"
        engine.kill()
        self._fail(Failed(EngineFault.__name__, f"rank {rank} {why}", from_outside=from_outside))

    def _fail(self, failure: Failed) -> None:
        with self._lock:
            if self._lost.is_set():
                return
            log.error("The engine ends: %s", failure.message)
            self._channel.send(failure)
            self._lost.set()
        # The process ends with its channel, whatever its main thread waits for.
        self._channel.close()


def follow(start: Start, place: RankPlace, channel: Channel) -> None:
    """Be a rank behind the first, to the end of that."""
    group = RankGroup(place.rank, place.size, place.store_port)
    worker = Worker(start.config, start.files, group)
    runner = worker.runner
    assert isinstance(runner, FollowingRunner)
    plans = PlanReader(place.plans, place.rank)
    while (message := plans.read(lambda: not channel.closed.is_set())) is not None:
        runner.follow(_decoder.decode(message))
