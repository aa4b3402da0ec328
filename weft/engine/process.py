"""The engine process: `python -m weft.engine.process FD`. It serves the api process at the other end of the
socket, dies with it, and tells it why when it cannot go on. `run_engine` is the same for a thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Protocol

from weft import logs
from weft.engine.wire import Channel, Failed, Start
from weft.errors import WeftError
from weft.machine.memory import as_out_of_memory

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def run_engine(sock: socket.socket, *, owns_process: bool = False) -> int:
    """Serve one api process, and return the exit code. An engine that owns its process ends it at
    once when the api process is gone, even in the middle of a step."""
    channel = Channel(sock)
    if owns_process:
        threading.Thread(target=_leave_when, args=(channel.closed,), name="weft-engine-watch", daemon=True).start()
    try:
        start = channel.inbox.get()
        if isinstance(start, Start):
            if owns_process:
                logs.set_up(start.config.server.log_level, form=start.config.server.log_format)
            # Only now, and only here, is torch imported: the api process knows this module and stays light.
            from weft.engine.loop import serve

            serve(start, channel)
        return 0
    except Exception as error:  # noqa: BLE001 - the api process is told of every error
        told = error if isinstance(error, WeftError) else as_out_of_memory(error)
        if told is not None:
            channel.send(Failed(type(told).__name__, told.message, told.hint))
            return 1
        log.error("The engine failed:\n%s", traceback.format_exc())
        # The rest of a CUDA error is advice for those who wrote the kernel; the log has it.
        channel.send(Failed(type(error).__name__, next(iter(str(error).splitlines()), "no message")))
        return 1
    finally:
        channel.close()


def _leave_when(closed: threading.Event) -> None:
    closed.wait()
    # The main thread may be deep in a step: a moment for an orderly end, then none.
    time.sleep(1.0)
    os._exit(1)


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logs.set_up("info")
    code = run_engine(socket.socket(fileno=int(sys.argv[1])), owns_process=True)
    logging.shutdown()
    # At once: an orderly end would wait for a GPU that may have faulted, and never answer.
    os._exit(code)


if __name__ == "__main__":
    main()


ENGINE_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""The environment that must be set before torch is imported: torch's threads sleep between operators instead of
spinning, and leave the cores to the native step; weights lie in large pages. What the operator has set is kept."""


class LaunchedEngine(Protocol):
    socket: socket.socket
    pid: int | None

    def kill(self) -> None:
        """End the process at once."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for its end, and return how it ended; None if it has not ended by then."""


class EngineProcess:
    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "weft.engine.process")) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=ENGINE_ENV | os.environ,
                # What a terminal sends to all (Ctrl-C) is the api process's to hear: this one ends with its socket.
                start_new_session=True,
            )
        self.pid: int | None = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> str | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class EngineThread:
    def __init__(self) -> None:
        self.pid: int | None = None
        self.socket, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=run_engine, args=(self._theirs,), name="weft-engine", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._theirs.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float) -> str | None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return None
        self._theirs.close()
        return "the thread ended"
