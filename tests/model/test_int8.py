"""Weights of eight bits: checkpoints of compressed-tensors, any others quantised, and blocks of GGUF files as a GPU
holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny_models
from tests.model.test_int4 import LINEARS, expected, made, read
from tests.quantised_models import gguf_blocks
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.kernels.int_weights import IntGroups, IntWeight, int8_rows, joined, pack
from weft.kernels.panel_format import PanelLayout
from weft.kernels.quantised import QuantisedWeight
from weft.kernels.reference import linear
from weft.machine.memory import int8_bytes, int8_head_bytes
from weft.machine.model_size import size_of
from weft.model.loader import load_weights, open_model

MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
"""What a file of Q4_K_M has beside Q4_K, in some layers."""


@pytest.mark.parametrize("method", ["w8a8", "w8a8-static"])
def test_a_checkpoint_is_held_as_it_is_stored(method: str, tmp_path: Path) -> None:
    plain, folder = made(tmp_path, method)
    for linears, dtype in (("keep", torch.bfloat16), ("int8", torch.bfloat16), ("dequantise", torch.float32)):
        config, weights = read(folder, linears, dtype)
        for i, layer in enumerate(weights.layers):
            for name, wanted in expected(plain, config, i, method).items():
                held = getattr(layer, name)
                if linears == "dequantise":
                    assert torch.equal(held, wanted)
                    continue
                assert isinstance(held, IntWeight) and held.bits == 8 and held.group_size == wanted.shape[1]
                assert torch.equal(held.dequantised(), wanted)
    stored = size_of(resolve(str(folder))).weights
    assert stored.int8 == config.num_layers * 128 * (4 * 128 + 3 * 160)
    _, kept = read(folder, "keep", torch.bfloat16)
    # Tiles of 64 rows and blocks of 128 columns are whole in memory; a tiny model's are not.
    assert kept.num_bytes == pytest.approx(stored.held_as_integers(torch.bfloat16), rel=0.3)


def test_all_linear_weights_are_quantised(tmp_path: Path) -> None:
    plain, packed = made(tmp_path, "gptq")
    for folder in (plain, packed):
        _, floats = read(folder, "dequantise", torch.float32)
        config, weights = read(folder, "int8", torch.float32)
        for layer, wanted in zip(weights.layers, floats.layers, strict=True):
            for name in LINEARS:
                held, weight = getattr(layer, name), getattr(wanted, name)
                assert isinstance(held, IntWeight) and held.bits == 8
                assert ((held.dequantised() - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.51).all()
        assert isinstance(weights.head, IntWeight) and weights.head.bits == 8
    assert weights.num_bytes == pytest.approx(
        int8_bytes(config, torch.float32) + int8_head_bytes(config, torch.float32), rel=0.3
    )


def test_a_cpu_has_them_in_panels(tmp_path: Path) -> None:
    plain, folder = made(tmp_path, "w8a8")
    for path in (plain, folder):
        files = resolve(str(path))
        with open_model(files) as (config, source):
            weights = load_weights(
                files, config, source, dtype=torch.float32, device=torch.device("cpu"),
                panels=PanelLayout(8), linears="int8",
            )  # fmt: skip
        _, floats = read(path, "dequantise", torch.float32)
        for layer, wanted in zip(weights.layers, floats.layers, strict=True):
            for name in LINEARS:
                held, weight = getattr(layer, name), getattr(wanted, name)
                assert isinstance(held, QuantisedWeight) and held.format.bits == 8
                blocks = weight.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=1)
                assert ((held.dequantised() - weight).abs() <= blocks / 127 * 0.6).all()
        assert isinstance(weights.head, QuantisedWeight)
        head = int8_head_bytes(config, torch.float32, in_panels=True)
        assert weights.num_bytes == pytest.approx(int8_bytes(config, torch.float32, in_panels=True) + head, rel=0.02)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (None, r"no tensor 'model\.layers\.1\.mlp\.down_proj\.weight_scale'"),
        (torch.ones(7, 3), r"weight_scale' has the shape \(7, 3\)"),
        (torch.ones(1, 2), "scales of 'model.layers.1.mlp.down_proj.weight' are for blocks"),
    ],
)
def test_scales_that_are_missing_or_of_another_shape_are_refused(
    scale: Tensor | None, message: str, tmp_path: Path
) -> None:
    _, folder = made(tmp_path, "w8a8")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight_scale"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors | ({} if scale is None else {name: scale}), path)
    for linears in ("keep", "dequantise"):
        with pytest.raises(ModelError, match=message):
            read(folder, linears)


@pytest.mark.parametrize("minima", [False, True])
def test_the_layout_of_kernels_loses_nothing(minima: bool) -> None:
    for rows, columns, group in ((70, 96, 32), (130, 256, 128), (8, 200, 200)):
        numbers = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        group_of = torch.arange(columns) // group
        scales, least = torch.rand(2, rows, int(group_of[-1]) + 1)
        weight = pack(IntGroups(numbers, scales, None, group, minima=least if minima else None), torch.float32)
        wanted = numbers * scales[:, group_of] + (least[:, group_of] if minima else 0)
        assert torch.equal(weight.dequantised(), wanted)
        x = torch.randn(3, columns)
        torch.testing.assert_close(linear(x, weight), x @ wanted.T, atol=1e-2, rtol=1e-4)


def test_parts_with_and_without_minima_are_joined() -> None:
    for dtype, middle in ((torch.uint8, 8), (torch.int8, 0)):
        numbers, scales = torch.randint(0, 16, (2, 3, 64)).to(dtype), torch.rand(2, 3, 2)
        least = torch.rand(3, 2)
        parts = [IntGroups(numbers[0], scales[0], None, 32), IntGroups(numbers[1], scales[1], None, 32, None, least)]
        whole = joined(parts).dequantised()
        torch.testing.assert_close(whole, torch.cat([part.dequantised() for part in parts]))
        assert torch.allclose(whole[:3], (numbers[0] - float(middle)) * scales[0].repeat_interleave(32, dim=1))


def test_zeros_and_one_value_are_quantised() -> None:
    weight = torch.stack([torch.zeros(64), torch.full((64,), -3.0), torch.linspace(-2, 1, 64)])
    torch.testing.assert_close(int8_rows(weight).dequantised(), weight, atol=2 / 127, rtol=1e-6)


def kept(path: Path, linears: Any = "keep") -> Any:
    files = resolve(str(path))
    with open_model(files) as (config, source):
        return load_weights(
            files, config, source, dtype=torch.bfloat16 if linears == "keep" else torch.float32,
            device=torch.device("cpu"), linears=linears,
        )  # fmt: skip


LARGEST_ERROR = {
    "Q4_0": 0.002,
    "Q4_1": 0.006,
    "Q4_K": 0.006,
    "Q5_0": 0.002,
    "Q5_1": 0.006,
    "Q8_0": 0.002,
    "Q6_K": 0.006,
}
"""The relative error of weights whose scales and minima are bfloat16; those of Q6_K are rounded to eight bits too."""


@pytest.mark.parametrize("type_name", LARGEST_ERROR)
def test_blocks_of_a_gguf_file_stay_quantised(type_name: str, tmp_path: Path) -> None:
    file = tiny_models.save_gguf("wide", tmp_path / "wide.gguf", type_name)
    held, floats = kept(file), kept(file, "dequantise")
    for layer, wanted in zip(held.layers, floats.layers, strict=True):
        for name in LINEARS:
            weight, exact = getattr(layer, name), getattr(wanted, name)
            assert isinstance(weight, IntWeight) and weight.bits == (4 if type_name.startswith("Q4") else 8)
            assert (weight.dequantised() - exact).norm() / exact.norm() < LARGEST_ERROR[type_name]
    assert held.num_bytes == size_of(resolve(str(file))).weights.block_bytes


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_a_file_of_several_formats(type_name: str, tmp_path: Path) -> None:
    """A fused weight has eight bits where not all of its parts have four, and floats where one has floats."""
    file = tiny_models.save_gguf("wide", tmp_path / "m.gguf", type_name, others=MIXED | {"blk.1.ffn_up": "F16"})
    held, floats = kept(file), kept(file, "dequantise")
    first, second = held.layers
    narrow = 4 if type_name == "Q4_K" else 8
    assert [getattr(first, name).bits for name in LINEARS] == [8, narrow, narrow, 8]
    assert isinstance(second.gate_up, Tensor) and isinstance(held.embedding, Tensor)
    for layer, wanted in zip(held.layers, floats.layers, strict=True):
        for name in LINEARS:
            weight, exact = getattr(layer, name), getattr(wanted, name)
            found = weight.float() if isinstance(weight, Tensor) else weight.dequantised()
            assert (found - exact).norm() / exact.norm() < 0.006
    assert held.num_bytes == size_of(resolve(str(file))).weights.block_bytes


def test_rotary_pairs_become_neighbours(tiny_gguf: Callable[[str, str], Path]) -> None:
    file = tiny_gguf("qwen3", "Q8_0")
    held, floats = kept(file), kept(file, "dequantise")
    exact = floats.layers[0].qkv
    assert (held.layers[0].qkv.dequantised() - exact).norm() / exact.norm() < 0.002


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K"])
def test_blocks_that_the_tests_write_are_near_their_weights(type_name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((4, 512), np.float32)
    found = dequantize(gguf_blocks(weights, type_name), GGMLQuantizationType[type_name])
    assert np.linalg.norm(found - weights) / np.linalg.norm(weights) < (0.1 if type_name == "Q4_K" else 0.03)
