"""The plan of a load on a real GPU: the driver's figures are CUDA's, and the engine then takes what was planned."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu.test_memory import config_json
from weft.checkpoint.model_files import dummy_files
from weft.machine.devices import accelerator, cuda_devices
from weft.machine.hardware import inspect_machine
from weft.machine.memory import GIB
from weft.machine.planner import plan_load
from weft.options import CacheOptions, Config, ModelOptions
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_the_driver_says_what_cuda_says() -> None:
    assert accelerator() == "cuda"
    devices = cuda_devices()
    assert len(devices) == torch.cuda.device_count()
    for device in devices:
        free, total = torch.cuda.mem_get_info(device.index)
        print(f"{device.name}: the driver {device.free / GIB:.2f} of {device.total / GIB:.2f} GiB, "
              f"CUDA {free / GIB:.2f} of {total / GIB:.2f} GiB")  # fmt: skip
        assert device.name == torch.cuda.get_device_name(device.index)
        assert device.total == pytest.approx(total, rel=0.01)
        assert abs(device.free - free) < GIB


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_engine_takes_what_was_planned(share: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    config = Config(
        model=ModelOptions(device="cuda", image_model="none"), cache=CacheOptions(gpu_memory_utilization=share)
    )
    files = dummy_files(tmp_path)
    plan = plan_load(config, files, inspect_machine())
    planned, taken = plan.ledger, Worker(config, files).info.memory
    for name in ("total", "weights", "activations", "graphs", "kv", "others"):
        print(f"{name:<12}{getattr(planned, name) / GIB:8.2f} GiB planned, {getattr(taken, name) / GIB:8.2f} GiB taken")
    assert plan.problem is None and plan.warning == ""
    assert planned.weights == pytest.approx(taken.weights, rel=0.01)
    assert planned.kv == pytest.approx(taken.kv, abs=0.02 * taken.total)
    assert planned.kv <= taken.kv, "what is estimated must be enough"
