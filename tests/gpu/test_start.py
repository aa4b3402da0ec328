"""A start on a machine without compiled kernels, and weights that are read through pinned memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from contextlib import ExitStack

from safetensors.torch import save_file

from weft.checkpoint.model_files import ModelFiles
from weft.hub.resolve import find_model
from weft.model.safetensors_source import SafetensorsSource
from weft.options import CacheOptions, Config, ModelOptions
from weft.worker.graphs import CAPTURE_AFTER, StepGraphs
from weft.worker.inputs import StepShape
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu

STARTS = """
import sys
from pathlib import Path
import triton
from weft.hub.resolve import find_model
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions
from weft.worker.worker import Worker

compiled = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.fn.__name__)
config = Config(
    model=ModelOptions(model=sys.argv[1], device="cuda", load_format="dummy"),
    backend=BackendOptions(quantization=sys.argv[2]),
    cache=CacheOptions(kv_cache_memory_mb=1000),
)
runner = Worker(config, find_model(config)).runner
while runner.prepare():
    pass
assert not compiled, compiled
assert list(Path(triton.knobs.cache.dir).glob("weft-*"))
"""


def write_config(folder: Path) -> None:
    facts = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 5000,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("quantization", ["", "fp8", "int4", "w4a8"])
def test_all_kernels_are_compiled_ahead(tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    command = [sys.executable, "-c", STARTS, str(tmp_path), quantization]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_captured_before_its_kernels_are_compiled(tmp_path: Path) -> None:
    write_config(tmp_path)
    model = ModelOptions(model=str(tmp_path), device="cuda", load_format="dummy")
    config = Config(model=model, cache=CacheOptions(kv_cache_memory_mb=1000))
    is_compiled, shape = False, StepShape(1, 0, 0, 1)
    stepper = Worker(config, find_model(config)).runner.stepper
    graphs = StepGraphs(stepper, 4, with_prefills=False, is_compiled=lambda timeout_s: is_compiled)
    with torch.inference_mode():
        assert not any(graphs.shape_for(shape) for _ in range(2 * CAPTURE_AFTER))
        assert graphs.capture_next()
        is_compiled = True
        assert graphs.shape_for(shape) is None
        while graphs.capture_next():
            pass
        assert graphs.shape_for(shape) == shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_read_as_they_are_in_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"t{rows}": torch.randn(rows, 1024).to(torch.bfloat16) for rows in (1, 2048, 2049, 40_000)}
    for number, names in enumerate((["t1", "t40000"], ["t2049", "t2048"])):
        save_file({name: tensors[name] for name in names}, tmp_path / f"{number}.safetensors")
    shards = sorted(tmp_path.glob("*.safetensors"))
    with ExitStack() as stack:
        source = SafetensorsSource(ModelFiles(name="", kind="huggingface", path=tmp_path, weight_files=shards), stack)
        read = {name: torch.full(one.shape, 7.0, dtype=dtype, device="cuda") for name, one in tensors.items()}
        for name, out in read.items():
            source.read_into(out, name)
    for name, one in tensors.items():
        assert torch.equal(read[name].cpu(), one.to(dtype)), name
