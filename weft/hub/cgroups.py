"""The control groups that this process is in, of both versions, as files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class _Mount(NamedTuple):
    inside: PurePosixPath
    """What of the hierarchy is seen there: a container may see its own part of it only."""
    point: Path
    controllers: frozenset[str]
    """Of version 1; version 2 has all in one hierarchy."""
    is_unified: bool


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of a controller's groups: the one that this process is in, then those around it, as far as can be
    seen. A limit of any of them holds."""
    groups = _own_groups(root)
    for mount in _mounts(root):
        if mount.is_unified:
            own = groups.get("")
        elif controller in mount.controllers:
            own = groups.get(controller)
        else:
            continue
        if own is None:
            continue
        folder = mount.point
        # A group outside what is mounted is not seen: what is mounted stands for it.
        if own.is_relative_to(mount.inside) and ".." not in own.parts:
            folder = mount.point / own.relative_to(mount.inside)
        yield folder
        while folder != mount.point:
            folder = folder.parent
            yield folder


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """By controller; version 2's has none."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = PurePosixPath(path)
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        about, _, kind = line.partition(" - ")
        file_system, _, options = kind.split(" ", 2)
        if file_system in ("cgroup", "cgroup2"):
            _, _, _, inside, point, *_ = about.split(" ")
            yield _Mount(
                PurePosixPath(inside),
                root / point.lstrip("/"),
                frozenset(options.split(",")),
                file_system == "cgroup2",
            )


def _lines(file: Path) -> list[str]:
    """None where there is no such file: not every system has control groups."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
