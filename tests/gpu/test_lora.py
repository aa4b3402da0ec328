"""LoRA adapters on the GPU: the tokens of the CPU in any company and under graphs, without waiting, and nothing is
lost for the others."""

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
from tests.worker.driving import Driven, load, request, run, under_reference
from weft.hub.resolve import resolve
from weft.options import BackendOptions, CacheOptions, Config, ModelOptions, SchedulerOptions
from weft.types import Adapter, Request
from weft.worker.forward_step import ForwardOutput
from weft.worker.graphs import StepGraphs
from weft.worker.inputs import StepShape
from weft.worker.lora_rows import LoraRows
from weft.worker.worker import Worker

pytestmark = pytest.mark.gpu


def saved(name: str, folder: Path, count: int = 2, ranks: tuple[int, ...] = (4, 4, 4)) -> list[Adapter]:
    return [
        Adapter(
            name=f"style {i}",
            number=i,
            path=str(save_adapter(name, folder / f"adapter {i}", i, rank=ranks[i - 1])),
        )
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


def capture_all(gpu: Driven) -> None:
    while gpu.runner.prepare():
        pass


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots of adapters of each step that was replayed."""
    found: list[int] = []
    replay = StepGraphs.replay

    def watched(graphs: StepGraphs, shape: StepShape, packed: torch.Tensor) -> ForwardOutput:
        found.append(shape.slots)
        return replay(graphs, shape, packed)

    monkeypatch.setattr(StepGraphs, "replay", watched)
    return found


@pytest.mark.parametrize("name", tiny_models.SPECS)
def test_the_tokens_are_the_cpus(name: str, tmp_path: Path, replayed: list[int]) -> None:
    folder, adapters = tiny_models.save_directory(name, tmp_path / name), saved(name, tmp_path)
    expected = run(under_reference(load(folder)), work(adapters)).outputs
    gpu = on_gpu(folder)
    for condition in ({}, {"overlap": True}, {"max_prefill_chunk": 7}, {"force_preempt_every": 3}):
        got = run(gpu, work(adapters), **condition)
        for request_id, output in expected.items():
            assert got.tokens(request_id) == output.token_ids, f"{request_id} under {condition}"
        capture_all(gpu)
    assert sum(slots > 0 for slots in replayed) > 50


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


def test_steps_with_and_without_adapters_are_replayed_and_a_launch_does_not_wait(
    tmp_path: Path, replayed: list[int]
) -> None:
    folder, adapters = tiny_models.save_directory("llama3", tmp_path / "llama3"), saved("llama3", tmp_path)
    gpu = on_gpu(folder)
    run(gpu, work(adapters, 4))
    capture_all(gpu)
    forbid_waiting(gpu)
    run(gpu, work(adapters), overlap=True)
    replayed.clear()
    run(gpu, [replace(work(adapters)[-1], request_id="adapted")], overlap=True)
    assert len(replayed) >= 20 and all(replayed)
    replayed.clear()
    run(gpu, [request("plain", PROMPTS[0], 24)], overlap=True)
    assert len(replayed) >= 20 and not any(replayed)


def test_another_adapter_in_the_slot_of_a_captured_graph_gives_its_own_tokens(
    tmp_path: Path, replayed: list[int]
) -> None:
    folder, adapters = tiny_models.save_directory("llama3", tmp_path / "llama3"), saved("llama3", tmp_path, 3)
    gpu, cpu = on_gpu(folder), under_reference(load(folder))
    gpu.runner.adapters = LoraRows(gpu.runner.stepper, max_adapters=1)
    made = [replace(request(f"r{one.number}", PROMPTS[1], 24), adapter=one) for one in adapters]
    run(gpu, made[:1])
    capture_all(gpu)
    slots = gpu.runner.adapters.slots
    replayed.clear()
    found = [run(gpu, [one]).tokens(one.request_id) for one in made]
    assert gpu.runner.adapters.slots is slots and replayed.count(1) >= 60
    assert found == [run(cpu, [one]).tokens(one.request_id) for one in made]
    assert len({tuple(tokens) for tokens in found}) == 3, "adapters that change nothing prove nothing"


def test_an_adapter_of_a_larger_rank_than_the_slots_have_is_taken(tmp_path: Path, replayed: list[int]) -> None:
    folder = tiny_models.save_directory("llama3", tmp_path / "llama3")
    adapters = saved("llama3", tmp_path, 2, (4, 40))
    gpu, cpu = on_gpu(folder), under_reference(load(folder))
    run(gpu, work(adapters[:1], 4))
    capture_all(gpu)
    kept = gpu.runner.adapters
    assert kept.slots is not None and kept.slots.rank == 16
    expected = run(cpu, work(adapters)).outputs
    for _ in range(2):
        got = run(gpu, work(adapters), overlap=True)
        assert kept.slots.rank == 64
        assert {name: got.tokens(name) for name in expected} == {name: one.token_ids for name, one in expected.items()}
        capture_all(gpu)
    assert any(replayed)


@pytest.mark.parametrize("quantization", ["", "fp8", "int4", "int8"])
def test_graphs_give_what_eager_steps_give(quantization: str, tmp_path: Path, replayed: list[int]) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device that multiplies FP8")
    folder, adapters = tiny_models.save_directory("qwen3", tmp_path / "qwen3"), saved("qwen3", tmp_path)
    worker = Worker(
        Config(
            model=ModelOptions(device="cuda", max_model_len=256),
            backend=BackendOptions(quantization=quantization),
            cache=CacheOptions(num_blocks=128),
            scheduler=SchedulerOptions(max_num_seqs=12),
        ),
        resolve(str(folder)),
    )
    gpu = Driven(worker.runner, worker.limits)
    graphs, gpu.runner.graphs = gpu.runner.graphs, None
    eager = run(gpu, work(adapters), overlap=True).outputs
    assert not replayed
    gpu.runner.graphs = graphs
    capture_all(gpu)
    assert run(gpu, work(adapters), overlap=True).outputs == eager
    assert any(replayed)


def test_adapters_that_make_room_for_others_take_no_more_memory(tmp_path: Path) -> None:
    folder, adapters = tiny_models.save_directory("llama3", tmp_path / "llama3"), saved("llama3", tmp_path, 3)
    gpu = on_gpu(folder)
    kept = gpu.runner.adapters = LoraRows(gpu.runner.stepper, max_adapters=1)

    def held() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = held()
    taken = []
    for adapter in adapters:
        assert kept.place(adapter, kept.read(adapter).result(30), set())
        taken.append(held() - before)
    assert taken[0] > 0 and taken == [taken[0]] * 3
