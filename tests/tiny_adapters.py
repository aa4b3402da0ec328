"""LoRA adapters for the tiny models, as PEFT writes them, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny_models import save_directory, state

EVERY_PART = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def modules(name: str, parts: tuple[str, ...] = EVERY_PART) -> list[str]:
    """The linear layers of a tiny model that end so."""
    weights = [tensor.removesuffix(".weight") for tensor in state(name) if tensor.endswith("_proj.weight")]
    return [module for module in weights if module.rsplit(".", 1)[1] in parts]


def adapter_config(**changes: Any) -> dict[str, Any]:
    """As PEFT 0.17 writes it, of the keys that matter and some that do not."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": list(EVERY_PART),
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "exclude_modules": None,
    } | changes


def lora_tensors(
    name: str, seed: int, *, rank: int = 4, parts: tuple[str, ...] = EVERY_PART, size: float = 0.3
) -> dict[str, Tensor]:
    """Both matrices of every module, neither of them zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules(name, parts):
        rows, columns = state(name)[f"{module}.weight"].shape
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * size
    return tensors


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def save_adapter(name: str, folder: Path, seed: int = 1, **tensors: Any) -> Path:
    parts = tensors.get("parts", EVERY_PART)
    config = adapter_config(r=tensors.get("rank", 4), target_modules=list(parts))
    return write_adapter(folder, config, lora_tensors(name, seed, **tensors))


def save_merged(name: str, folder: Path, tensors: dict[str, Tensor], scale: float) -> Path:
    """The model's directory with the adapter in its weights: W + scale * B A."""
    save_directory(name, folder)
    merged = {tensor: weight.double() for tensor, weight in state(name).items()}
    for module in {tensor.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for tensor in tensors}:
        a, b = (tensors[f"{PREFIX}{module}.lora_{which}.weight"].double() for which in "AB")
        merged[f"{module}.weight"] += scale * b @ a
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    save_file({tensor: weight.float() for tensor, weight in merged.items()}, folder / "model.safetensors")
    return folder
