"""Reads a LoRA adapter from a directory that PEFT wrote, and lays it out as the decoder's weights are: projections
fused, rotary pairs neighbours, scales included.

Adapters are in Hugging Face's layout whatever file the model itself came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.checkpoint.adapter_files import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_PATTERN_CHARACTERS,
    WEIGHTS_FILE,
    is_name,
    module_pattern,
)
from weft.checkpoint.json_file import read_object
from weft.errors import ModelError
from weft.kernels.weights import AdaptedLayer, AdapterWeights, LowRank
from weft.model.dense import DenseConfig
from weft.model.loader import HUGGINGFACE_NAMES, pairs_from_halves
from weft.model.shard import COLUMNS_CUT, WHOLE, Shard

UNSUPPORTED = (
    "use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
"""Keys that must be false, empty, or absent."""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the model's own weights unchanged."""
V = TypeVar("V")


class LoraConfig(Struct, frozen=True, kw_only=True):
    """The keys of adapter_config.json that Weft uses."""

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
        """Return whether a linear layer of the decoder is adapted."""
        layers = self.layers_to_transform
        chosen = [layers] if isinstance(layers, int) else layers
        if chosen and not isinstance(self.target_modules, str) and layer not in chosen:
            return False
        if self.exclude_modules is not None and _names(self.exclude_modules, module):
            return False
        return self.target_modules == "all-linear" or _names(self.target_modules, module)


def read_config(folder: Path) -> LoraConfig:
    path = folder / CONFIG_FILE
    facts = read_object(path, MAX_CONFIG_BYTES)
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
    _check_patterns(config, path)
    return config


def _check_numbers(config: LoraConfig, path: Path) -> None:
    ranks: dict[str, Any] = {"r": config.r, **(config.rank_pattern or {})}
    alphas = {"lora_alpha": config.lora_alpha, **(config.alpha_pattern or {})}
    for key, value in (*ranks.items(), *alphas.items()):
        if not 0 < value < math.inf:
            raise ModelError(f"{path}: {key} is {value}; it must be above 0.")


def _check_patterns(config: LoraConfig, path: Path) -> None:
    patterns = {key for key in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})) if not is_name(key)}
    patterns |= {key for key in (config.target_modules, config.exclude_modules) if isinstance(key, str)}
    if (size := sum(map(len, patterns))) > MAX_PATTERN_CHARACTERS:
        raise ModelError(f"{path}: patterns of {size} characters; at most {MAX_PATTERN_CHARACTERS} are read.")
    for pattern in patterns:
        try:
            module_pattern(pattern)
        except ModelError as error:
            raise ModelError(f"{path}: {error.message}", hint=error.hint) from error


def _for_module(patterns: Mapping[str, V], module: str, default: V) -> V:
    """Return the value of the first pattern that ends a module's name."""
    return next((value for pattern, value in patterns.items() if _ends(pattern, module)), default)


def _ends(pattern: str, module: str) -> bool:
    if is_name(pattern):
        return module == pattern or module.endswith(f".{pattern}")
    return module_pattern(pattern).ends(module)


def _names(modules: list[str] | str, module: str) -> bool:
    """Return whether `modules`, a pattern or a list of name endings, names a module."""
    if isinstance(modules, str):
        return module_pattern(modules).matches(module)
    return any(module == end or module.endswith(f".{end}") for end in modules)


