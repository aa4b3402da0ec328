"""What `weft doctor` finds out about this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

_CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class Finding(Struct, frozen=True):
    name: str
    value: str
    good: bool = True


def findings() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    yield _memory()
    yield from _torch()


def memory_limit_bytes() -> int | None:
    """What the container allows; None without a limit."""
    for file in _CGROUP_MEMORY:
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _memory_bytes():
            return int(text)
    return None


def _memory() -> Finding:
    limit = memory_limit_bytes()
    text = f"{_memory_bytes() / 2**30:.1f} GiB"
    return Finding("memory", text if limit is None else f"{limit / 2**30:.1f} GiB allowed here, of {text}")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _torch() -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing: no model can run; install Weft's dependencies", good=False)
        return
    import torch

    yield Finding("torch", str(torch.__version__))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield Finding(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB")
    else:
        yield Finding("cuda", "none; models run on the CPU")
