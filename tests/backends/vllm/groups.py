"""Looking at process groups."""

from __future__ import annotations

from pathlib import Path


def group_of(pid: int) -> dict[int, str]:
    """The living processes of a group, by id, with what they are called."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(") ", 1)
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, _, group = rest.split()[:3]
            if int(group) == pid and state != "Z":
                found[int(folder.name)] = name
    return found
