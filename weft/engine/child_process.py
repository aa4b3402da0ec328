"""A child process of Weft ends with its parent, and the parent can tell how a child ended and by whose hand."""

from __future__ import annotations

import ctypes
import re
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Let this process be the parent of its descendants whose own parent has ended, instead of process 1, which in a
    container may be one that waits for none of them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: bytes) -> None:
    """Name this process, of 15 bytes at most, as `ps -o comm` and `top` show it."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name)


def exit_text(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


OUTSIDE_ENDS = frozenset(exit_text(-number) for number in (signal.SIGKILL, signal.SIGTERM))
"""The ends of processes that others ended: one that fails by itself ends with another signal, or with a code."""


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory so far; 0 where it does not tell."""
    try:
        told = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(told[1]) if told else 0


def is_stopped(pid: int | None) -> bool:
    """Return whether a process was stopped by a signal, as nothing that it computes can do."""
    try:
        # Its name, in brackets before the state, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
