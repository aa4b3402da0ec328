"""All that can be known of a load without making it."""

from __future__ import annotations

from msgspec.structs import replace

from weft.backends.adapters import Adapters
from weft.backends.elsewhere import chosen_engines
from weft.backends.loading import Start, check_load
from weft.backends.registry import engine_named
from weft.backends.starting import refusal_of, start_first
from weft.backends.threads import in_daemon_thread
from weft.config import Config
from weft.hub.adapter_files import adapter_paths
from weft.hub.manager import find_model
from weft.hub.planning import HABITS

PEER_PATIENCE_S = 10.0
"""For a server that says that it is starting."""


async def check_engine(config: Config) -> None:
    """Find, fetch and check the model and its adapters, for the engine that would be started, and plan its load; load
    nothing. Raises what would keep it from being loaded."""
    await start_first(chosen_engines(config), config, _check)


async def _check(start: Start, config: Config) -> None:
    spec = engine_named(config.backend.engine)
    if spec.needs_url:
        await _check_peer(start, config)
        return
    if spec.name in HABITS:
        files = await in_daemon_thread(lambda: find_model(config))
        refusal_of(spec)(config, files)
        adapters = Adapters(config.model.served_model_name or files.name, files)
        for name, path in adapter_paths(config).items():
            adapters.add(name, adapters.checked(path))
    await check_load(config)


async def _check_peer(start: Start, config: Config) -> None:
    """Such an engine loads nothing when it starts: it finds out who answers."""
    patience_s = min(PEER_PATIENCE_S, config.engine.start_timeout_s)
    engine = await start(replace(config, engine=replace(config.engine, start_timeout_s=patience_s)))
    await engine.close()
