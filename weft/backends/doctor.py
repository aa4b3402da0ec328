"""What `weft doctor` finds out about this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.util import find_spec

from msgspec import Struct

from weft.backends.registry import list_engines
from weft.hub.hardware import Machine, Memory, inspect_machine
from weft.hub.memory import GIB


class Finding(Struct, frozen=True):
    name: str
    value: str
    good: bool = True


def findings() -> Iterator[Finding]:
    machine = inspect_machine()
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from machine_findings(machine)
    yield from _torch(machine)
    for engine in list_engines():
        state = "can be used with --engine-url" if engine.needs_url else "can be used"
        yield Finding(f"engine {engine.name}", state if engine.available else engine.why_not, good=engine.available)


def machine_findings(machine: Machine) -> Iterator[Finding]:
    cpu = machine.cpu
    yield Finding("cores", f"{cpu.usable_cores} usable of {cpu.cores}")
    yield Finding("features", ", ".join(cpu.features) or "none that Weft knows")
    yield from _memory(machine.memory)
    for device in machine.devices:
        size = f"{device.free / GIB:.1f} GiB free of {device.total / GIB:.1f}" if device.total else "memory not known"
        yield Finding(f"{device.kind}:{device.index}", f"{device.name}, {size}", good=device.total > 0)
    if not machine.devices_of("cuda"):
        yield Finding("cuda", "none; models run on the CPU")


def _memory(memory: Memory) -> Iterator[Finding]:
    yield Finding("memory", f"{memory.free / GIB:.1f} GiB free of {memory.total / GIB:.1f}")
    for limit in memory.limits:
        size = f"{limit.free / GIB:.1f} GiB free of {limit.limit / GIB:.1f}"
        yield Finding("memory limit", f"{size}, by {limit.set_by}", good=limit.free > 0)


def _torch(machine: Machine) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing: no model can run; install Weft's dependencies", good=False)
        return
    import torch

    can_use = torch.cuda.is_available() or not machine.devices_of("cuda")
    yield Finding("torch", f"{torch.__version__}{'' if can_use else ', which cannot use the GPU'}", good=can_use)
