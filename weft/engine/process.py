"""The engine process: `python -m weft.engine.process FD`. It serves the api process at the other end of the
socket, dies with it, and tells it why when it cannot go on. `run_engine` is the same for a thread.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from weft import logs, switches
from weft.compile_cache import CPU, compile_cache_environment
from weft.compile_cache import VARIABLE as COMPILE_CACHE
from weft.engine.child_process import end_with_parent, exit_text
from weft.engine.fork_server import ForkCommand, shared_fork_server
from weft.engine.wire import Channel, Failed, Start
from weft.errors import WeftError
from weft.machine.memory import as_out_of_memory

log = logging.getLogger(__name__)


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

            serve(start, channel, partial(run_engine, owns_process=True) if owns_process else None)
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
    end_with_parent()
    logs.set_up("info")
    code = run_engine(socket.socket(fileno=int(sys.argv[1])), owns_process=True)
    logging.shutdown()
    # At once: an orderly end would wait for a GPU that may have faulted, and never answer.
    os._exit(code)


ENGINE_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
"""The environment that must be set before torch is imported: torch's threads sleep between operators instead of
spinning, and leave the cores to the native step; weights lie in large pages. What the operator has set is kept."""
ENGINE_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("CC", "CXX", "CPATH", "LIBRARY_PATH", "WEFT_HOME", switches.VARIABLE, switches.SHARED_GPU),
)
ENGINE_PREFIXES = (
    *("LC_", "LD_", "DYLD_", "PYTHON", "XDG_", "COVERAGE_", "MALLOC_", "GLIBC_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "NUMBA_", "TORCH_", "PYTORCH_", "ATEN_", "THP_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "TRITON_", "HIP_", "ROCR_", "HSA_"),
)

SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
"""Words in the names of variables that hold secrets, as in NVIDIA_API_KEY."""


def engine_environment() -> dict[str, str]:
    """Return what an engine needs of the environment. The rest may hold keys."""
    needed = {
        name: value
        for name, value in os.environ.items()
        if name in ENGINE_VARIABLES or (name.startswith(ENGINE_PREFIXES) and not names_a_secret(name))
    }
    return ENGINE_ENV | compile_cache_environment() | needed


def names_a_secret(variable: str) -> bool:
    return any(word in variable for word in SECRETS)


class LaunchedEngine(Protocol):
    socket: socket.socket

    @property
    def pid(self) -> int | None:
        """Its process id; None if it has none, or none yet."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self, timeout_s: float) -> str | None:
        """Wait for its end, and return how it ended; None if it has not ended by then."""


class EngineProcess:
    """An engine process with a command of its own."""

    def __init__(self, *command: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=engine_environment(),
                # What a terminal sends to all (Ctrl-C) is the api process's to hear: this one ends with its socket.
                start_new_session=True,
            )
        self.pid: int | None = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> str | None:
        try:
            return exit_text(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None


def launch_engine(module: str = __name__, *arguments: str) -> LaunchedEngine:
    """Launch an engine process that runs `module.main()`: a fork of the fork server's where that can be. Other systems
    than Linux cannot tell a process to end with its parent, and their libraries do not bear a fork."""
    environment = engine_environment()
    server = shared_fork_server(environment) if sys.platform == "linux" else None
    if server is not None:
        return server.fork(ForkCommand(module, arguments, environment.get(switches.VARIABLE, "")))
    return EngineProcess(sys.executable, "-c", f"from {module} import main; main()", *arguments)


def expect_launch(*, on_cpu: bool = False) -> None:
    """Start what engine processes are forked from: it imports torch while this process does other things. On a CPU
    for which no kernels were compiled yet, these are compiled meanwhile."""
    environment = engine_environment()
    if on_cpu and not any(Path(environment[COMPILE_CACHE], CPU).iterdir()):
        _compile_for_cpu(environment[COMPILE_CACHE])
    if sys.platform == "linux":
        shared_fork_server(environment)


@cache
def _compile_for_cpu(folder: str) -> None:
    """Compile the kernels for this CPU into a folder, in another process. The engine says what keeps them from being
    compiled: it does not find them then, and tries itself."""
    compiling = subprocess.Popen(
        [sys.executable, "-m", "weft.kernels.cpu.compiled"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=engine_environment() | {COMPILE_CACHE: folder},
        start_new_session=True,
    )
    threading.Thread(target=compiling.wait, name="weft-compiling", daemon=True).start()


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


if __name__ == "__main__":
    main()
