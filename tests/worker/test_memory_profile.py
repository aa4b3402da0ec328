"""The profiling step: as large as any step can be, and leaving nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduler.simulation import limits
from tests.worker.driving import load, request, run
from weft.errors import OutOfMemory
from weft.machine.memory import DeviceMemory
from weft.worker import memory_profile
from weft.worker.memory_profile import compute, largest_step, measured

pytestmark = pytest.mark.usefixtures("one_thread")


@given(
    seqs=st.integers(1, 40),
    budget=st.integers(0, 3000),
    chunk=st.integers(1, 500),
    context=st.integers(2, 600),
)
def test_it_is_the_largest_that_the_limits_allow(seqs: int, budget: int, chunk: int, context: int) -> None:
    shape = limits(
        max_num_seqs=seqs, max_num_batched_tokens=seqs + budget, max_prefill_chunk=chunk, max_model_len=context
    )
    plan = largest_step(shape)
    assert [row.row for row in plan.rows] == list(range(seqs)) and all(row.samples for row in plan.rows)
    longest = min(chunk, context - 1)
    assert plan.num_tokens == min(seqs + budget, seqs * longest)
    assert all(1 <= row.count <= longest for row in plan.rows)
    # The token that a row samples has a place in the row table.
    assert max(row.start + row.count for row in plan.rows) == context - 1
    assert [len(admission.token_ids) for admission in plan.admit] == [row.start + row.count for row in plan.rows]


def test_with_the_limits_of_a_gpu_it_has_prompts_and_decodes() -> None:
    gpu = limits(max_num_seqs=256, max_num_batched_tokens=8192, max_prefill_chunk=2048, max_model_len=4096)
    counts = [row.count for row in largest_step(gpu).rows]
    assert counts[:4] == [2048, 2048, 2048, 1796] and counts[4:] == [1] * 252


def test_it_leaves_nothing_behind(tiny_directory: Callable[[str], Path]) -> None:
    work = [request(f"r{i}", [i, 7, 300 - i], 12, temperature=0.7 * (i % 2), seed=i) for i in range(5)]
    fresh, profiled = (load(tiny_directory("llama3")) for _ in range(2))
    stepper = profiled.runner.stepper
    compute(largest_step(profiled.limits), stepper.model, stepper.table, stepper.model.weights.dtype)
    assert not stepper.table.num_blocks and not stepper.table.blocks.any() and not stepper.kv_cache.any()
    assert not stepper.table.tokens[stepper.table.padding_row].any()
    assert run(profiled, work).outputs == run(fresh, work).outputs


def test_a_model_that_gives_no_numbers_is_measured_all_the_same(tiny_directory: Callable[[str], Path]) -> None:
    driven = load(tiny_directory("llama2"), max_num_seqs=3)
    stepper = driven.runner.stepper
    stepper.model.weights.norm.fill_(float("nan"))
    compute(largest_step(driven.limits), stepper.model, stepper.table, stepper.model.weights.dtype)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes above the weights at the step's peak, 300 after it; 700 of 100,000 are neither free nor torch's."""
    said = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_reserved": lambda device: 21_000,
        "memory_reserved": lambda device: 20_300,
        "mem_get_info": lambda device: (79_000, 100_000),
    }
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, answer)


def test_what_is_measured_becomes_the_room(
    pretended_gpu: None, tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = load(tiny_directory("llama2"), max_num_seqs=3)
    stepper = driven.runner.stepper
    monkeypatch.setattr(type(stepper.model.weights), "num_bytes", 20_000)
    before = DeviceMemory(total=100_000, share=0.5, others=600, graphs=50)
    room = measured(before, [stepper.model], stepper.table, driven.limits, torch.float32)
    assert room == DeviceMemory(total=100_000, share=0.5, others=700, libraries=100, activations=1000, graphs=50)
    assert room.available == 50_000 - 100 - 1000 - 50


def test_a_step_that_does_not_fit_is_refused_with_smaller_limits(
    pretended_gpu: None, tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = load(tiny_directory("llama2"), max_num_seqs=4)
    stepper = driven.runner.stepper

    def too_large(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(memory_profile, "compute", too_large)
    with pytest.raises(OutOfMemory, match="1020 tokens of 4 requests does not fit") as caught:
        measured(DeviceMemory(total=100_000), [stepper.model], stepper.table, driven.limits, torch.float32)
    assert caught.value.hint == "Set --max-num-batched-tokens 510 and --max-num-seqs 2."
