"""Starting an engine and ending it: as a process, or as a thread of this process for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

from weft.engine.process import run_engine

ENGINE_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""What the engine process needs before torch is imported: torch's threads sleep between its operators instead of
spinning, and leave the cores to the native step; weights lie in large pages. What the operator has set is kept."""


class LaunchedEngine(Protocol):
    socket: socket.socket
    pid: int | None

    def kill(self) -> None:
        """End it at once."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for its end and say how it ended; None if it has not ended by then."""


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
