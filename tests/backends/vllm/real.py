"""Real vLLM for tests: tiny models that its CPU kernels know, adapters for them, and answers that are read to their
end."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.generation import sample
from weft.backends.blocking import BlockingEngine
from weft.backends.contract import Engine
from weft.config import load
from weft.machine.devices import accelerator
from weft.options import Config
from weft.types import Output, SamplingParams

needs_any_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    # It takes a minute to start, and minutes beside other work.
    pytest.mark.timeout(1200),
]
needs_vllm = [*needs_any_vllm, pytest.mark.skipif(accelerator() != "cpu", reason="needs vLLM's build for CPUs")]

MODEL = "qwen3"
"""Of tests.tiny_models.SPECS: its heads are as wide as vLLM's attention on CPU wants them."""
RANK = 4
EAGER = {"VLLM_CPU_CI_ENV": "1"}
"""Nothing is compiled: vLLM's own setting for tests."""


def config_of(model: Path, **flags: Any) -> Config:
    small = {"max_model_len": 512, "kv_cache_memory_mb": 64, "start_timeout_s": 1000.0, **flags}
    return load({"model": str(model), **small}, env={})


class Answered(Struct, frozen=True):
    deltas: list[Output]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def last(self) -> Output:
        return self.deltas[-1]

    @property
    def logprobs(self) -> list[Any]:
        return [score for delta in self.deltas for score in delta.logprobs or ()]


async def answer(engine: Engine, prompt: list[int], params: SamplingParams, **fields: Any) -> Answered:
    return Answered([delta async for delta in await engine.submit(sample(prompt, params, **fields))])


def ask(blocking: BlockingEngine, prompt: list[int], params: SamplingParams, **fields: Any) -> Answered:
    return blocking.wait(answer(blocking.engine, prompt, params, **fields))


def save_adapter(folder: Path, model: Path, seed: int) -> Path:
    """A random LoRA adapter as PEFT writes it, large enough to change what the model says."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            rows, columns = weight.shape
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    more = {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "tiny", "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    return folder


def save_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's weights added to its own."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights, added = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in added:
            weights[name] = weights[name] + 2 * added[f"{stem}.lora_B.weight"] @ added[f"{stem}.lora_A.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_core(host: int) -> int:
    """The process that vLLM's asynchronous engine computes in, or commands those that do."""
    children = Path(f"/proc/{host}/task/{host}/children").read_text().split()
    (core,) = (int(pid) for pid in children if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text())
    return core


def host_of(blocking: BlockingEngine) -> int:
    pid: int | None = blocking.engine.client.engine_pid  # type: ignore[attr-defined]
    assert pid is not None
    return pid


def eager() -> Callable[[], None]:
    """Set vLLM's environment for tests; what is returned takes it back."""
    before = {name: os.environ.get(name) for name in EAGER}
    os.environ.update(EAGER)

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    return restore


class Heard(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
