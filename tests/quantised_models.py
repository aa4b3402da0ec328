"""Tiny models with quantised weights, in the formats that are published: GPTQ and AWQ of four bits, and FP8.

The weights are rounded and packed here, by the formats' own layouts, so that an engine that reads them computes with
real quantised numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The order in which AWQ puts eight neighbours into a word."""
FP8_MAX = 448.0
FP8_BLOCK = 128


def save_quantised(model: Path, folder: Path, method: str) -> Path:
    """Copy a Hugging Face directory with its linear weights quantised by a method of METHODS."""
    shutil.copytree(model, folder)
    settings, pack = METHODS[method]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for file in folder.glob("*.safetensors"):
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            if name.endswith("_proj.weight"):
                packed = pack(tensor.float())
                tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.items()}
            else:
                tensors[name] = tensor
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight numbers of four bits, neighbours in the last dimension, into a word."""
    grouped = values.view(*values.shape[:-1], -1, 8)[..., list(order)].to(torch.int64)
    words = sum(grouped[..., at] << (4 * at) for at in range(8))
    assert isinstance(words, Tensor)
    return words.to(torch.int32) if words.max() < 2**31 else (words - (words >= 2**31) * 2**32).to(torch.int32)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers 0 to 15 of a weight, [out, in], around 8, and the scales of its groups, [out, in / GROUP]."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scales = (groups.abs().amax(dim=-1) / 7).half()
    numbers = (groups / scales.float()[..., None]).round().clamp(-8, 7) + 8
    return numbers.view_as(weight), scales


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales = _rounded(weight)
    # The stored zero is one less than the one that is meant.
    zeros = torch.full((scales.shape[1], scales.shape[0]), 7)
    return {
        "qweight": _words(numbers).T.contiguous(),
        "qzeros": _words(zeros),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def _awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales = _rounded(weight)
    zeros = torch.full((scales.shape[1], scales.shape[0]), 8)
    return {
        "qweight": _words(numbers.T.contiguous(), AWQ_ORDER),
        "qzeros": _words(zeros, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def _fp8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().max() / FP8_MAX
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_static(weight: Tensor) -> dict[str, Tensor]:
    return _fp8(weight) | {"input_scale": torch.tensor(0.5)}


def _fp8_channel(weight: Tensor) -> dict[str, Tensor]:
    scales = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _fp8_block(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // FP8_BLOCK) * FP8_BLOCK, -(-columns // FP8_BLOCK) * FP8_BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MAX
    numbers = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return {"weight": numbers.to(torch.float8_e4m3fn).contiguous(), "weight_scale_inv": scales}


METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    "gptq": (
        {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
            "checkpoint_format": "gptq",
        },
        _gptq,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_static),
    "fp8-channel": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, _fp8_channel),
    "fp8-block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
        _fp8_block,
    ),
}  # fmt: skip


def unquantised(weight: Tensor, method: str) -> Tensor:
    """Return the weight that the quantised one stands for."""
    if method == "fp8-block":
        packed = _fp8_block(weight)
        scales = packed["weight_scale_inv"].repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return packed["weight"].float() * scales[: weight.shape[0], : weight.shape[1]]
    if method.startswith("fp8"):
        packed = METHODS[method][1](weight)
        return packed["weight"].float() * packed["weight_scale"]
    numbers, scales = _rounded(weight)
    return ((numbers - 8).view(weight.shape[0], -1, GROUP) * scales.float()[..., None]).view_as(weight)
