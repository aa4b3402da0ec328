"""Processes for tests that do not try how a process starts: forks of one in which everything is imported already.

A server of the command line imports for four seconds before it answers: the front end, and torch in its fork server.
Here it is a fork of a process that has imported both, which is itself a fork of the worker's fork server
(weft/engine/fork_server.py). The fork server of a forked server is one more fork.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from tests.waiting import PATIENCE, wait_until
from weft.engine import fork_server
from weft.engine.child_process import name_process
from weft.engine.fork_server import ForkCommand, ForkServer, shared_fork_server
from weft.engine.process import engine_environment

WEFT = "weft.__main__"
IMPORTED = (
    *(WEFT, "weft.api.server", "weft.backends.native", "weft.cli.chat_session", "tests.api.serve_scripted"),
    *("httpcore", "openai.resources.chat.chat"),
)
"""What servers, commands and programs of the documentation import."""
MAX_BYTES = 1 << 18


class Process(Struct, frozen=True):
    """Asks for a process that runs `module.main()`, or the program of this file. With it come its stdout and its
    stderr."""

    module: str
    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    stdin: str


class Forked:
    """A fork, with what tests ask of a `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        stdin: Path,
        output: tuple[int, int] | None = None,
    ) -> None:
        """`stdin`: a terminal becomes that of the process. `output`: the files of its stdout and its stderr, where
        they are not read here."""
        pipes = (os.pipe(), os.pipe()) if output is None else ()
        self.stdout, self.stderr = (
            (io.TextIOWrapper(io.FileIO(ours)) for ours, _ in pipes) if pipes else (io.StringIO(), io.StringIO())
        )
        self._fork = _front_end().fork(ForkCommand(__name__, ("run",)))
        asked = msgspec.json.encode(Process(module, tuple(words), dict(environment), str(folder), str(stdin)))
        with self._fork.socket as sock:
            socket.send_fds(sock, [asked], output or [theirs for _, theirs in pipes])
        for _, theirs in pipes:
            os.close(theirs)

    @property
    def pid(self) -> int:
        wait_until(lambda: self._fork.pid is not None, "the fork's process id")
        assert self._fork.pid is not None
        return self._fork.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return _exit_code(self._fork.wait(0))

    def wait(self, timeout: float) -> int:
        code = _exit_code(self._fork.wait(timeout))
        assert code is not None, f"it has not ended after {timeout} s"
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._fork.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Read what it says to its end."""
        said = self.stdout.read(), self.stderr.read()
        self.wait(timeout)
        return said

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait(PATIENCE)


def start(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    stdin: Path = Path(os.devnull),
) -> Forked | subprocess.Popen[str]:
    """Start a process that runs a module or a program, as a fork where that can be, in a folder or in this process's
    own."""
    folder = folder or Path.cwd()
    if can_fork():
        return Forked(module, words, environment, folder, stdin)
    command = [sys.executable, *(() if _is_program(module) else ("-m",)), module, *words]
    with stdin.open() as reads:
        return subprocess.Popen(
            command,
            stdin=reads, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(environment), cwd=folder,
        )  # fmt: skip


def weft(*words: str, environment: Mapping[str, str], **how: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of Weft to its end."""
    return run(WEFT, *words, environment=environment, **how)


def run(module: str, *words: str, environment: Mapping[str, str], **how: Path) -> subprocess.CompletedProcess[str]:
    """Run a module or a program to its end."""
    with start(module, words, environment, **how) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE)
        return subprocess.CompletedProcess(words, process.wait(PATIENCE), stdout, stderr)


def _is_program(module: str) -> bool:
    return module.endswith(".py")


def _exit_code(end: str | None) -> int | None:
    if end is None:
        return None
    killed = re.fullmatch("killed by (SIG[A-Z0-9]+)", end)
    return -signal.Signals[killed[1]] if killed else int(end.removeprefix("exit code "))


class _FrontEnd(ForkServer):
    """A fork server that has imported the front end as well, forked from the worker's own."""

    def __init__(self, below: ForkServer) -> None:
        self.below = below
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fork = below.fork(ForkCommand(__name__, ("serve",)))
        with theirs, self._fork.socket as sock:
            socket.send_fds(sock, [b"-"], [theirs.fileno()])
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        return self._fork.wait(0) is None

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        self._fork.close()


_shared: _FrontEnd | None = None


def can_fork() -> bool:
    """Return whether a test asks, and a fork is as good as a process that starts now: its modules have read the
    environment already."""
    in_pytest = sys.platform == "linux" and "PYTEST_VERSION" in os.environ
    return in_pytest and shared_fork_server(engine_environment()) is not None


def _front_end() -> _FrontEnd:
    global _shared
    below = shared_fork_server(engine_environment())
    assert below is not None, "ask can_fork first"
    if _shared is not None and not (_shared.below is below and _shared.is_alive):
        _shared.close()
        _shared = None
    _shared = _shared or _FrontEnd(below)
    return _shared


# The forks' own side.


def main() -> None:
    what, number = sys.argv[1:]
    name_process(b"weft-test-fork")
    with socket.socket(fileno=int(number)) as sock:
        data, fds, _, _ = socket.recv_fds(sock, MAX_BYTES, 2)
    if what == "serve":
        for module in IMPORTED:
            import_module(module)
        fork_server.serve(socket.socket(fileno=fds[0]))
        os._exit(0)
    _run(msgspec.json.decode(data, type=Process), fds)


def _run(process: Process, fds: list[int]) -> NoReturn:
    """Be the process, to its end."""
    for fd, stream in zip(fds, (sys.stdout, sys.stderr), strict=True):
        os.dup2(fd, stream.fileno())
        os.close(fd)
        stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(process.environment)
    os.chdir(process.folder)
    os.dup2(os.open(process.stdin, os.O_RDONLY), sys.stdin.fileno())
    _Inherited.spare = _Spare()
    fork_server.ForkServer = _Inherited
    sys.argv = [process.module, *process.words]
    code: Any = 0
    try:
        if _is_program(process.module):
            runpy.run_path(process.module, run_name="__main__")
        else:
            import_module(process.module).main()
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    threading._shutdown()
    atexit._run_exitfuncs()
    os._exit(code or 0)


class _Spare:
    """A fork server in waiting: forked before the process has threads."""

    def __init__(self) -> None:
        self.environment = engine_environment()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            os.setsid()
            os.environ.clear()
            os.environ.update(self.environment)
            fork_server.serve(theirs)
            os._exit(0)
        theirs.close()
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = status if pid else None
        return self._status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)


class _Inherited(ForkServer):
    """A process's fork server: the one in waiting, then new ones."""

    spare: _Spare | None = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        spare, _Inherited.spare = _Inherited.spare, None
        if spare is None or spare.environment != environment:
            super().__init__(environment)
            return
        self._reads_at_import = (fork_server._read_at_import(environment), Path.cwd())
        self._socket, self._process = spare.socket, spare
        self._has_forked = True  # it has imported all, and hears of its end
        atexit.register(self.close)
