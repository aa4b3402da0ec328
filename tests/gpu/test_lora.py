"""LoRA adapters on the GPU: the tokens of the CPU in any company, without waiting, and nothing lost for the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from msgspec.structs import replace

from tests import tiny_models
from tests.gpu.test_engine import PROMPTS, SEEDED, forbid_waiting, on_gpu
from tests.tiny_adapters import save_adapter
from tests.worker.driving import load, request, run, under_reference
from weft.types import Adapter, Request
from weft.worker.lora_rows import LoraRows

pytestmark = pytest.mark.gpu


def saved(name: str, folder: Path, count: int = 2) -> list[Adapter]:
    return [
        Adapter(name=f"style {i}", number=i, path=str(save_adapter(name, folder / f"adapter {i}", i)))
        for i in range(1, count + 1)
    ]


def work(adapters: list[Adapter], num_tokens: int = 24) -> list[Request]:
    """Every prompt with every adapter and with none, greedy and drawn."""
    return [
        replace(request(f"{number} {i} {kind}", prompt, num_tokens, **params), adapter=adapter)
        for number, adapter in enumerate([None, *adapters])
        for i, prompt in enumerate(PROMPTS[:2])
        for kind, params in (("greedy", {}), ("seeded", SEEDED))
    ]


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_the_tokens_are_the_cpus(name: str, tmp_path: Path) -> None:
    folder, adapters = tiny_models.save_directory(name, tmp_path / name), saved(name, tmp_path)
    expected = run(under_reference(load(folder)), work(adapters)).outputs
    gpu = on_gpu(folder)
    for condition in ({}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}):
        got = run(gpu, work(adapters), **condition)
        for request_id, output in expected.items():
            assert got.tokens(request_id) == output.token_ids, f"{request_id} under {condition}"


def test_in_bfloat16_the_answers_of_an_adapter_are_those_it_has_alone(tmp_path: Path) -> None:
    """For a few tokens: rounding may differ in company, as it may without adapters."""
    folder, adapters = tiny_models.save_directory("qwen3", tmp_path / "qwen3"), saved("qwen3", tmp_path)
    gpu = on_gpu(folder, "bfloat16")
    made = [one for one in work(adapters, 4) if "greedy" in one.request_id]
    together = run(gpu, made)
    alone = {one.request_id: run(gpu, [one]).tokens(one.request_id) for one in made}
    firsts = {name: tokens[0] for name, tokens in alone.items()}
    assert {name: together.tokens(name)[0] for name in alone} == firsts
    assert len(set(firsts.values())) > 2, "adapters that change nothing prove nothing"


def test_a_launch_does_not_wait_and_others_keep_their_graphs(tmp_path: Path) -> None:
    folder, adapters = tiny_models.save_directory("llama3", tmp_path / "llama3"), saved("llama3", tmp_path)
    gpu = on_gpu(folder)
    while gpu.runner.prepare():
        pass
    run(gpu, work(adapters, 4))
    forbid_waiting(gpu)
    run(gpu, work(adapters), overlap=True)
    replayed = []
    assert gpu.runner.graphs is not None
    replay = gpu.runner.graphs.replay
    gpu.runner.graphs.replay = lambda *given: replayed.append(1) or replay(*given)  # type: ignore[method-assign]
    run(gpu, [replace(work(adapters)[-1], request_id="adapted")], overlap=True)
    assert not replayed
    run(gpu, [request("plain", PROMPTS[0], 24)], overlap=True)
    assert len(replayed) >= 20


def test_an_adapter_that_made_room_gives_its_memory_back(tmp_path: Path) -> None:
    folder, adapters = tiny_models.save_directory("llama3", tmp_path / "llama3"), saved("llama3", tmp_path, 3)
    gpu = on_gpu(folder)
    kept = gpu.runner.adapters = LoraRows(gpu.runner.stepper.model, most=1)

    def held() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = held()
    taken = []
    for adapter in adapters:
        assert kept.place(adapter, kept.read(adapter).result(30), set())
        taken.append(held() - before)
    assert taken[0] > 0 and taken == [taken[0]] * 3
