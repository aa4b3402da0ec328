"""LoRA adapters on disk: the files that PEFT writes, and how settings name their directories."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import ConfigError
from weft.options import Config

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 64
HELD_PER_NUMBER = 2
"""Numbers, for each in its file: a weight of several parts is held with zeros where those do not meet. Of adapters that
have a query, or more parts than a key or a value alone, it is the most."""
DEFAULT_ADAPTER = "default"
"""What an adapter is called that was given without a name: that of requests that name none."""


def adapter_paths(config: Config) -> dict[str, str]:
    """What `--adapter` says: directories by name."""
    paths: dict[str, str] = {}
    for said in config.model.adapter:
        name, _, path = said.partition("=") if "=" in said else (DEFAULT_ADAPTER, "", said)
        if not name or not path or name in paths:
            raise ConfigError(f"--adapter {said}: it must be NAME=DIRECTORY, and every name another.")
        paths[name] = path
    return paths


def adapter_settings(paths: Mapping[str, str]) -> list[str]:
    """The same as `--adapter` would say it."""
    return [f"{name}={path}" for name, path in paths.items()]
