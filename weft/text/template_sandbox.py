"""Starts, asks and ends the process that renders a chat template.

A template comes out of a model file and is hostile until shown otherwise. Inside this process it could not be
stopped: raising into a thread waits for the next bytecode, so `'a' * 10**10`, `9**9**9` or one sort of a long list
would hold the interpreter or its memory, and a list of what to forbid is never complete. A process of its own is
bounded by the kernel instead (memory, files), and killed by the clock.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from msgspec import Struct

_START_SECONDS = 30.0
_BUSY_MACHINE = 10
"""How many times longer by the clock than the process computes an answer may take."""
_CHILD = Path(__file__).with_name("template_sandbox_child.py")


class TemplateLimits(Struct, frozen=True, kw_only=True):
    """The resources that one template may use."""

    render_seconds: float = 1.0
    """Seconds of CPU time, not by the clock; the same for compile_seconds."""
    compile_seconds: float = 2.0
    max_output_chars: int = 4 * 2**20
    max_source_chars: int = 2**18
    memory_bytes: int = 2**29


class RenderTimeout(Exception):
    """The process did not answer in time; it is dead now."""


class RenderDied(Exception):
    """The process ended without an answer."""


def to_line(message: object) -> bytes:
    """Encode JSON on one line. Raises TypeError, ValueError or RecursionError for what JSON cannot hold."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


class RenderProcess:
    """The child process. After RenderTimeout or RenderDied it has ended, and another must be started."""

    def __init__(self, source: str, limits: TemplateLimits) -> None:
        self._max_reply_bytes = 8 * limits.max_output_chars + 2**20
        self._socket, child_socket = socket.socketpair()
        with child_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                stdin=child_socket.fileno(),
                stdout=child_socket.fileno(),
                # Ctrl-C in a terminal reaches the server, which ends this process; it must not reach both.
                start_new_session=True,
                env=sandbox_environment(),
            )
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)
        self._receive(time.monotonic() + _START_SECONDS)
        settings = {
            "source": source,
            "memory_bytes": limits.memory_bytes,
            "max_output_chars": limits.max_output_chars,
            "render_seconds": limits.render_seconds,
            "compile_seconds": limits.compile_seconds,
            "alarm_seconds": math.ceil(_BUSY_MACHINE * max(limits.render_seconds, limits.compile_seconds)) + 1,
        }
        self.compiled: dict[str, Any] = self.ask(to_line(settings), limits.compile_seconds)
        """The child's answer to the source: `declared`, or `error` and `message`."""

    def ask(self, line: bytes, work_seconds: float) -> dict[str, Any]:
        patience = _BUSY_MACHINE * work_seconds
        deadline = time.monotonic() + patience
        try:
            self._socket.settimeout(patience)
            self._socket.sendall(line)
        except TimeoutError as error:
            self.end()
            raise RenderTimeout from error
        except OSError as error:
            self.end()
            raise RenderDied from error
        return self._receive(deadline)

    def end(self) -> None:
        self._finalizer()

    def _receive(self, deadline: float) -> dict[str, Any]:
        reply = bytearray()
        try:
            while not reply.endswith(b"\n"):
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                received = self._socket.recv(2**16)
                if not received or len(reply) > self._max_reply_bytes:
                    self.end()
                    raise RenderTimeout if self._process.returncode == -signal.SIGPROF else RenderDied
                reply += received
        except TimeoutError as error:
            self.end()
            raise RenderTimeout from error
        except OSError as error:
            self.end()
            raise RenderDied from error
        try:
            answer: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        except ValueError as error:
            self.end()
            raise RenderDied from error
        return answer


def sandbox_environment() -> dict[str, str]:
    """Return the environment that Python needs to start, and the time zone. Other variables may hold keys."""
    kept = {name: os.environ[name] for name in ("TZ", "PYTHONHOME", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **kept}


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    process.wait()
