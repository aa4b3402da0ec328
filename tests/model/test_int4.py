"""Checkpoints of four bits are held as they are stored, or dequantised; others are quantised; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny_models
from tests.quantised_models import INT4, save_quantised, unquantised
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.kernels.fp8 import E4M3_MAX
from weft.kernels.int_weights import GROUP, IntGroups, IntWeight, pack, quantised_groups
from weft.kernels.reference import linear
from weft.kernels.weights import DecoderWeights
from weft.machine.memory import int4_bytes, int8_head_bytes
from weft.machine.model_size import size_of
from weft.model.dense import DenseConfig
from weft.model.loader import LinearLoading, load_weights, open_model, pairs_from_halves

LINEARS = ("qkv", "output", "gate_up", "down")


def read(path: Path, linears: LinearLoading, dtype: torch.dtype = torch.float16) -> tuple[DenseConfig, DecoderWeights]:
    files = resolve(str(path))
    with open_model(files) as (config, source):
        device = torch.device("cpu")
        return config, load_weights(files, config, source, dtype=dtype, device=device, linears=linears)


def made(tmp_path: Path, method: str) -> tuple[Path, Path]:
    """A model, and its copy of four bits."""
    plain = tiny_models.save_directory("deepseek-llm", tmp_path / "plain")
    return plain, save_quantised(plain, tmp_path / method, method)


def expected(plain: Path, config: DenseConfig, layer: int, method: str) -> dict[str, Tensor]:
    """The fused weights that a quantised copy of a model stands for."""
    state = load_file(plain / "model.safetensors")

    def part(name: str) -> Tensor:
        return unquantised(state[f"model.layers.{layer}.{name}_proj.weight"].float(), method)

    turned = [pairs_from_halves(part(f"self_attn.{name}"), config.head_dim) for name in ("q", "k")]
    return {
        "qkv": torch.cat([*turned, part("self_attn.v")]),
        "output": part("self_attn.o"),
        "gate_up": torch.cat([part("mlp.gate"), part("mlp.up")]),
        "down": part("mlp.down"),
    }


@pytest.mark.parametrize("method", INT4)
def test_a_checkpoint_is_held_as_it_is_stored(method: str, tmp_path: Path) -> None:
    plain, folder = made(tmp_path, method)
    config, weights = read(folder, "keep")
    for i, layer in enumerate(weights.layers):
        for name, wanted in expected(plain, config, i, method).items():
            held = getattr(layer, name)
            assert isinstance(held, IntWeight) and held.shape == wanted.shape
            assert (held.zeros is None) == (not INT4[method].zeros) and (held.order is None) == INT4[method].in_order
            torch.testing.assert_close(held.dequantised(), wanted)
    assert isinstance(weights.head, Tensor) and weights.head.dtype == torch.float16


@pytest.mark.parametrize("method", INT4)
def test_a_checkpoint_is_dequantised_exactly(method: str, tmp_path: Path) -> None:
    plain, folder = made(tmp_path, method)
    config, weights = read(folder, "dequantise", torch.float32)
    for i, layer in enumerate(weights.layers):
        for name, wanted in expected(plain, config, i, method).items():
            assert torch.equal(getattr(layer, name), wanted)


def test_all_linear_weights_are_quantised(tmp_path: Path) -> None:
    plain, folder = made(tmp_path, "awq")
    _, floats = read(plain, "dequantise", torch.float32)
    _, weights = read(plain, "int4", torch.float32)
    for layer, wanted in zip(weights.layers, floats.layers, strict=True):
        for name in LINEARS:
            held, weight = getattr(layer, name), getattr(wanted, name)
            assert isinstance(held, IntWeight) and held.group_size == GROUP
            spread = weight.amax(1) - weight.amin(1)
            assert ((held.dequantised() - weight).abs() <= spread[:, None] / 15 * 0.51).all()
    # What has four bits already stays what it is.
    _, again = read(folder, "int4")
    assert isinstance(again.layers[0].qkv, IntWeight) and again.layers[0].qkv.group_size == 32


@pytest.mark.parametrize("method", ["", *INT4])
def test_for_rounded_inputs_no_number_of_a_row_is_too_large(method: str, tmp_path: Path) -> None:
    """Weights that are quantised here, and those of checkpoints whose columns are in their order."""
    plain, folder = made(tmp_path, method or "awq")
    _, weights = read(folder if method else plain, "w4a8")
    for layer in weights.layers:
        for name in LINEARS:
            held = getattr(layer, name)
            assert (held.row_scales is None) == (held.order is not None)
            if held.row_scales is not None:
                assert held.row_scales.shape == (1, held.shape[0])
                largest = (held.dequantised() / held.row_scales.T).abs().amax(1)
                assert (largest <= E4M3_MAX * 1.0001).all() and (largest >= E4M3_MAX / 16).all()


def test_parts_that_are_not_packed_alike_become_floats(tmp_path: Path) -> None:
    """One part of a fused weight was not quantised; the parts of another have their columns in different orders."""
    plain, folder = made(tmp_path, "gptq-order")
    path = folder / "model.safetensors"
    tensors, floats = load_file(path), load_file(plain / "model.safetensors")
    up, key = "model.layers.0.mlp.up_proj.", "model.layers.0.self_attn.k_proj."
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{up}{suffix}"]
    tensors[f"{up}weight"] = floats[f"{up}weight"]
    tensors[f"{key}g_idx"] = tensors[f"{key}g_idx"].flip(0).contiguous()
    save_file(tensors, path)
    _, weights = read(folder, "keep", torch.float32)
    layer = weights.layers[0]
    assert isinstance(layer.gate_up, Tensor) and isinstance(layer.qkv, Tensor) and isinstance(layer.down, IntWeight)
    assert torch.equal(layer.gate_up[160:], floats[f"{up}weight"].float())
    _, dequantised = read(folder, "dequantise", torch.float32)
    assert torch.equal(dequantised.layers[0].qkv, layer.qkv)


def test_empty_biases_of_gptq_are_passed_over(tmp_path: Path) -> None:
    _, folder = made(tmp_path, "gptq")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.bias"
    tensors = load_file(path)
    save_file(tensors | {name: torch.zeros(160)}, path)
    read(folder, "keep")
    save_file(tensors | {name: torch.ones(160)}, path)
    with pytest.raises(ModelError, match="up_proj"):
        read(folder, "keep")


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("awq", {"bits": 3}, "awq with 3 bits is not supported"),
        ("awq", {"version": "gemv"}, "layout 'gemv' of AWQ"),
        ("gptq", {"bits": 8}, "gptq with 8 bits is not supported"),
        ("gptq", {"checkpoint_format": "marlin"}, "layout 'marlin' of GPTQ"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quantisation 'bitsandbytes' is not supported"),
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' of compressed-tensors"),
        (
            "w4a16",
            {"config_groups": {"a": {"weights": {"num_bits": 8}}}},
            "pack-quantized of compressed-tensors with 8",
        ),
        ("w8a8", {"config_groups": {"a": {"weights": {"num_bits": 4}}}}, "int-quantized of compressed-tensors with 4"),
        ("w8a8", {"config_groups": {"a": {"weights": {"num_bits": 8, "symmetric": False}}}}, "with zeros"),
    ],
)
def test_other_formats_are_refused_by_name(method: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, folder = made(tmp_path, method)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    for linears in ("keep", "dequantise"):
        with pytest.raises(ModelError, match=message):
            read(folder, linears)


DOWN = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("awq", {"scales": torch.ones(7, 128)}, "scales"),
        ("awq", {"scales": torch.ones(5)}, "scales"),
        ("awq", {"qzeros": torch.zeros(5, 3, dtype=torch.int32)}, r"qzeros' has the shape \(5, 3\)"),
        ("gptq", {"qweight": None}, "no tensor"),
        ("gptq", {"qweight": torch.zeros(20, 128)}, "qweight' has numbers of the type F32"),
        ("gptq", {"g_idx": torch.full((160,), 99, dtype=torch.int32)}, "g_idx' is not of 5 groups of 32 columns"),
        ("gptq", {"g_idx": torch.full((160,), -1, dtype=torch.int32)}, "g_idx' is not of 5 groups of 32 columns"),
        ("w4a16", {"weight_scale": None}, "weight_scale"),
        (
            "w4a16-zeros",
            {"weight_zero_point": torch.zeros(16, 9, dtype=torch.int32)},
            "weight_zero_point' has the shape",
        ),
    ],
)
def test_tensors_that_are_missing_or_wrong_are_refused(
    method: str, changed: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    _, folder = made(tmp_path, method)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in changed.items():
        tensors.pop(f"{DOWN}{name}")
        if value is not None:
            tensors[f"{DOWN}{name}"] = value
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        read(folder, "keep")


def test_groups_that_kernels_do_not_know_are_refused(tmp_path: Path) -> None:
    _, folder = made(tmp_path, "awq")
    tensors = load_file(folder / "model.safetensors")
    # 160 columns in ten groups of 16.
    tensors[f"{DOWN}scales"] = tensors[f"{DOWN}scales"].repeat_interleave(2, dim=0)
    tensors[f"{DOWN}qzeros"] = tensors[f"{DOWN}qzeros"].repeat_interleave(2, dim=0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="groups of 16 columns are not supported"):
        read(folder, "keep")
    read(folder, "dequantise")


@pytest.mark.parametrize("method", ["awq-zeros", "gptq-order", "w4a16-zeros"])
def test_what_a_plan_counts_is_what_is_held(method: str, tmp_path: Path) -> None:
    plain, folder = made(tmp_path, method)
    stored = size_of(resolve(str(folder))).weights
    config, weights = read(folder, "keep")
    # Tiles of 64 rows and blocks of 128 columns are whole in memory; a tiny model's are not.
    assert stored.int4 == config.num_layers * 128 * (4 * 128 + 3 * 160)
    assert weights.num_bytes == pytest.approx(stored.held_as_integers(torch.float16), rel=0.3)
    _, quantised = read(plain, "int4")
    assert quantised.num_bytes == pytest.approx(
        int4_bytes(config, torch.float16) + int8_head_bytes(config, torch.float16), rel=0.3
    )
    assert stored.held_bytes(torch.float32, unpacked=True) == pytest.approx(
        size_of(resolve(str(plain))).weights.held_bytes(torch.float32, unpacked=True), rel=0.1
    )


@pytest.mark.parametrize(("rows", "columns", "group"), [(70, 96, 32), (64, 320, 64), (130, 256, 128), (8, 200, 200)])
def test_the_layout_of_kernels_loses_nothing(rows: int, columns: int, group: int) -> None:
    numbers = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    group_of = torch.arange(columns) // group
    scales, zeros = torch.rand(rows, int(group_of[-1]) + 1), torch.randint(0, 17, (rows, int(group_of[-1]) + 1)).float()
    order = torch.randperm(columns)
    weight = pack(IntGroups(numbers, scales, zeros, group, order), torch.float32)
    wanted = (numbers - zeros[:, group_of]) * scales[:, group_of]
    assert torch.equal(weight.dequantised()[:, order], wanted)
    x, bias = torch.randn(3, columns), torch.randn(rows)
    torch.testing.assert_close(linear(x, weight, bias), x[:, order] @ wanted.T + bias, atol=1e-3, rtol=1e-4)


def test_weights_of_one_value_and_of_one_sign_are_quantised() -> None:
    weight = torch.stack([torch.zeros(200), torch.full((200,), 3.0), torch.linspace(-2, -1, 200)])
    near = quantised_groups(weight).dequantised()
    assert torch.equal(near[0], weight[0]) and torch.allclose(near[1:], weight[1:], atol=2 / 15)
