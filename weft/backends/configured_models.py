"""The models of a registry file, as a server is given them: what each needs of the memory, and how it is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from weft.backends.contract import Engine, FreeMemory, Need, StageReport
from weft.backends.failover import start_engine
from weft.backends.preflight import check_engine
from weft.backends.registry import engine_names, engines_in_order, obstacle
from weft.backends.safe_loading import LoadStage, Start, load_safely, plan_safely
from weft.backends.starting import are_elsewhere, without_servers_own
from weft.config import nearest
from weft.errors import ConfigError, OutOfMemory, WeftError, shortened
from weft.hub.resolve import resolve
from weft.machine.hardware import inspect_machine
from weft.machine.memory import GIB
from weft.machine.planner import MEMORY_PROFILES
from weft.models_file import ModelRegistry, models_source
from weft.options import Config, ModelEntry, ModelOptions


class Checked(Struct, frozen=True):
    """The result of `--check-models` for one model."""

    name: str
    place: str
    fault: str
    """Empty: none."""


class ModelsFromFile:
    def __init__(self, config: Config) -> None:
        """Raises ConfigError that names every mistake in the file, and for settings that do not go with one."""
        self._config = config
        if config.model.served_model_name:
            raise ConfigError(
                "--served-model-name and --models-file are both set.", hint="Models are called as the file says."
            )
        self._registry = ModelRegistry(models_source(config.model_pool.models_file), config, engines=engine_names())
        for name in (*config.model_pool.preload, *self._asked):
            if name not in self.entries:
                raise ConfigError(
                    f"There is no model {name!r} in {shortened(config.model_pool.models_file)}.",
                    hint=nearest(name, self.entries),
                )
        self.memory_limit = _limit_bytes(config.model_pool.max_models_memory)

    @property
    def _asked(self) -> list[str]:
        """The model that was named beside the file; --model's own default says nothing, unless the file has it."""
        model = self._config.model.model
        return [] if model == ModelOptions().model and model not in self._registry.entries else [model]

    @property
    def entries(self) -> Mapping[str, ModelEntry]:
        preload = {*self._config.model_pool.preload, *self._asked}
        return {
            name: replace(entry, config=self._settings_of(entry), preload=entry.preload or name in preload)
            for name, entry in self._registry.entries.items()
        }

    def _settings_of(self, entry: ModelEntry) -> Config:
        specs = engines_in_order(entry.config.backend.engine, entry.config.model.device)
        return without_servers_own(entry.config, self._config) if are_elsewhere(specs) else entry.config

    @property
    def default(self) -> str:
        return next(
            (name for name in self._asked if name in self._registry.entries), next(iter(self._registry.entries))
        )

    def refresh(self) -> bool:
        return self._registry.refresh()

    def reload(self) -> None:
        self._registry.reload()

    def fault(self, entry: ModelEntry) -> str:
        model = entry.config.model
        if model.load_format == "dummy" or not Path(model.model).expanduser().exists():
            return ""
        try:
            resolve(model.model, model.revision, allow_pull=False, progress=False)
        except WeftError as error:
            return str(error)
        return ""

    async def need(self, entry: ModelEntry, report: StageReport) -> Need:
        config = entry.config
        specs = engines_in_order(config.backend.engine, config.model.device)
        engine = next((spec.name for spec in specs if not obstacle(spec, config)), "")
        if engine not in MEMORY_PROFILES:
            return Need()
        own = replace(config, backend=replace(config.backend, engine=engine))
        plan = await plan_safely(own, report=_heard(report))
        if plan is None:
            return Need()
        problem = "" if plan.problem is None else str(plan.problem)
        return Need(num_bytes=plan.needed_bytes, libraries=plan.memory.libraries, problem=problem)

    async def start(self, entry: ModelEntry, report: StageReport, make_room: FreeMemory) -> Engine:
        async def load(start: Start, config: Config) -> Engine:
            while True:
                try:
                    return await load_safely(start, config, report=_heard(report))
                except OutOfMemory as error:
                    if not await make_room(error.message):
                        raise

        return await start_engine(entry.config, load)

    async def check(self) -> list[Checked]:
        """Find, fetch and check every model, and plan its load; one after the other."""
        return [Checked(entry.name, entry.place, await _fault_of(entry)) for entry in self.entries.values()]


async def _fault_of(entry: ModelEntry) -> str:
    try:
        await check_engine(entry.config)
    except WeftError as error:
        return str(error)
    return ""


def _heard(report: StageReport) -> Callable[[LoadStage], None]:
    def hear(stage: LoadStage) -> None:
        counted = f" {stage.done / GIB:.1f} of {stage.total / GIB:.1f} GiB" if stage.total else ""
        report(f"{stage.stage}{counted}")

    return hear


def _limit_bytes(asked: str) -> int:
    """Return the bytes of a number of GiB, or of a share of the memory that models are in: the GPUs', or the
    machine's."""
    if not asked.endswith("%"):
        return int(float(asked or 0) * GIB)
    machine = inspect_machine()
    total = sum(device.total for device in machine.devices) or machine.memory.total
    return int(total * float(asked.removesuffix("%")) / 100)
