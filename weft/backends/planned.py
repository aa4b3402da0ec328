"""What `weft plan` shows: the plan of a load that is not made."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from weft.backends.registry import engines_in_order, obstacle
from weft.config import Config
from weft.errors import ConfigError
from weft.hub.devices import Device
from weft.hub.files import dummy_files
from weft.hub.hardware import Machine, Memory, inspect_machine
from weft.hub.memory import GIB
from weft.hub.planning import HABITS, Plan, plan_load
from weft.hub.resolve import resolve


def planned(config: Config, memory_gib: float = 0) -> Plan:
    """For the engine that would be taken here, and this machine, or one whose device has so much memory and nothing in
    it. Nothing is fetched."""
    model = config.model
    if model.load_format == "dummy":
        files = dummy_files(Path(model.model))
    else:
        files = resolve(model.model, model.revision, allow_pull=False, progress=False)
    engine, machine = _engine(config), inspect_machine()
    if memory_gib:
        machine = _pretended(machine, config, engine, int(memory_gib * GIB))
    return plan_load(config, files, machine, engine=engine)


def _engine(config: Config) -> str:
    specs = [spec for spec in engines_in_order(config.backend.engine, config.model.device) if spec.name in HABITS]
    if not specs:
        raise ConfigError(
            f"--engine {config.backend.engine} holds no model on this machine, so there is nothing to plan.",
            hint=f"There are plans for: {', '.join(HABITS)}.",
        )
    return next((spec.name for spec in specs if not obstacle(spec, config)), specs[0].name)


def _pretended(machine: Machine, config: Config, engine: str, size: int) -> Machine:
    place = HABITS[engine].place or config.model.device
    if place == "cpu" or (place == "auto" and not machine.devices_of("cuda")):
        return replace(machine, memory=Memory(total=size, free=size), devices=())
    kind: Literal["cuda", "ascend"] = "ascend" if place == "ascend" else "cuda"
    name = f"{'an NPU' if kind == 'ascend' else 'a GPU'} of {size / GIB:g} GiB"
    device = Device(kind=kind, index=0, name=name, total=size, free=size)
    return replace(machine, devices=(device,) * config.backend.tensor_parallel_size)
