"""Settings that are for a model on this machine, and mean nothing to a server of its own that is elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from weft.backends.registry import EngineSpec, engines_in_order
from weft.config import Config, Setting, settings
from weft.errors import ConfigError

HELD_HERE = {
    "revision", "load_format", "image_model", "device", "dtype", "threads", "quantization", "tensor_parallel_size",
    *(setting.name for setting in settings("cache", "scheduler")),
}  # fmt: skip


def chosen_engines(config: Config) -> tuple[EngineSpec, ...]:
    """Those that a configuration names, in order. Raises ConfigError for a setting that none of them can honour: where
    one of several holds the model here, it is for that one."""
    specs = engines_in_order(config.backend.engine, config.model.device)
    if are_elsewhere(specs):
        for setting, value in _held_here(config):
            # No image model is what there is.
            if (setting.name, value) != ("image_model", "none"):
                raise ConfigError(
                    f"{specs[0].name} does not know {setting.flag} ({value}).",
                    hint="Set it where the server at --engine-url is started, or leave it away.",
                )
    return specs


def are_elsewhere(specs: Sequence[EngineSpec]) -> bool:
    return all(spec.needs_url for spec in specs)


def without_servers_own(config: Config, server: Config) -> Config:
    """What a server sets for models on its machine does not concern one that is elsewhere: only its own settings do."""
    for setting, value in _held_here(config):
        section = getattr(config, setting.section)
        if value == getattr(getattr(server, setting.section), setting.name):
            config = replace(config, **{setting.section: replace(section, **{setting.name: setting.default})})
    return config


def _held_here(config: Config) -> Iterator[tuple[Setting, object]]:
    """Of these settings, those that say something."""
    for setting in settings("model", "backend", "cache", "scheduler"):
        value = getattr(getattr(config, setting.section), setting.name)
        if setting.name in HELD_HERE and value != setting.default:
            yield setting, value
