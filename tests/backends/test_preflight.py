"""What `weft doctor` and `weft plan` say of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from weft.backends import preflight
from weft.backends.preflight import findings, machine_findings
from weft.backends.registry import EngineInfo, list_engines
from weft.checkpoint.model_files import ModelFiles, dummy_files
from weft.cli import main as cli
from weft.errors import ConfigError, ModelError
from weft.machine.devices import Device
from weft.machine.hardware import Cpu, Machine, Memory, MemoryLimit
from weft.machine.memory import GIB
from weft.options import BackendOptions, Config, ModelOptions

CPU = Cpu(cores=16, usable_cores=4, features=("avx2", "amx_tile"))
BARE = Machine(cpu=CPU, memory=Memory(total=64 * GIB, free=60 * GIB))


def said(machine: Machine) -> dict[str, str]:
    return {finding.name: finding.value for finding in machine_findings(machine)}


def test_a_machine_without_a_gpu() -> None:
    assert said(BARE) == {
        "cores": "4 usable of 16",
        "features": "avx2, amx_tile",
        "memory": "60.0 GiB free of 64.0",
        "cuda": "none; models run on the CPU",
    }


def test_limits_and_devices_are_told_one_by_one() -> None:
    limit = MemoryLimit(set_by="/sys/fs/cgroup/memory.max", limit=8 * GIB, used=2 * GIB)
    devices = (
        Device(kind="cuda", index=0, name="NVIDIA H200", total=140 * GIB, free=139 * GIB),
        Device(kind="ascend", index=0, name="Ascend NPU"),
    )
    machine = replace(BARE, memory=replace(BARE.memory, limits=(limit,)), devices=devices)
    found = said(machine)
    assert found["memory limit"] == "6.0 GiB free of 8.0, by /sys/fs/cgroup/memory.max"
    assert found["cuda:0"] == "NVIDIA H200, 139.0 GiB free of 140.0"
    assert found["ascend:0"] == "Ascend NPU, memory not known"
    assert "cuda" not in found
    assert [finding.name for finding in machine_findings(machine) if not finding.good] == ["ascend:0"]


def test_a_gpu_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = Device(kind="cuda", index=0, name="NVIDIA H200", total=GIB, free=GIB)
    monkeypatch.setattr(preflight, "inspect_machine", lambda: replace(BARE, devices=(gpu,)))
    monkeypatch.setattr(preflight, "list_engines", list)
    (torch_finding,) = [finding for finding in findings() if finding.name == "torch"]
    assert "cannot use the GPU" in torch_finding.value and not torch_finding.good


def test_every_engine_is_told_with_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EngineInfo(name="odd", platform="any", about="", available=False, why_not="odd is not installed")
    known = [engine for engine in list_engines() if engine.name in ("native", "remote")]
    monkeypatch.setattr(preflight, "list_engines", lambda: [*known, broken])
    found = {finding.name: finding.value for finding in findings()}
    assert found["engine native"] == "can be used" and found["engine odd"] == "odd is not installed"
    assert found["engine remote"] == "can be used with --engine-url"


# weft plan, and the plan that weft doctor shows.


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    facts = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(facts))
    return tmp_path


def weft_plan(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", "--load-format", "dummy", "--image-model", "none", *arguments])


def test_the_doctor_shows_the_plan_of_a_model_that_is_here(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "inspect_machine", lambda: BARE)
    named = CliRunner().invoke(cli.app, ["doctor", str(shape), "--load-format", "dummy", "--image-model", "none"])
    assert named.exit_code == 0, named.exception
    for words in (
        "python",
        "engine native",
        "by native on CPU, 4 cores",
        "longest context of one request, with the largest cache: 8192 tokens",
    ):
        assert words in named.output
    monkeypatch.setenv("WEFT_MODEL", str(shape))
    monkeypatch.setenv("WEFT_LOAD_FORMAT", "dummy")
    assert "concurrent requests of" in CliRunner().invoke(cli.app, ["doctor"]).output


@pytest.mark.parametrize("arguments", [[], ["org/absent"], ["--engine", "remote"]])
def test_a_model_that_is_not_here_is_no_failure_of_the_doctors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """And nothing is fetched for it."""
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    shown = CliRunner().invoke(cli.app, ["doctor", *arguments])
    assert shown.exit_code == 0, shown.exception
    assert "No model can be planned: " in shown.output and not [*tmp_path.iterdir()]


def test_a_plan_is_shown_for_a_machine_that_is_elsewhere(shape: Path) -> None:
    shown = weft_plan(str(shape), "--device", "cuda", "--memory-gib", "80")
    assert shown.exit_code == 0, shown.output
    assert "by native on a GPU of 80 GiB" in shown.output and "fits, with a context of 8192 tokens" in shown.output
    assert "longest context of one request, with the largest cache: 8192 tokens" in shown.output


def test_what_does_not_fit_ends_with_1(shape: Path) -> None:
    shown = weft_plan(str(shape), "--device", "cuda", "--memory-gib", "10")
    assert shown.exit_code == 1 and "does not fit: The weights of" in shown.output


def test_the_engine_is_the_one_that_was_asked_for(shape: Path) -> None:
    model = ModelOptions(model=str(shape), load_format="dummy", image_model="none", device="cuda")
    files = dummy_files(shape)
    made = preflight.planned(Config(model=model, backend=BackendOptions(engine="remote,cuda-vllm")), files, 80)
    assert made.engine == "cuda-vllm"
    with pytest.raises(ConfigError, match="nothing to plan"):
        preflight.planned(Config(model=model, backend=BackendOptions(engine="remote")), files, 80)


@pytest.mark.parametrize(
    ("engine", "device"),
    [("cuda-vllm-async", "a GPU of 80 GiB"), ("ascend-vllm", "an NPU of 80 GiB"), ("cpu-vllm", "CPU, 4 cores")],
)
def test_the_engine_says_what_the_device_is_that_has_the_memory(
    shape: Path, monkeypatch: pytest.MonkeyPatch, engine: str, device: str
) -> None:
    monkeypatch.setattr(preflight, "inspect_machine", lambda: BARE)
    shown = weft_plan(str(shape), "--engine", engine, "--memory-gib", "80")
    assert shown.exit_code == 0, shown.exception
    assert f"by {engine} on {device}" in shown.output


def test_memory_of_another_size_without_a_gpu(shape: Path) -> None:
    model = ModelOptions(model=str(shape), load_format="dummy", image_model="none", device="cpu")
    made = preflight.planned(Config(model=model), dummy_files(shape), 16)
    assert made.place == "cpu" and made.memory.total == 16 * GIB and made.is_final


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["--quantization", "awq"], "--quantization cannot be awq"),
        (["--tensor-parallel-size", "7"], "--tensor-parallel-size"),
        (["--max-num-batched-tokens", "8"], "below --max-num-seqs"),
    ],
)
def test_a_plan_refuses_the_settings_that_serve_would_refuse(shape: Path, settings: list[str], reason: str) -> None:
    refused = weft_plan(str(shape), "--engine", "native", "--device", "cpu", *settings)
    assert refused.exit_code != 0 and isinstance(refused.exception, ConfigError) and reason in str(refused.exception)


def test_a_plan_refuses_a_model_that_the_engine_does_not_compute(shape: Path) -> None:
    file = shape / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mamba"}))
    refused = weft_plan(str(shape), "--engine", "native", "--device", "cpu", "--memory-gib", "80")
    assert isinstance(refused.exception, ModelError) and "'mamba' are not supported" in str(refused.exception)


def test_the_requests_side_by_side_are_those_of_the_cache_that_there_would_be(shape: Path) -> None:
    shown = weft_plan(str(shape), "--device", "cpu", "--memory-gib", "80", "--max-model-len", "1000")
    assert re.search(r"concurrent requests of \d+ tokens: 2; \d+ with --kv-cache-memory-mb \d+", shown.output), (
        shown.output
    )


def test_weights_that_are_unpacked_are_told_so(smollm2_files: ModelFiles) -> None:
    asked = ["plan", "smollm2", "--device", "cpu", "--image-model", "none"]
    shown = CliRunner().invoke(cli.app, asked)
    assert "0.09 GiB quantised, and held so" in " ".join(shown.output.split())
    shown = CliRunner().invoke(cli.app, [*asked, "--dtype", "float32"])
    assert "0.09 GiB quantised, unpacked to float32" in " ".join(shown.output.split())


def test_a_plan_refuses_fp8_where_serving_would(smollm2_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = CliRunner().invoke(cli.app, ["plan", "smollm2", "--image-model", "none", "--quantization", "fp8"])
    assert shown.exit_code != 0 and "CPUs do not multiply FP8" in str(shown.exception)
    asked = ["plan", "smollm2", "--image-model", "none", "--quantization", "int8"]
    assert CliRunner().invoke(cli.app, asked).exit_code == 0
    shown = CliRunner().invoke(cli.app, [*asked, "--dtype", "bfloat16"])
    assert shown.exit_code != 0 and "--quantization int8 needs --dtype auto" in str(shown.exception)
    shown = CliRunner().invoke(cli.app, ["plan", "smollm2", "--image-model", "none", "--kv-cache-dtype", "fp8"])
    assert shown.exit_code != 0 and "--kv-cache-dtype fp8 is for GPUs" in str(shown.exception)
