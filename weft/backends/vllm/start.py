"""Starting vLLM as an engine of Weft's. Nothing here imports it: it lives in a process of its own."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from weft.backends.native import open_engine
from weft.backends.vllm.arguments import refuse
from weft.backends.vllm.engine import VllmEngine
from weft.backends.vllm.kinds import KINDS, Kind
from weft.backends.vllm.launch import VllmProcess
from weft.config import Config
from weft.engine.client import EngineClient
from weft.hub.files import ModelFiles
from weft.hub.manager import find_model
from weft.hub.memory import safe_share

log = logging.getLogger(__name__)


async def start(config: Config) -> VllmEngine:
    """The one of vLLM's engines that the configuration names."""
    return await start_kind(config, KINDS[config.backend.engine])


def refuse_load(config: Config, files: ModelFiles) -> None:
    """Raise what starting it would refuse."""
    refuse(config, files, KINDS[config.backend.engine])


async def start_kind(config: Config, kind: Kind) -> VllmEngine:
    files = await asyncio.to_thread(find_model, config)
    refuse(config, files, kind)
    if safe_share(config.cache) != config.cache.gpu_memory_utilization:
        log.warning("--gpu-memory-utilization is lowered to %g.", safe_share(config.cache))
    make = partial(
        VllmEngine, kind, takes_adapters=config.model.wants_adapters, has_grammars=files.kind == "huggingface"
    )
    return await open_engine(EngineClient(config, files, partial(VllmProcess, kind)), make)
