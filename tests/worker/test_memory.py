"""The memory plan: what fits, and what to change when it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weft.config import CacheOptions
from weft.errors import OutOfMemory
from weft.model.dense import DenseConfig
from weft.worker.memory import MIB, MemoryPlan, available_cpu_bytes, kv_bytes_per_token, num_parameters, plan_memory

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
PLENTY = 64 * 1024 * MIB


def plan(cache: CacheOptions | None = None, max_model_len: int = 0, available_bytes: int = PLENTY) -> MemoryPlan:
    return plan_memory(
        GEOMETRY,
        cache or CacheOptions(),
        max_model_len=max_model_len,
        dtype=torch.float32,
        available_bytes=available_bytes,
    )


def test_the_cache_takes_the_memory_it_is_given() -> None:
    made = plan(CacheOptions(kv_cache_memory_mb=16))
    assert kv_bytes_per_token(GEOMETRY, torch.float32) == 16 * 1024
    assert made.num_blocks == 16 * MIB // (16 * 16 * 1024) == 64
    assert made.kv_bytes == 16 * MIB
    # One block is the null block.
    assert made.max_model_len == 63 * 16


def test_half_precision_holds_twice_as_much() -> None:
    options = {"max_model_len": 0, "available_bytes": PLENTY}
    single = plan_memory(GEOMETRY, CacheOptions(kv_cache_memory_mb=16), dtype=torch.float32, **options)
    half = plan_memory(GEOMETRY, CacheOptions(kv_cache_memory_mb=16), dtype=torch.bfloat16, **options)
    assert half.num_blocks == 2 * single.num_blocks
    assert 2 * half.weights_bytes == single.weights_bytes


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
    assert flags_of(caught.value)["num-blocks"] >= 2


def test_weights_and_cache_beyond_the_machine_are_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match="weights need 44 MiB and the cache 16 MiB; 59 MiB are free") as caught:
        plan(CacheOptions(kv_cache_memory_mb=16), available_bytes=59 * MIB)
    assert "--kv-cache-memory-mb" in caught.value.hint
    assert plan(CacheOptions(kv_cache_memory_mb=8), available_bytes=59 * MIB).num_blocks == 32


def test_parameters_are_counted() -> None:
    layer = 4 * 512 * 512 + 3 * 512 * 1024 + 2 * 512
    assert num_parameters(GEOMETRY) == pytest.approx(4 * layer + 2 * 1000 * 512, rel=1e-3)
    assert num_parameters(GEOMETRY) - num_parameters(replace(GEOMETRY, tied_embeddings=True)) == 1000 * 512


def test_this_machine_has_memory() -> None:
    assert 0 < available_cpu_bytes() < 2**50
