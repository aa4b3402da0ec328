"""The memory plan: what fits, and what to change when it does not."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weft.engine_stats import MemoryLedger
from weft.errors import OutOfMemory
from weft.machine.memory import (
    GIB,
    GRAPH_SLACK_BYTES,
    MIB,
    DeviceMemory,
    MemoryPlan,
    graphs_bytes,
    kv_bytes_per_token,
    num_parameters,
    plan_memory,
)
from weft.model.dense import DenseConfig
from weft.options import CacheOptions
from weft.worker.graphs import graph_shapes
from weft.worker.memory_profile import available_cpu_bytes, cache_shape, gpu_share, ledger_table, memory_usage
from weft.worker.worker import _kv_cache

# 16 KiB of keys and values for a token in float32: 4 layers * 2 * 8 heads * 64 dimensions * 4 bytes.
GEOMETRY = DenseConfig(
    family="llama",
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=1000,
    max_position=4096,
    norm_eps=1e-5,
    rope_theta=10000.0,
)
WEIGHTS = num_parameters(GEOMETRY) * 4
PLENTY = DeviceMemory(total=64 * GIB)
GPU = DeviceMemory(
    total=1000 * MIB, share=0.5, others=100 * MIB, libraries=30 * MIB, activations=200 * MIB, graphs=50 * MIB
)
"""Of 500 MiB 220 are left for weights and cache: 44 and 176."""


def plan(
    cache: CacheOptions | None = None,
    max_model_len: int = 0,
    memory: DeviceMemory = PLENTY,
    dtype: torch.dtype = torch.float32,
) -> MemoryPlan:
    return plan_memory(
        GEOMETRY, cache or CacheOptions(), memory, max_model_len=max_model_len, dtype=dtype, weights_bytes=WEIGHTS
    )


def test_the_cache_takes_the_memory_it_is_given() -> None:
    made = plan(CacheOptions(kv_cache_memory_mb=16))
    assert kv_bytes_per_token(GEOMETRY, torch.float32, CacheOptions()) == 16 * 1024
    assert made.num_blocks == 16 * MIB // (16 * 16 * 1024) == 64
    assert made.kv_bytes == 16 * MIB
    # One block is the null block.
    assert made.max_model_len == 63 * 16


def test_half_precision_holds_twice_as_much() -> None:
    single = plan(CacheOptions(kv_cache_memory_mb=16))
    half = plan(CacheOptions(kv_cache_memory_mb=16), dtype=torch.bfloat16)
    assert half.num_blocks == 2 * single.num_blocks


def test_fp8_holds_nearly_four_times_as_much_as_single_precision() -> None:
    """64 numbers of a head have a scale of two bytes."""
    cache = CacheOptions(kv_cache_memory_mb=16, kv_cache_dtype="fp8")
    assert kv_bytes_per_token(GEOMETRY, torch.float32, cache) == 4 * 2 * 8 * (64 + 2)
    assert kv_bytes_per_token(GEOMETRY, torch.float32, CacheOptions(kv_cache_dtype="int8")) == 4 * 2 * 8 * (64 + 4)
    assert kv_bytes_per_token(GEOMETRY, torch.float32, CacheOptions(kv_cache_dtype="fp16")) == 4 * 2 * 8 * 64 * 2
    assert plan(cache).num_blocks == 16 * MIB // (16 * 4 * 2 * 8 * 66)
    with_draft = plan_memory(
        GEOMETRY, cache, PLENTY, max_model_len=0, dtype=torch.float32, weights_bytes=WEIGHTS, draft=GEOMETRY
    )
    assert with_draft.num_blocks == plan(cache).num_blocks // 2


def test_the_context_is_the_models_where_the_cache_holds_it() -> None:
    assert plan().max_model_len == GEOMETRY.max_position
    assert plan(max_model_len=100).max_model_len == 100


def test_num_blocks_is_taken_as_given() -> None:
    made = plan(CacheOptions(num_blocks=11, block_size=8, kv_cache_memory_mb=1))
    assert (made.num_blocks, made.max_model_len) == (11, 80)
    assert made.kv_bytes == 11 * 8 * 16 * 1024


def test_a_context_beyond_the_models_is_refused_with_the_limit() -> None:
    with pytest.raises(OutOfMemory, match="5000 tokens is beyond the model's 4096") as caught:
        plan(max_model_len=5000)
    assert "--max-model-len 4096" in caught.value.hint
    assert plan(max_model_len=4096).max_model_len == 4096


def flags_of(error: OutOfMemory) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", error.hint)}


@pytest.mark.parametrize("cache", [CacheOptions(kv_cache_memory_mb=16), CacheOptions(num_blocks=20, block_size=32)])
def test_every_flag_that_the_error_names_would_fit(cache: CacheOptions) -> None:
    with pytest.raises(OutOfMemory, match=r"needs \d+ cache blocks; there are \d+") as caught:
        plan(cache, max_model_len=3000)
    flags = flags_of(caught.value)
    assert {"max-model-len", "num-blocks"} <= flags.keys()
    for name, value in flags.items():
        changed: dict[str, Any] = {"cache": cache, "max_model_len": 3000}
        if name == "max-model-len":
            changed["max_model_len"] = value
        else:
            changed["cache"] = replace(cache, **{name.replace("-", "_"): value})
        assert plan(**changed).max_model_len == changed["max_model_len"], name


def test_the_flags_are_the_nearest_that_fit() -> None:
    cache = CacheOptions(kv_cache_memory_mb=16)
    with pytest.raises(OutOfMemory) as caught:
        plan(cache, max_model_len=3000)
    flags = flags_of(caught.value)
    with pytest.raises(OutOfMemory):
        plan(cache, max_model_len=flags["max-model-len"] + 1)
    with pytest.raises(OutOfMemory):
        plan(replace(cache, num_blocks=flags["num-blocks"] - 1), max_model_len=3000)
    with pytest.raises(OutOfMemory):
        plan(replace(cache, kv_cache_memory_mb=flags["kv-cache-memory-mb"] - 1), max_model_len=3000)


def test_one_block_is_too_few_for_any_context() -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan(CacheOptions(num_blocks=1))
    assert plan(CacheOptions(num_blocks=flags_of(caught.value)["num-blocks"], block_size=1)).max_model_len == 2


def test_a_context_of_one_token_is_refused() -> None:
    """It holds no answer."""
    with pytest.raises(OutOfMemory, match="no prompt and answer"):
        plan(max_model_len=1)
    assert plan(max_model_len=2).max_model_len == 2


def test_weights_and_cache_beyond_the_machine_are_refused_with_the_numbers() -> None:
    machine = DeviceMemory(total=59 * MIB)
    with pytest.raises(OutOfMemory, match="weights need 44 MiB and the cache 16 MiB; 59 MiB are free") as caught:
        plan(CacheOptions(kv_cache_memory_mb=16), memory=machine)
    assert "--kv-cache-memory-mb" in caught.value.hint and "--gpu-memory-utilization" not in caught.value.hint
    assert plan(CacheOptions(kv_cache_memory_mb=8), memory=machine).num_blocks == 32


def test_parameters_are_counted() -> None:
    layer = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
    assert num_parameters(GEOMETRY) == pytest.approx(4 * layer + 2 * 1000 * 512, rel=1e-3)
    assert num_parameters(GEOMETRY) - num_parameters(replace(GEOMETRY, tied_embeddings=True)) == 1000 * 512


def test_this_machine_has_memory() -> None:
    assert 0 < available_cpu_bytes() < 2**50


def test_the_cache_has_the_size_that_was_planned() -> None:
    made = plan(CacheOptions(num_blocks=3))
    assert torch.empty(cache_shape(GEOMETRY, 3, 16)).nbytes == made.kv_bytes


def test_the_cache_of_a_cpu_takes_memory_as_it_is_used() -> None:
    made = plan(CacheOptions(kv_cache_memory_mb=64))
    cpu = torch.device("cpu")
    before, _ = memory_usage(cpu)
    cache = _kv_cache(cache_shape(GEOMETRY, made.num_blocks, 16), torch.float32)
    cache[:, 0, 0] = 1
    after, _ = memory_usage(cpu)
    assert cache.nbytes == 64 * MIB and after - before < MIB


# A GPU.


def test_the_cache_of_a_gpu_gets_what_is_left_of_the_share() -> None:
    assert GPU.available == 220 * MIB
    assert plan(memory=GPU).num_blocks == (220 * MIB - WEIGHTS) // (16 * 16 * 1024)


def test_what_others_use_of_a_gpu_is_not_ours_to_take() -> None:
    """Weft may take half of it; another process has more than the other half."""
    crowded = replace(GPU, others=700 * MIB)
    assert crowded.available == 50 * MIB
    assert plan(memory=crowded).kv_bytes <= 50 * MIB - WEIGHTS


def test_the_ledger_of_a_gpu_adds_up() -> None:
    made = plan(memory=GPU)
    ledger = GPU.ledger(WEIGHTS, made.kv_bytes)
    parts = ledger.weights + ledger.activations + ledger.graphs + ledger.kv + ledger.others + ledger.spare
    assert parts == ledger.total == 1000 * MIB
    # The other half, without what is used of it already, and less than a block.
    assert 430 * MIB <= ledger.spare < 430 * MIB + 16 * 16 * 1024


def test_the_ledger_is_a_table_that_a_reader_can_add() -> None:
    ledger = MemoryLedger(total=80 * GIB, weights=14 * GIB, activations=GIB, graphs=GIB, kv=44 * GIB, others=GIB)
    lines = ledger_table(ledger).splitlines()
    assert [line.split()[0] for line in lines] == [
        "weights", "activations", "graphs", "KV", "others", "spare", "total",
    ]  # fmt: skip
    sizes = [float(line.split(" GiB")[0].split()[-1]) for line in lines]
    assert sizes == [14, 1, 1, 44, 1, 19, 80]
    assert lines[0].endswith("17.5%") and len({len(line) for line in lines}) == 1


def test_the_share_that_would_fit_is_named_and_fits() -> None:
    for cache, context in ((CacheOptions(), 4096), (CacheOptions(kv_cache_memory_mb=300), 0)):
        small = replace(GPU, share=0.35)
        with pytest.raises(OutOfMemory) as caught:
            plan(cache, context, small)
        (share,) = re.findall(r"--gpu-memory-utilization (\d\.\d\d)", caught.value.hint)
        plan(cache, context, replace(small, share=float(share)))
        with pytest.raises(OutOfMemory):
            plan(cache, context, replace(small, share=float(share) - 0.01))


def test_more_blocks_are_no_advice_where_the_share_has_no_room_for_them() -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan(memory=replace(GPU, share=0.35), max_model_len=4096)
    flags = flags_of(caught.value)
    assert "num-blocks" not in flags and "kv-cache-memory-mb" not in flags
    assert plan(memory=replace(GPU, share=0.35), max_model_len=flags["max-model-len"])


def test_a_share_that_would_be_lowered_is_named_with_the_flag_that_keeps_it() -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan(CacheOptions(kv_cache_memory_mb=600), memory=replace(GPU, others=0))
    assert "--gpu-memory-utilization 0.93 or more with --insist-gpu-memory" in caught.value.hint


def test_no_share_is_named_where_the_memory_is_not_there() -> None:
    with pytest.raises(OutOfMemory) as caught:
        plan(CacheOptions(kv_cache_memory_mb=700), memory=GPU)
    assert "--gpu-memory-utilization" not in caught.value.hint


@pytest.mark.parametrize(
    ("asked", "insists", "used"),
    [
        (0.75, False, 0.75), (0.88, False, 0.88), (0.90, False, 0.90), (0.91, False, 0.85), (1.0, False, 0.85),
        (0.91, True, 0.91), (1.0, True, 1.0),
    ],
)  # fmt: skip
def test_a_share_above_what_is_safe_is_lowered_with_a_word(
    asked: float, insists: bool, used: float, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert gpu_share(CacheOptions(gpu_memory_utilization=asked, insist_gpu_memory=insists)) == used
    assert len(caplog.records) == (asked != used)
    assert all("--insist-gpu-memory" in record.getMessage() for record in caplog.records)


def test_graphs_are_kept_room_for_their_logits() -> None:
    shapes = graph_shapes(64)
    logits = sum(shape.samples for shape in shapes) * GEOMETRY.vocab_size * 2
    assert logits > 10 * 64 * GEOMETRY.vocab_size * 2, "each graph keeps its own"
    estimate = graphs_bytes(GEOMETRY, torch.bfloat16, shapes) - GRAPH_SLACK_BYTES
    assert logits < estimate < logits + 64 * MIB
    assert graphs_bytes(GEOMETRY, torch.float32, shapes) - GRAPH_SLACK_BYTES == 2 * estimate
