"""Starting vLLM as an engine of Weft's. Nothing here imports it: it lives in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from importlib.util import find_spec

from weft.backends.native import open_engine
from weft.backends.vllm.arguments import refuse
from weft.backends.vllm.engine import VllmEngine
from weft.backends.vllm.kinds import ASCEND, CPU, CPU_SYNC, CUDA_ASYNC, CUDA_SYNC, Kind
from weft.backends.vllm.launch import VllmProcess
from weft.config import Config
from weft.engine.client import EngineClient
from weft.errors import ConfigError
from weft.hub.devices import Accelerator, accelerator
from weft.hub.manager import find_model
from weft.hub.memory import safe_share

log = logging.getLogger(__name__)


async def start_async(config: Config) -> VllmEngine:
    """vLLM's asynchronous engine: cuda-vllm-async, ascend-vllm or cpu-vllm, as the configuration or the machine
    says."""
    kinds = (CUDA_ASYNC, ASCEND, CPU)
    named = {kind.name: kind for kind in kinds}.get(config.backend.engine)
    return await _start(config, named or {kind.place: kind for kind in kinds}[_place(config)])


async def start_sync(config: Config) -> VllmEngine:
    """vLLM's synchronous engine: cuda-vllm."""
    return await _start(config, CPU_SYNC if _place(config) == "cpu" else CUDA_SYNC)


def _place(config: Config) -> Accelerator:
    return "cpu" if config.model.device == "cpu" else accelerator()


async def _start(config: Config, kind: Kind) -> VllmEngine:
    if find_spec("vllm") is None:
        raise ConfigError(f"{kind.name} needs vLLM, which is not installed.", hint=f"Try: {kind.install}")
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    make = partial(
        VllmEngine, kind, takes_adapters=config.model.wants_adapters, has_grammars=files.kind == "huggingface"
    )
    return await open_engine(EngineClient(config, files, partial(VllmProcess, kind)), make)
