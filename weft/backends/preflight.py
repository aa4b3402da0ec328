"""The checks of a load that can be made without loading."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.registry import engine_named, engines_in_order, list_engines, obstacle
from weft.backends.safe_loading import Start, check_load, in_daemon_thread
from weft.backends.starting import chosen_engines, refusal_of, start_first
from weft.checkpoint.adapter_files import adapter_paths
from weft.checkpoint.model_files import ModelFiles
from weft.engine.fork_server import DeferredImports
from weft.errors import ConfigError
from weft.hub.resolve import find_model
from weft.machine.devices import Device
from weft.machine.hardware import Machine, Memory, inspect_machine
from weft.machine.memory import GIB
from weft.machine.planner import MEMORY_PROFILES, Plan, plan_load
from weft.options import Config

PEER_PATIENCE_S = 10.0
"""How long a server is waited for that says that it is starting."""


async def check_engine(config: Config) -> None:
    """Find, fetch and check the model and its adapters, for the engine that would be started, and plan its load; load
    nothing. Raises what would keep it from being loaded."""
    await start_first(chosen_engines(config), config, _check)


async def _check(start: Start, config: Config) -> None:
    spec = engine_named(config.backend.engine)
    if spec.needs_url:
        await _check_peer(start, config)
        return
    if spec.name in MEMORY_PROFILES:
        files = await in_daemon_thread(lambda: find_model(config))
        refusal_of(spec)(config, files)
        adapters = Adapters(config.model.served_model_name or files.name, files)
        for name, path in adapter_paths(config).items():
            adapters.add(name, adapters.checked(path))
    await check_load(config)


async def _check_peer(start: Start, config: Config) -> None:
    """Start an engine that loads nothing, which finds out whether its server answers, and close it."""
    patience_s = min(PEER_PATIENCE_S, config.engine.start_timeout_s)
    engine = await start(replace(config, engine=replace(config.engine, start_timeout_s=patience_s)))
    await engine.close()


class Finding(Struct, frozen=True):
    name: str
    value: str
    good: bool = True


def findings() -> Iterator[Finding]:
    machine = inspect_machine()
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from machine_findings(machine)
    yield from _torch(machine)
    yield _numba()
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


def import_torch() -> ModuleType:
    """Import torch for a command that computes nothing, without what tracing and training need."""
    DeferredImports().import_torch()
    return import_module("torch")


def _torch(machine: Machine) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield Finding("torch", "missing: no model can run; install Weft's dependencies", good=False)
        return
    torch = import_torch()
    can_use = torch.cuda.is_available() or not machine.devices_of("cuda")
    yield Finding("torch", f"{torch.__version__}{'' if can_use else ', which cannot use the GPU'}", good=can_use)


def _numba() -> Finding:
    try:
        version = import_module("numba").__version__
    except ImportError as error:  # also of one that does not fit the NumPy that is there
        why = f"{error}: CPUs compute with torch's kernels, which are slower; pip install numba"
        return Finding("numba", why, good=False)
    return Finding("numba", f"{version}, which compiles the CPU's kernels")


def files_here(config: Config) -> ModelFiles:
    """Return the files of the model, where they are on this machine; nothing is fetched. Raises ModelError."""
    return find_model(config, allow_pull=False)


def planned(config: Config, files: ModelFiles, memory_gib: float = 0) -> Plan:
    """Return a plan for the engine that would be taken here, and this machine, or one whose device has so much memory
    and nothing in it. Raises what that engine would refuse."""
    engine, machine = _engine(config), inspect_machine()
    refusal_of(engine_named(engine))(replace(config, backend=replace(config.backend, engine=engine)), files)
    if memory_gib:
        machine = _pretended(machine, config, engine, int(memory_gib * GIB))
    return plan_load(config, files, machine, engine=engine)


def _engine(config: Config) -> str:
    specs = [
        spec for spec in engines_in_order(config.backend.engine, config.model.device) if spec.name in MEMORY_PROFILES
    ]
    if not specs:
        raise ConfigError(
            f"--engine {config.backend.engine} holds no model on this machine, so there is nothing to plan.",
            hint=f"There are plans for: {', '.join(MEMORY_PROFILES)}.",
        )
    return next((spec.name for spec in specs if not obstacle(spec, config)), specs[0].name)


def _pretended(machine: Machine, config: Config, engine: str, size: int) -> Machine:
    place = MEMORY_PROFILES[engine].place or config.model.device
    if place == "cpu" or (place == "auto" and not machine.devices_of("cuda")):
        return replace(machine, memory=Memory(total=size, free=size), devices=())
    kind: Literal["cuda", "ascend"] = "ascend" if place == "ascend" else "cuda"
    name = f"{'an NPU' if kind == 'ascend' else 'a GPU'} of {size / GIB:g} GiB"
    device = Device(kind=kind, index=0, name=name, total=size, free=size)
    return replace(machine, devices=(device,) * config.backend.tensor_parallel_size)
