"""A shortage that nobody foresaw: the engine process runs into it, and it arrives as what it is."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from weft.backends.native import start_native
from weft.backends.safe_loading import load_safely
from weft.engine.process import launch_engine
from weft.errors import OutOfMemory
from weft.machine.hardware import Cpu, Machine, Memory
from weft.machine.memory import GIB
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions

ROOMY = Machine(cpu=Cpu(cores=2, usable_cores=2, features=()), memory=Memory(total=64 * GIB, free=64 * GIB))


def test_it_arrives_by_its_type_and_is_tried_with_less(tiny_model: Path) -> None:
    """A MemoryError, in another process."""
    config = Config(
        model=ModelOptions(model=str(tiny_model), image_model="none", device="cpu", dtype="bfloat16"),
        cache=CacheOptions(kv_cache_memory_mb=8192),
        backend=BackendOptions(engine="native"),
    )
    start = partial(start_native, launch=partial(launch_engine, "tests.backends.short_engine", str(3 * GIB)))

    async def try_it() -> None:
        with pytest.raises(OutOfMemory, match="Unable to allocate"):
            await start(config)
        engine = await load_safely(start, config, machine=lambda: ROOMY)
        await engine.close()
        assert engine.model.memory.kv <= 512 * 2**20

    asyncio.run(try_it())
