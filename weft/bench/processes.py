"""Tells what the processes under this one hold. On systems that do not tell, there are none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def processes_below(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and theirs; none where the system does not tell."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from processes_below(child)


def peak_mib(pid: int) -> float:
    """Return the peak memory of a process so far."""
    return _status(pid, "VmHWM") / 1024


def own_mb(pid: int) -> float:
    """Return the memory that a process holds by itself, in megabytes; 0 when it has ended."""
    return _status(pid, "RssAnon") * 1024 / 1e6


def open_files(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def _status(pid: int, name: str) -> int:
    """Return a figure of /proc/PID/status, in KiB; 0 when the process has ended."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
