"""FP8 checkpoints are read as they are stored, or dequantised; others are quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantised_models import save_quantised, unquantised
from weft.errors import ModelError
from weft.hub.resolve import resolve
from weft.kernels.fp8 import E4M3, Fp8Weight, fp8_weight, quantise_rows, rounded_rows
from weft.kernels.reference import linear
from weft.kernels.rotated import RotatedWeight
from weft.kernels.weights import DecoderWeights
from weft.machine.memory import fp8_bytes
from weft.machine.model_size import size_of
from weft.model.dense import DenseConfig
from weft.model.loader import LinearLoading, load_weights, open_model, pairs_from_halves

METHODS = ("fp8", "fp8-static", "fp8-channel", "fp8-block")
LINEARS = ("qkv", "output", "gate_up", "down")


def read(path: Path, linears: LinearLoading) -> tuple[DenseConfig, DecoderWeights]:
    files = resolve(str(path))
    with open_model(files) as (config, source):
        device = torch.device("cpu")
        return config, load_weights(files, config, source, dtype=torch.bfloat16, device=device, linears=linears)


@pytest.fixture
def wide_directory(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model with more columns, and rows of a part, than a block has."""
    import json
    import shutil

    folder = Path(shutil.copytree(tiny_directory("llama2"), tmp_path / "wide"))
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] = 200
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "mlp" in name:
            shape = tuple(200 if size not in (config["hidden_size"],) else size for size in tensor.shape)
            tensors[name] = torch.randn(shape, generator=generator).to(tensor.dtype) / 10
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def expected(folder: Path, config: DenseConfig, layer: int, method: str) -> dict[str, Tensor]:
    """The fused weights that a quantised copy of a model stands for."""
    state = load_file(folder / "model.safetensors")

    def part(name: str) -> Tensor:
        return unquantised(state[f"model.layers.{layer}.{name}_proj.weight"].float(), method)

    turned = [pairs_from_halves(part(f"self_attn.{name}"), config.head_dim) for name in ("q", "k")]
    return {
        "qkv": torch.cat([*turned, part("self_attn.v")]),
        "output": part("self_attn.o"),
        "gate_up": torch.cat([part("mlp.gate"), part("mlp.up")]),
        "down": part("mlp.down"),
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_held_as_it_is_stored(method: str, wide_directory: Path, tmp_path: Path) -> None:
    folder = save_quantised(wide_directory, tmp_path / method, method)
    config, weights = read(folder, "keep")
    for i, layer in enumerate(weights.layers):
        for name, wanted in expected(wide_directory, config, i, method).items():
            held = getattr(layer, name)
            assert isinstance(held, Fp8Weight) and held.numbers.dtype == E4M3 and held.shape == wanted.shape
            torch.testing.assert_close(held.dequantised(), wanted)
    assert isinstance(weights.embedding, Tensor) and weights.head.dtype == torch.bfloat16
    stored = size_of(resolve(str(folder))).weights
    assert stored.fp8 and stored.has_fp8_blocks == (method == "fp8-block")
    assert weights.num_bytes == pytest.approx(
        fp8_bytes(config, torch.bfloat16, grouped=stored.has_fp8_blocks), rel=0.02
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_is_dequantised_where_nothing_multiplies_it(
    method: str, wide_directory: Path, tmp_path: Path
) -> None:
    config, weights = read(save_quantised(wide_directory, tmp_path / method, method), "dequantise")
    for i, layer in enumerate(weights.layers):
        for name, wanted in expected(wide_directory, config, i, method).items():
            assert torch.equal(getattr(layer, name), wanted.bfloat16())


@pytest.mark.parametrize("method", ["", "fp8-block"])
def test_all_linear_weights_are_quantised(method: str, wide_directory: Path, tmp_path: Path) -> None:
    folder = save_quantised(wide_directory, tmp_path / method, method) if method else wide_directory
    _, weights = read(folder, "fp8")
    _, plain = read(folder, "dequantise")
    for layer, floats in zip(weights.layers, plain.layers, strict=True):
        for name in LINEARS:
            held, wanted = getattr(layer, name), getattr(floats, name).float()
            assert isinstance(held, Fp8Weight)
            assert (held.dequantised() - wanted).norm() / wanted.norm() < 0.04
    assert isinstance(weights.head, RotatedWeight) and isinstance(plain.head, Tensor)
    assert (weights.head.dequantised() - plain.head.float()).norm() / plain.head.norm() < 0.01


def test_a_part_that_is_not_quantised_joins_the_others(wide_directory: Path, tmp_path: Path) -> None:
    folder = save_quantised(wide_directory, tmp_path / "mixed", "fp8-block")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = load_file(wide_directory / "model.safetensors")[name]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    _, weights = read(folder, "keep")
    held = weights.layers[0].gate_up
    assert isinstance(held, Fp8Weight)
    up, wanted = held.dequantised()[200:], tensors[name].float()
    assert (up - wanted).norm() / wanted.norm() < 0.04


def test_scales_that_are_missing_or_of_another_shape_are_refused(wide_directory: Path, tmp_path: Path) -> None:
    folder = save_quantised(wide_directory, tmp_path / "broken", "fp8-block")
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: torch.ones(7, 3)}, path)
    with pytest.raises(ModelError, match=r"down_proj\.weight_scale_inv' has the shape \(7, 3\)"):
        read(folder, "keep")
    del tensors[name]
    save_file(tensors, path)
    for linears in ("keep", "dequantise"):
        with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.1\.mlp\.down_proj\.weight_scale'") as caught:
            read(folder, linears)
        assert "FP8" in caught.value.hint


def test_rows_are_quantised_each_by_itself() -> None:
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 1e4, 0.0, 1.0])[:, None]
    x[4, 3] = float("nan")
    rows = quantise_rows(x)
    assert rows.numbers[:3].float().abs().amax(dim=1).tolist() == [448.0] * 3
    near = rounded_rows(x)
    assert ((near - x)[:3].abs() <= x[:3].abs().amax(dim=1, keepdim=True) / 16).all()
    assert not near[3].any() and near[4, 3].isnan()
    assert torch.equal(rounded_rows(x[1:2]), near[1:2])


def test_the_reference_multiplies_the_dequantised_weight() -> None:
    weight = fp8_weight(torch.randn(24, 200))
    x, bias = torch.randn(3, 200), torch.randn(24)
    torch.testing.assert_close(linear(x, weight, bias), x @ weight.dequantised().T + bias)
    grouped = weight._replace(scales=torch.rand(2, 24))
    halves = [weight.numbers[:, :128].float() * grouped.scales[0, :, None],
              weight.numbers[:, 128:].float() * grouped.scales[1, :, None]]  # fmt: skip
    assert torch.equal(grouped.dequantised(), torch.cat(halves, dim=1))
