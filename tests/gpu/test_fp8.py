"""FP8 models on the GPU: whatever the batch and the graphs, their logits are near those of their weights as floats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a CUDA device that multiplies FP8", allow_module_level=True)

from tests import tiny_models
from tests.quantised_models import save_quantised
from tests.worker.driving import Driven, load, request, run, under_reference, watched_logits
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.kernels.fp8 import Fp8Weight
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], list(range(3, 60)), [7] * 33, [250, 1, 17, 99, 4] * 9]


def on_gpu(folder: Path, quantization: str = "", dtype: str = "auto") -> Driven:
    worker = Worker(
        Config(
            model=ModelOptions(device="cuda", dtype=dtype, max_model_len=256),
            backend=BackendOptions(quantization=quantization),
            cache=CacheOptions(num_blocks=128),
            scheduler=SchedulerOptions(max_num_seqs=12),
        ),
        resolve(str(folder)),
    )
    return Driven(worker.runner, worker.limits)


def model_at(method: str, tmp_path: Path) -> Path:
    folder = tiny_models.save_directory("qwen3", tmp_path / "qwen3")
    return save_quantised(folder, tmp_path / method, method) if method else folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["", "fp8", "fp8-channel", "fp8-block"])
def test_logits_are_near_those_of_floats(method: str, dtype: str, tmp_path: Path) -> None:
    """A prompt of more rows than the skinny kernels take, and one row after the other."""
    folder = model_at(method, tmp_path)
    gpu = on_gpu(folder, "" if method else "fp8", dtype)
    assert isinstance(gpu.runner.stepper.model.weights.layers[0].qkv, Fp8Weight)
    prompt = PROMPTS[1] * 2
    with watched_logits() as seen:
        run(gpu, [request("r", prompt, 8)])
    with watched_logits() as wanted:
        run(under_reference(load(folder)), [request("r", prompt, 8)])
    found, expected = seen[0].float().cpu(), wanted[0].float()
    # The numbers of a tiny model's weights and inputs are few: the errors of e4m3 do not cancel out.
    assert (found - expected).norm() / expected.norm() < (0.1 if method else 0.2)


@pytest.mark.parametrize("method", ["", "fp8-block"])
def test_graphs_give_what_eager_steps_give(method: str, tmp_path: Path) -> None:
    gpu = on_gpu(model_at(method, tmp_path), "" if method else "fp8")
    graphs = gpu.runner.graphs
    assert graphs is not None
    work = [request(f"r{i}", prompt, 32) for i, prompt in enumerate(PROMPTS * 2)]
    gpu.runner.graphs = None
    eager = run(gpu, work, overlap=True).outputs
    gpu.runner.graphs = graphs
    while gpu.runner.prepare():
        pass
    assert run(gpu, work, overlap=True).outputs == eager


def test_float32_is_not_quantised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not go with --dtype float32"):
        on_gpu(model_at("", tmp_path), "fp8", "float32")
    gpu = on_gpu(model_at("fp8", tmp_path / "again"), dtype="float32")
    assert isinstance(gpu.runner.stepper.model.weights.layers[0].qkv, torch.Tensor)
