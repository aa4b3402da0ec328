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
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "weft-engine\n"
    except FileNotFoundError:
        return False
