"""Ending a process group with all that it holds.

Python's processes share memory through segments that outlive them. A process of theirs, the resource tracker, removes
the segments when the last of them has ended, however that came: so it is the only one that is not killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

TRACKER = "multiprocessing.resource_tracker"
LAST_SECONDS = 10.0
"""For what was killed to end: the kernel takes its memory back first."""


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
    """One that has ended, and is waited for by nobody, is not alive."""
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
