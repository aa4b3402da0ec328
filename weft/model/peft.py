"""What PEFT writes beside an adapter's tensors: which modules it is for, of what rank, and with what scale.

What this cannot express, or would compute otherwise than PEFT, is refused: an adapter is served as it was trained, or
not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from weft.errors import ModelError
from weft.hub.adapter_files import CONFIG_FILE
from weft.hub.jsonfile import read_object

UNSUPPORTED = (
    "use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Keys that must be false, empty, or absent."""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Of init_lora_weights: the others change the model's own weights too."""
V = TypeVar("V")


class LoraConfig(Struct, frozen=True, kw_only=True):
    """The keys of adapter_config.json that say what is added where."""

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: list[str] | str
    use_rslora: bool = False
    bias: str = "none"
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def rank(self, module: str) -> int:
        return _for_module(self.rank_pattern or {}, module, self.r)

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        return _for_module(self.alpha_pattern or {}, module, self.lora_alpha) / (
            math.sqrt(rank) if self.use_rslora else rank
        )

    def adapts(self, module: str, layer: int) -> bool:
        """Whether a linear layer of the decoder is to be adapted."""
        layers = self.layers_to_transform
        chosen = [layers] if isinstance(layers, int) else layers
        if chosen and not isinstance(self.target_modules, str) and layer not in chosen:
            return False
        if self.exclude_modules is not None and _names(self.exclude_modules, module):
            return False
        return self.target_modules == "all-linear" or _names(self.target_modules, module)


def read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_FILE
    facts = read_object(path)
    try:
        config = msgspec.convert(facts, LoraConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}.") from error
    if config.peft_type != "LORA":
        raise ModelError(f"{path}: peft_type is {config.peft_type!r}; only LORA is supported.")
    for key in UNSUPPORTED:
        if facts.get(key):
            raise ModelError(f"{path}: {key} is {facts[key]!r:.200}, which is not supported.")
    if config.bias != "none":
        raise ModelError(f"{path}: bias is {config.bias!r}; only 'none' is supported.")
    start = facts.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise ModelError(f"{path}: init_lora_weights is {start!r:.200}: it changes the model's own weights.")
    _check_numbers(config, path)
    return config


def _check_numbers(config: LoraConfig, path: Path) -> None:
    ranks: dict[str, Any] = {"r": config.r, **(config.rank_pattern or {})}
    alphas = {"lora_alpha": config.lora_alpha, **(config.alpha_pattern or {})}
    for key, value in (*ranks.items(), *alphas.items()):
        if not 0 < value < math.inf:
            raise ModelError(f"{path}: {key} is {value}; it must be above 0.")
    patterns = [*(config.rank_pattern or {}), *(config.alpha_pattern or {})]
    patterns += [key for key in (config.target_modules, config.exclude_modules) if isinstance(key, str)]
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(f"{path}: {pattern!r} is no regular expression: {error}.") from error


def _for_module(patterns: Mapping[str, V], module: str, default: V) -> V:
    """The value of the first pattern that ends a module's name."""
    found = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _names(modules: list[str] | str, module: str) -> bool:
    """A regular expression for the whole name, or several ends of names."""
    if isinstance(modules, str):
        return re.fullmatch(modules, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in modules)
