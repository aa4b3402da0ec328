"""What a model took of a GPU is free again when it is unloaded, whichever engine held it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from weft.backends import create_engine
from weft.machine.memory import GIB, MIB

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With heads that every kernel of attention knows, and no weights of its own."""
    folder = tmp_path_factory.mktemp("unload") / "model"
    shutil.copytree(tiny_directory("smollm2"), folder)
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | SHAPE))
    return folder


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize(
    "name",
    ["native", pytest.param("cuda-vllm-async", marks=needs_vllm), pytest.param("cuda-vllm", marks=needs_vllm)],
)
def test_memory_is_given_back(name: str, model: Path) -> None:
    before = used_bytes()
    engine = create_engine(name, load_format="dummy", max_model_len=512, gpu_memory_utilization=0.2)
    for _ in range(2):
        engine.load_model(str(model))
        assert engine.health_check() and engine.get_memory_usage()["allocated_gb"] > 1
        assert used_bytes() > before + GIB
        engine.unload_model()
        assert used_bytes() < before + 16 * MIB