PREFIX = "base_model.model."
FUSED = {"qkv": ("q", "k", "v"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The parts of each weight of a layer, in the order of their rows."""


class LoraPart(NamedTuple):
    """The low-rank weights of one of the model's own linear layers."""

    shrink: Tensor
    expand: Tensor


def read_adapter(folder: Path, config: DenseConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> AdapterWeights:
    """Read an adapter for a model, or a shard's part of it, to the host's memory; ModelError for one that is damaged,
    of another model, or of a kind that is not supported."""
    lora = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file.", hint="Adapters are read from safetensors alone.")
    try:
        with safe_open(path, framework="pt") as opened:
            return _AdapterReader(path, opened, lora, config, dtype, shard).adapter()
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: no readable safetensors file: {error}.") from error


class _AdapterReader:
    """The reader checks and reads the tensors of one adapter."""

    def __init__(
        self, path: Path, opened: Any, lora: LoraConfig, config: DenseConfig, dtype: torch.dtype, shard: Shard
    ) -> None:
        self.shard = shard
        self.path = path
        self.opened = opened
        self.lora = lora
        self.config = config
        self.dtype = dtype
        self.unread = set(opened.keys())
        heads, hidden, middle = config.heads, config.hidden_size, config.intermediate_size
        self.shapes = {
            "q": (heads.q_size, hidden),
            "k": (heads.kv_size // 2, hidden),
            "v": (heads.kv_size // 2, hidden),
            "output": (hidden, heads.q_size),
            "gate": (middle, hidden),
            "up": (middle, hidden),
            "down": (hidden, middle),
        }
        """Outputs and inputs of the model's own layers."""

    def adapter(self) -> AdapterWeights:
        if not self.unread:
            raise ModelError(f"{self.path}: there are no tensors.")
        layers = [
            AdaptedLayer(**{name: self.fused(parts, i) for name, parts in FUSED.items()})
            for i in range(self.config.num_layers)
        ]
        if self.unread:
            raise ModelError(
                f"{self.path}: {min(self.unread)!r} is for no linear layer of this model's decoder, or is none that "
                "the configuration names."
            )
        return AdapterWeights(layers)

    def fused(self, parts: tuple[str, ...], layer: int) -> LowRank | None:
        found = [self.part(name, layer) for name in parts]
        read = [part for part in found if part is not None]
        if not read:
            return None
        expand = (
            torch.empty(self.shapes[name][0], 0, dtype=self.dtype)[self.cut(name)[0]] if part is None else part.expand
            for name, part in zip(parts, found, strict=True)
        )
        return LowRank(torch.cat([part.shrink for part in read]), tuple(expand))

    def part(self, name: str, layer: int) -> LoraPart | None:
        module = HUGGINGFACE_NAMES[name].format(layer).removesuffix(".weight")
        if not self.lora.adapts(module, layer):
            return None
        rows, columns = self.shapes[name]
        rank, (own_rows, own_columns) = self.lora.rank(module), self.cut(name)
        shrink = self.tensor(f"{PREFIX}{module}.lora_A.weight", (rank, columns))[:, own_columns]
        expand = self.tensor(f"{PREFIX}{module}.lora_B.weight", (rows, rank), self.lora.scale(module))[own_rows]
        if name in ("q", "k"):
            expand = pairs_from_halves(expand, self.config.head_dim)
        return LoraPart(shrink, expand)

    def cut(self, name: str) -> tuple[slice, slice]:
        """Return the rows and columns of a layer that the shard has."""
        first, stop, _ = self.shard.range_of(name, self.config)
        own, every = slice(first, stop), slice(None)
        return (every, own) if name in COLUMNS_CUT else (own, every)

    def tensor(self, name: str, shape: tuple[int, int], scale: float = 1.0) -> Tensor:
        if name not in self.unread:
            raise ModelError(f"{self.path}: there is no tensor {name!r}.")
        self.unread.discard(name)
        # The shape first: a tensor that is too large is not read.
        found = tuple(self.opened.get_slice(name).get_shape())
        if found != shape:
            raise ModelError(f"{self.path}: the tensor {name!r} has the shape {found}; this model needs {shape}.")
        tensor: Tensor = self.opened.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{self.path}: the tensor {name!r} is of {tensor.dtype}, which is not a floating-point type."
            )
        scaled = (tensor.float() * scale).to(self.dtype)
        if not bool(scaled.isfinite().all()):
            raise ModelError(f"{self.path}: the tensor {name!r} has values that are not numbers, or too large.")
        return scaled
