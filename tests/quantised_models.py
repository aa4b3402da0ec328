"""Tiny models with quantised weights, in the formats that are published: GPTQ, AWQ and compressed-tensors of four bits,
compressed-tensors of int8, FP8, and the block formats of GGUF.

The weights are rounded and packed here, by the formats' own layouts, so that an engine that reads them computes with
real quantised numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
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


class Int4(NamedTuple):
    """A way to quantise to four bits."""

    layout: str
    """gptq, gptq_v2, awq or pack-quantized."""
    group: int = GROUP
    """Columns that share a scale; 0 for all, as where they cannot be divided."""
    zeros: bool = False
    """True for zeros of their own, else 8."""
    in_order: bool = True
    """False where columns of a group are anywhere."""


class Numbers(NamedTuple):
    numbers: Tensor
    """[out, in], 0 to 15."""
    scales: Tensor
    """[out, groups]."""
    zeros: Tensor
    group_of: Tensor
    """[in]."""


def _rounded(weight: Tensor, how: Int4) -> Numbers:
    rows, columns = weight.shape
    size = how.group if how.group and columns % how.group == 0 else columns
    group_of = torch.arange(columns) // size
    if not how.in_order:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    sorted_columns = torch.argsort(group_of, stable=True)
    groups = weight[:, sorted_columns].view(rows, -1, size)
    zeros = torch.full(groups.shape[:2], 8)
    scales = (groups.abs().amax(dim=-1) / 7).half()
    if how.zeros:
        scales = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
        # GPTQ cannot store 0.
        zeros = (-groups.amin(-1) / scales.float()).round().clamp(1, 15).long()
    numbers = torch.empty_like(weight)
    shifted = (groups / scales.float()[..., None]).round() + zeros[..., None]
    numbers[:, sorted_columns] = shifted.clamp(0, 15).view(rows, -1)
    return Numbers(numbers, scales, zeros, group_of)


def _int4(how: Int4, weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros, group_of = _rounded(weight, how)
    by_column = {} if how.in_order else {"weight_g_idx": group_of.int()}
    if how.layout == "pack-quantized":
        packed = {"weight_packed": _words(numbers), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        own = {"weight_zero_point": _words(zeros.T.contiguous()).T.contiguous()} if how.zeros else {}
        return packed | own | by_column
    if how.layout == "awq":
        return {
            "qweight": _words(numbers.T.contiguous(), AWQ_ORDER),
            "qzeros": _words(zeros.T.contiguous(), AWQ_ORDER),
            "scales": scales.T.contiguous(),
        }
    # In the older layout the stored zero is one less than the one that is meant.
    stored = zeros - 1 if how.layout == "gptq" else zeros
    return {
        "qweight": _words(numbers).T.contiguous(),
        "qzeros": _words(stored.T.contiguous()),
        "scales": scales.T.contiguous(),
        "g_idx": group_of.int(),
    }


def _settings(how: Int4) -> dict[str, Any]:
    """Return what config.json says."""
    size = how.group or -1
    if how.layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    if how.layout == "pack-quantized":
        weights = {"num_bits": 4, "type": "int", "symmetric": not how.zeros, "strategy": "group", "group_size": size}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }
    return {
        "quant_method": "gptq", "bits": 4, "group_size": size, "desc_act": not how.in_order, "sym": not how.zeros,
        "checkpoint_format": how.layout,
    }  # fmt: skip


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


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    return {"weight": (weight / scales.float()).round().clamp(-128, 127).to(torch.int8), "weight_scale": scales}


def _int8_static(weight: Tensor) -> dict[str, Tensor]:
    return _int8(weight) | {"input_scale": torch.tensor([0.5]), "input_zero_point": torch.tensor([3]).to(torch.int8)}


W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
INT4 = {
    "gptq": Int4("gptq"),
    "gptq-zeros": Int4("gptq", 64, zeros=True),
    "gptq-rows": Int4("gptq", 0),
    "gptq-order": Int4("gptq", zeros=True, in_order=False),
    "gptq-v2": Int4("gptq_v2", 128, zeros=True),
    "gptq-v2-order": Int4("gptq_v2", in_order=False),
    "awq": Int4("awq"),
    "awq-zeros": Int4("awq", 64, zeros=True),
    "awq-128": Int4("awq", 128, zeros=True),
    "w4a16": Int4("pack-quantized", 128),
    "w4a16-zeros": Int4("pack-quantized", 32, zeros=True),
    "w4a16-rows": Int4("pack-quantized", 0),
    "w4a16-order": Int4("pack-quantized", 32, in_order=False),
}
METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    **{name: (_settings(how), partial(_int4, how)) for name, how in INT4.items()},
    "w8a8": (W8A8, _int8),
    "w8a8-static": (W8A8, _int8_static),
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
    if method.startswith(("fp8", "w8a8")):
        packed = METHODS[method][1](weight)
        return packed["weight"].float() * packed["weight_scale"]
    numbers, scales, zeros, group_of = _rounded(weight, INT4[method])
    return (numbers - zeros[:, group_of]) * scales.float()[:, group_of]


def gguf_blocks(weight: np.ndarray, type_name: str) -> np.ndarray:
    """Quantise a matrix to a block format of GGUF, as its bytes by rows: Q4_K and Q6_K here, others by the format's own
    package."""
    if type_name not in ("Q4_K", "Q6_K"):
        return quantize(weight, GGMLQuantizationType[type_name])
    blocks = (_q4_k if type_name == "Q4_K" else _q6_k)(weight.astype(np.float32).reshape(-1, 256))
    return blocks.reshape(len(weight), -1)


def _q4_k(weights: np.ndarray) -> np.ndarray:
    """Eight groups of 32 with scales and minima of six bits, which two halves multiply."""
    groups = weights.reshape(-1, 8, 32)
    least = -np.minimum(groups.min(-1), 0)
    spread = (groups.max(-1) + least) / 15
    halves = [np.maximum(of.max(-1, keepdims=True) / 63, 1e-7).astype(np.float16) for of in (spread, least)]
    wide = [half.astype(np.float32) for half in halves]
    scales, minima = np.rint(spread / wide[0]).astype(np.uint8), np.rint(least / wide[1]).astype(np.uint8)
    step = np.maximum(scales * wide[0], 1e-9)[..., None]
    numbers = np.rint((groups + (minima * wide[1])[..., None]) / step).clip(0, 15).astype(np.uint8)
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    second = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
    ends = [half.view(np.uint8).reshape(-1, 2) for half in halves]
    return np.concatenate([*ends, first, second, third, packed.reshape(-1, 128)], axis=1)


def _q6_k(weights: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16 with scales of eight bits, which a half multiplies."""
    groups = weights.reshape(-1, 16, 16)
    spread = np.abs(groups).max(-1) / 31
    half = np.maximum(spread.max(-1, keepdims=True) / 127, 1e-7).astype(np.float16)
    scales = np.rint(spread / half.astype(np.float32)).clip(1, 127).astype(np.int8)
    step = (scales * half.astype(np.float32))[..., None]
    numbers = (np.rint(groups / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (numbers[:, :, :2] & 15) | (numbers[:, :, 2:] & 15) << 4
    high = sum((numbers[:, :, at] >> 4) << 2 * at for at in range(4))
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), half.view(np.uint8).reshape(-1, 2)]
    return np.concatenate(parts, axis=1)
