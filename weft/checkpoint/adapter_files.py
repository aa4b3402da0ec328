"""The files of LoRA adapters as PEFT writes them, and how settings name their directories."""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import ConfigError
from weft.options import Config

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 64
HELD_PER_NUMBER = 2
"""Numbers in memory for each number in the file: a weight of several parts is stored with zeros where the parts do not
meet. It is the maximum for adapters that have a query, or more parts than a key or a value alone."""
DEFAULT_ADAPTER = "default"
"""The name of an adapter that was given without one: requests that name no adapter use it."""


def adapter_paths(config: Config) -> dict[str, str]:
    """Return the directories of `--adapter` by name."""
    paths: dict[str, str] = {}
    for said in config.model.adapter:
        name, _, path = said.partition("=") if "=" in said else (DEFAULT_ADAPTER, "", said)
        if not name or not path or name in paths:
            raise ConfigError(f"--adapter {said}: it must be NAME=DIRECTORY, with different names.")
        paths[name] = path
    return paths


def adapter_settings(paths: Mapping[str, str]) -> list[str]:
    """Write directories by name as `--adapter` takes them."""
    return [f"{name}={path}" for name, path in paths.items()]
