"""Starting the process with vLLM in it, and ending it together with those that vLLM started."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.backends.vllm.arguments import DriverOptions, VllmKind
from weft.compile_cache import compile_cache
from weft.engine.process import engine_environment, names_a_secret

TRACKER = "multiprocessing.resource_tracker"
LAST_SECONDS = 10.0
"""The wait until killed processes have ended: the kernel takes their memory back first."""


def kill_group(group: int, *, spare: int = 0) -> bool:
    """Kill a group's processes, but for one and the tracker. False: there was none to kill."""
    victims = [pid for pid, tracks in _members(group).items() if not tracks and pid != spare]
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(victims)


def end_group(group: int, *, spare: int = 0) -> None:
    """Return when no process of the group is left, but for one, and the tracker, which outlives that."""
    deadline = time.monotonic() + LAST_SECONDS
    while (kill_group(group, spare=spare) or (not spare and _members(group))) and time.monotonic() < deadline:
        time.sleep(0.01)


def _members(group: int) -> dict[int, bool]:
    """The living processes of a group, and whether each is a tracker."""
    folders = [folder for folder in Path("/proc").glob("[0-9]*") if _is_alive_in(group, folder)]
    return {int(folder.name): _is_tracker(folder) for folder in folders}


def _is_alive_in(group: int, folder: Path) -> bool:
    """Return whether a process is alive and in the group. A zombie is not alive."""
    try:
        state, _, its_group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(its_group) == group and state != "Z"


def _is_tracker(folder: Path) -> bool:
    try:
        return TRACKER in (folder / "cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False


class VllmProcess:
    """The first of a process group."""

    def __init__(self, kind: VllmKind, passed: Sequence[str] = ()) -> None:
        """Start it. `passed` are variables of the environment that it gets beside those that it needs."""
        self._folder = tempfile.mkdtemp(prefix="weft-vllm-")
        orders = DriverOptions(kind=kind, folder=self._folder)
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "weft.backends.vllm.host",
                    msgspec.json.encode(orders).decode(),
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**vllm_environment(passed), "TMPDIR": self._folder},
                # Ctrl-C in a terminal is for the api process; vLLM's processes would end by it.
                process_group=0,
            )
        self.pid: int | None = self._process.pid

    def kill(self) -> None:
        # As long as the first process is not reaped, no other group has its number.
        if self._process.returncode is None:
            kill_group(self._process.pid)

    def wait(self, timeout_s: float) -> str | None:
        if self._process.returncode is None:
            if not self._has_ended(timeout_s):
                return None
            end_group(self._process.pid)
            shutil.rmtree(self._folder, ignore_errors=True)
        code = self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _has_ended(self, timeout_s: float) -> bool:
        """Return whether it ends in time. It is not reaped."""
        number = os.pidfd_open(self._process.pid)
        try:
            ended = select.poll()
            ended.register(number, select.POLLIN)
            return bool(ended.poll(timeout_s * 1000))
        finally:
            os.close(number)


VLLM_PREFIXES = (
    *("VLLM_", "HF_", "TRANSFORMERS_", "SAFETENSORS_", "RAY_", "GLOO_", "UCX_", "TVM_", "FLASHINFER_"),
    *("ASCEND_", "HCCL_", "MAX_JOBS"),
)


def vllm_environment(passed: Sequence[str] = ()) -> dict[str, str]:
    """Return what vLLM needs of the environment. Model code that --trust-remote-code allows can read it: a key is in it
    only where the operator passes one by its name."""
    own = {
        name: value
        for name, value in os.environ.items()
        if name in passed or (name.startswith(VLLM_PREFIXES) and not names_a_secret(name))
    }
    return {"VLLM_CACHE_ROOT": str(compile_cache() / "vllm"), **engine_environment(), **own}
