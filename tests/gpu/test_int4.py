"""Models of four and eight bits on the GPU: whatever the batch and the graphs, their logits are near those of their
weights as floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("needs a CUDA device that multiplies bfloat16", allow_module_level=True)

from msgspec.structs import replace

from tests import tiny_models
from tests.gpu.test_fp8 import PROMPTS, on_gpu
from tests.quantised_models import save_quantised
from tests.tiny_adapters import save_adapter
from tests.worker.driving import load, request, run, under_reference, watched_logits
from weft.errors import ConfigError
from weft.kernels.int_weights import IntWeight
from weft.types import Adapter

pytestmark = pytest.mark.gpu

METHODS = ["awq-128", "gptq", "gptq-order", "gptq-v2", "w4a16", "w4a16-zeros", "w4a16-rows", "w8a8"]
BLOCKS = ["Q4_0", "Q4_1", "Q4_K", "Q4_K_M", "Q5_1", "Q6_K", "Q8_0"]


def model_at(method: str, tmp_path: Path) -> Path:
    if method in BLOCKS:
        others = {"attn_v": "Q6_K", "ffn_down": "Q6_K"} if method == "Q4_K_M" else {}
        return tiny_models.save_gguf("wide", tmp_path / "wide.gguf", method.removesuffix("_M"), others=others)
    folder = tiny_models.save_directory("qwen3", tmp_path / "qwen3")
    return save_quantised(folder, tmp_path / method, method) if method else folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", METHODS + BLOCKS)
def test_logits_are_near_those_of_floats(method: str, dtype: str, tmp_path: Path) -> None:
    """A prompt of more rows than one program takes, and one row after the other."""
    folder = model_at(method, tmp_path)
    gpu = on_gpu(folder, dtype=dtype)
    assert isinstance(gpu.runner.stepper.model.weights.layers[0].qkv, IntWeight)
    prompt = PROMPTS[1] * 2
    with watched_logits() as seen:
        run(gpu, [request("r", prompt, 8)])
    with watched_logits() as wanted:
        run(under_reference(load(folder)), [request("r", prompt, 8)])
    found, expected = seen[0].float().cpu(), wanted[0].float()
    is_exact = dtype == "float16" and method not in ("Q4_K_M", "Q6_K")
    assert (found - expected).norm() / expected.norm() < (0.01 if is_exact else 0.05)


@pytest.mark.parametrize("method", ["int4", "int8", "gptq-order", "w8a8", "Q4_K_M"])
def test_graphs_give_what_eager_steps_give(method: str, tmp_path: Path) -> None:
    quantization = method if method.startswith("int") else ""
    gpu = on_gpu(model_at("" if quantization else method, tmp_path), quantization)
    graphs = gpu.runner.graphs
    assert graphs is not None
    work = [request(f"r{i}", prompt, 32) for i, prompt in enumerate(PROMPTS * 2)]
    gpu.runner.graphs = None
    eager = run(gpu, work, overlap=True).outputs
    gpu.runner.graphs = graphs
    while gpu.runner.prepare():
        pass
    assert run(gpu, work, overlap=True).outputs == eager


def test_an_adapter_is_added(tmp_path: Path) -> None:
    folder = model_at("awq-128", tmp_path)
    adapter = Adapter(name="style", number=1, path=str(save_adapter("qwen3", tmp_path / "adapter", 1)))
    adapted = replace(request("r", PROMPTS[1], 4), adapter=adapter)
    gpu = on_gpu(folder, dtype="float16")
    with watched_logits() as seen:
        run(gpu, [adapted])
    with watched_logits() as wanted:
        run(under_reference(load(folder)), [adapted])
    found, expected = seen[0].float().cpu(), wanted[0].float()
    assert found.shape == expected.shape
    assert (found - expected).norm() / expected.norm() < 0.01


def test_float32_is_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not go with --dtype float32"):
        on_gpu(model_at("", tmp_path), "int8", "float32")
    gpu = on_gpu(model_at("awq", tmp_path / "again"), dtype="float32")
    assert isinstance(gpu.runner.stepper.model.weights.layers[0].qkv, torch.Tensor)
