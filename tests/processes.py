"""The processes under one: an engine's parent is the fork server, whose parent is the process that serves."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.extend(int(child) for child in (task / "children").read_text().split())
    return [*found, *(one for child in found for one in descendants(child))]


def is_engine(pid: int) -> bool:
    return name_of(pid) == "weft-engine"


def is_rank(pid: int) -> bool:
    """Return whether a process is a rank of an engine, and not the first, which is the engine itself."""
    return name_of(pid) == "weft-rank"


def name_of(pid: int) -> str:
    """Return the name of a process as `ps -o comm` shows it; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def runs(pid: int) -> bool:
    """Return whether a process runs. One that has ended, and was not waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
