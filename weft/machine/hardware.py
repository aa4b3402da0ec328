"""Describes this machine: cores and their features, memory and its limits, GPUs and NPUs.

Everything is read from the kernel's files. `root` is where they are looked for: `/` except in tests.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec import Struct

from weft.machine.devices import ROOT, Device, ascend_devices, cuda_devices


class MemoryGauge:
    """Reads how much memory is in use (allocated and reserved bytes), but not more often than four times a second."""

    def __init__(self, read: Callable[[], tuple[int, int]]) -> None:
        self._read = read
        self._usage = (0, 0)
        self._read_at = -math.inf

    def now(self) -> tuple[int, int]:
        if time.monotonic() - self._read_at > GAUGE_SECONDS:
            self._usage = self._read()
            self._read_at = time.monotonic()
        return self._usage


GAUGE_SECONDS = 0.25


def resident_bytes(pid: int, root: Path = ROOT) -> int:
    """Return the memory that a process has now; 0 where it has ended, or the kernel does not tell."""
    lines = _lines(root / f"proc/{pid}/statm")
    return int(lines[0].split()[1]) * os.sysconf("SC_PAGE_SIZE") if lines else 0


class _Mount(NamedTuple):
    inside: PurePosixPath
    """The part of the hierarchy that is visible there: a container may see its own part of it only."""
    point: Path
    controllers: frozenset[str]
    """The controllers of version 1; version 2 has all in one hierarchy."""
    is_unified: bool


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Return the folders of a controller's groups: the one that this process is in, then those around it, as far as
    they are visible. The limit of each of them holds."""
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
        # A group outside the mount is not visible: the mount stands for it.
        if own.is_relative_to(mount.inside) and ".." not in own.parts:
            folder = mount.point / own.relative_to(mount.inside)
        yield folder
        while folder != mount.point:
            folder = folder.parent
            yield folder


def _own_groups(root: Path) -> dict[str, PurePosixPath]:
    """Return this process's groups by controller; version 2's has none."""
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
    """Return the lines of a file; none where there is no such file, because not every system has control groups."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


FEATURES = (
    "asimd", "asimddp", "sve", "sve2", "bf16", "i8mm",
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
)  # fmt: skip
"""The features of a core that matter to matrix products."""


class Cpu(Struct, frozen=True, kw_only=True):
    cores: int
    usable_cores: int
    """Cores that affinity and the quotas of control groups leave, rounded up."""
    features: tuple[str, ...]


class MemoryLimit(Struct, frozen=True, kw_only=True):
    """A limit below the machine's memory. All sizes are in bytes."""

    set_by: str
    """The file of a control group, or the name of a process's limit."""
    limit: int
    used: int
    """Memory in use, without the page cache, which the kernel takes back when it is needed."""

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


class Memory(Struct, frozen=True, kw_only=True):
    total: int
    free: int
    """Free memory of the machine, with caches that can be given up."""
    limits: tuple[MemoryLimit, ...] = ()

    @property
    def available(self) -> int:
        """Return how much this process may still take."""
        return min([self.free, *(limit.free for limit in self.limits)])

    @property
    def allowed(self) -> int:
        """Return how much this process may take in all."""
        return min([self.total, *(limit.limit for limit in self.limits)])


class Machine(Struct, frozen=True, kw_only=True):
    cpu: Cpu
    memory: Memory
    devices: tuple[Device, ...] = ()

    def devices_of(self, kind: str) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == kind)


def inspect_machine(root: Path = ROOT) -> Machine:
    return Machine(cpu=read_cpu(root), memory=read_memory(root), devices=(*cuda_devices(root), *ascend_devices(root)))


# The CPU.


def read_cpu(root: Path = ROOT) -> Cpu:
    text = _read(root / "proc/cpuinfo")
    known = [set(line.split(":", 1)[1].split()) for line in text.splitlines() if line.startswith(("flags", "Features"))]
    common = set[str].intersection(*known) if known else set()
    cores = len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or os.cpu_count() or 1
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(root / "proc/self/status"), re.MULTILINE)
    usable = min([cores, *([_listed(allowed[1])] if allowed else []), *map(math.ceil, _cpu_quotas(root))])
    features = tuple(name for name in FEATURES if name in common)
    return Cpu(cores=cores, usable_cores=max(1, usable), features=features)


def _listed(ranges: str) -> int:
    """Count the numbers in a list such as 0-3,8."""
    pairs = (part.split("-") for part in ranges.split(","))
    return sum(int(pair[-1]) - int(pair[0]) + 1 for pair in pairs)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the quota of each control group that has one, in cores."""
    for folder in cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


# Memory.


def read_memory(root: Path = ROOT) -> Memory:
    sizes = _kilobytes(root / "proc/meminfo")
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = sizes.get("MemTotal", pages)
    limits = (*_cgroup_limits(root), *_process_limits(root))
    return Memory(
        total=total,
        free=sizes.get("MemAvailable", sizes.get("MemFree", total)),
        limits=tuple(limit for limit in limits if limit.limit < total),
    )


def _cgroup_limits(root: Path) -> Iterator[MemoryLimit]:
    for folder in cgroup_folders(root, "memory"):
        for limit_file, used_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(line.split()[:2] for line in _read(folder / "memory.stat").splitlines())
                cached = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
                set_by = "/" + str((folder / limit_file).relative_to(root))
                yield MemoryLimit(set_by=set_by, limit=int(limit), used=max(0, int(used) - cached))


def _process_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits that `ulimit` has set for this process and its children."""
    limits, used = _read(root / "proc/self/limits"), _kilobytes(root / "proc/self/status")
    for title, name, held in (
        ("Max data size", "RLIMIT_DATA", "VmData"),
        ("Max address space", "RLIMIT_AS", "VmSize"),
    ):
        match = re.search(rf"^{title}\s+(\d+)", limits, re.MULTILINE)
        if match:
            yield MemoryLimit(set_by=name, limit=int(match[1]), used=used.get(held, 0))


def oom_kills(root: Path = ROOT) -> int:
    """Count the processes that the kernel has ended for lack of memory: in this process's control group where that
    counts them, else on the whole machine."""
    for folder in cgroup_folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            match = re.search(r"^oom_kill (\d+)", _read(folder / name), re.MULTILINE)
            if match:
                return int(match[1])
    match = re.search(r"^oom_kill (\d+)", _read(root / "proc/vmstat"), re.MULTILINE)
    return int(match[1]) if match else 0


def _kilobytes(file: Path) -> dict[str, int]:
    """Return the sizes in a file of lines such as `MemTotal: 1024 kB`, in bytes."""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", _read(file), re.MULTILINE)}


def _read(file: Path) -> str:
    """Read a file; empty where there is none, because kernels differ in what they offer."""
    try:
        return file.read_text()
    except OSError:
        return ""
