"""Starting vLLM as an engine of Weft's. Nothing here imports it: it lives in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec

from weft.backends.text_room import open_text_room
from weft.backends.vllm.adapters import Adapters
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


async def start_async(config: Config, adapters: Mapping[str, str] | None = None) -> VllmEngine:
    """vLLM's asynchronous engine: cuda-vllm-async, ascend-vllm or cpu-vllm, as the configuration or the machine says.

    `adapters`: LoRA directories by the names that requests give; None: vLLM is started without room for any.
    """
    kinds = (CUDA_ASYNC, ASCEND, CPU)
    named = {kind.name: kind for kind in kinds}.get(config.backend.engine)
    return await _start(config, named or {kind.place: kind for kind in kinds}[_place(config)], adapters)


async def start_sync(config: Config, adapters: Mapping[str, str] | None = None) -> VllmEngine:
    """vLLM's synchronous engine: cuda-vllm."""
    return await _start(config, CPU_SYNC if _place(config) == "cpu" else CUDA_SYNC, adapters)


def _place(config: Config) -> Accelerator:
    return "cpu" if config.model.device == "cpu" else accelerator()


async def _start(config: Config, kind: Kind, adapters: Mapping[str, str] | None) -> VllmEngine:
    if find_spec("vllm") is None:
        raise ConfigError(f"{kind.name} needs vLLM, which is not installed.", hint=f"Try: {kind.install}")
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    table = None if adapters is None else Adapters(adapters)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    client = EngineClient(config, files, partial(VllmProcess, kind, with_adapters=table is not None))
    opening = asyncio.create_task(asyncio.to_thread(open_text_room, files, config.model))
    try:
        await client.start()
        return VllmEngine(kind, client, await opening, table, has_grammars=files.kind == "huggingface")
    except BaseException:
        await client.close()
        raise
