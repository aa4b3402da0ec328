"""Starting vLLM as an engine of Weft's. Nothing here imports it: it lives in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from importlib.util import find_spec

from weft.backends.adapters import Adapters
from weft.backends.text_room import open_text_room
from weft.backends.vllm.arguments import refuse
from weft.backends.vllm.engine import VllmEngine
from weft.backends.vllm.kinds import ASCEND, CPU, CPU_SYNC, CUDA_ASYNC, CUDA_SYNC, Kind
from weft.backends.vllm.launch import VllmProcess
from weft.config import Config
from weft.engine.client import EngineClient
from weft.errors import ConfigError
from weft.hub.adapter_files import adapter_paths
from weft.hub.devices import Accelerator, accelerator
from weft.hub.files import ModelFiles
from weft.hub.manager import find_model
from weft.hub.memory import safe_share

log = logging.getLogger(__name__)


async def start_async(config: Config) -> VllmEngine:
    """vLLM's asynchronous engine: cuda-vllm-async, ascend-vllm or cpu-vllm, as the configuration or the machine
    says."""
    return await _start(config, _async_kind(config))


async def start_sync(config: Config) -> VllmEngine:
    """vLLM's synchronous engine: cuda-vllm."""
    return await _start(config, _sync_kind(config))


def refuse_load(config: Config, files: ModelFiles) -> None:
    """Raise what starting the engine that the configuration names would refuse."""
    refuse(config, files, _sync_kind(config) if config.backend.engine == CUDA_SYNC.name else _async_kind(config))


def _async_kind(config: Config) -> Kind:
    kinds = (CUDA_ASYNC, ASCEND, CPU)
    named = {kind.name: kind for kind in kinds}.get(config.backend.engine)
    return named or {kind.place: kind for kind in kinds}[_place(config)]


def _sync_kind(config: Config) -> Kind:
    return CPU_SYNC if _place(config) == "cpu" else CUDA_SYNC


def _place(config: Config) -> Accelerator:
    return "cpu" if config.model.device == "cpu" else accelerator()


async def _start(config: Config, kind: Kind) -> VllmEngine:
    if find_spec("vllm") is None:
        raise ConfigError(f"{kind.name} needs vLLM, which is not installed.", hint=f"Try: {kind.install}")
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    client = EngineClient(config, files, partial(VllmProcess, kind))
    opening = asyncio.create_task(asyncio.to_thread(open_text_room, files, config.model))
    try:
        await client.start()
        engine = VllmEngine(
            kind,
            client,
            await opening,
            Adapters(client.model.name, files),
            takes_adapters=config.model.wants_adapters,
            has_grammars=files.kind == "huggingface",
        )
        await engine.load_adapters(adapter_paths(config))
        return engine
    except BaseException:
        await client.close()
        raise
