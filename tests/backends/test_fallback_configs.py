"""What is tried when a load does not fit, and in which order."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from weft.backends.safe_loading import HALVINGS, LEAST_CONTEXT, fallback_configs, flags_between
from weft.errors import OutOfMemory
from weft.machine.memory import GIB, DeviceMemory
from weft.machine.planner import Place, Plan
from weft.options import CacheOptions, Config, ModelOptions, SchedulerOptions

TOO_MUCH = OutOfMemory("Too much.")
"""What the plan says, before any engine does."""


def plan(place: Place = "cuda", **changes: Any) -> Plan:
    plain = Plan(
        model="m", engine="native", place=place, device="", dtype="bfloat16",
        memory=DeviceMemory(total=80 * GIB), weights=GIB, kv=59 * GIB, kv_per_token=1024,
        num_blocks=100, max_model_len=32768, max_num_seqs=256,
        max_num_batched_tokens=8192, free_share=0.9, largest_context=20000, largest_batch=1,
    )  # fmt: skip
    return replace(plain, **changes)


def flags(config: Config, made: Plan | None) -> list[str]:
    """Return what every configuration changes against the one before."""
    tried = [config, *fallback_configs(config, lambda lower: made)]
    return [flags_between(one, other) for one, other in pairwise(tried)]


def test_utilisation_then_context_then_batch() -> None:
    asked = Config(cache=CacheOptions(kv_cache_memory_mb=9000, num_blocks=70))
    assert flags(asked, plan(problem=TOO_MUCH)) == [
        "--num-blocks 0 --kv-cache-memory-mb 0",
        "--gpu-memory-utilization 0.9",
        "--max-model-len 20000",
        "--max-model-len 16384",
        "--max-model-len 8192",
        "--max-model-len 4096",
        "--max-num-seqs 128 --max-num-batched-tokens 4096",
        "--max-num-seqs 64 --max-num-batched-tokens 2048",
        "--max-num-seqs 32 --max-num-batched-tokens 1024",
    ]


def test_an_engine_that_ran_out_of_memory_is_given_less_and_never_more() -> None:
    """The plan had room for it, and has 0.9 of the GPU free."""
    assert flags(Config(), plan())[:2] == ["--gpu-memory-utilization 0.65", "--max-model-len 20000"]
    assert flags(Config(), plan(free_share=0.4))[0] == "--gpu-memory-utilization 0.4"
    above = Config(cache=CacheOptions(gpu_memory_utilization=0.95))
    assert flags(above, plan())[0] == "--gpu-memory-utilization 0.75", "it had 0.85"


def test_it_is_not_given_so_little_that_the_weights_have_no_room() -> None:
    made = plan(weights=54 * GIB, kv=6 * GIB)
    assert flags(Config(), made)[0] == "--gpu-memory-utilization 0.68"
    assert flags(Config(), plan(weights=60 * GIB, kv=0))[0] == "--max-model-len 20000"


def test_a_cache_of_a_size_that_an_engine_has_no_memory_for_gives_way_to_a_smaller_one() -> None:
    """What the engine would take by itself is more: 0.75 of the GPU, and 512 MiB on a CPU."""
    asked = Config(cache=CacheOptions(kv_cache_memory_mb=20 * 1024))
    assert flags(asked, plan(kv=20 * GIB))[0] == "--kv-cache-memory-mb 0 --gpu-memory-utilization 0.16"
    small = Config(cache=CacheOptions(kv_cache_memory_mb=100))
    assert flags(small, plan("cpu", kv=GIB // 10))[0].startswith("--max-model-len")
    assert flags(asked, plan("cpu", kv=20 * GIB))[0] == "--kv-cache-memory-mb 0"


def test_a_share_that_the_plan_finds_too_small_goes_up_first_and_down_when_the_engine_says_so() -> None:
    """The plan has no room with 0.75."""
    tried = fallback_configs(Config(), lambda lower: plan(problem=TOO_MUCH if lower == Config() else None))
    shares = [config.cache.gpu_memory_utilization for config in itertools.islice(tried, 3)]
    assert shares == [0.9, 0.8, 0.8]


def test_the_utilisation_goes_down_as_well_to_what_is_free() -> None:
    assert flags(Config(), plan(free_share=0.4, problem=TOO_MUCH))[0] == "--gpu-memory-utilization 0.4"


def test_a_utilisation_that_is_all_there_is_is_not_tried_again() -> None:
    asked = Config(cache=CacheOptions(gpu_memory_utilization=0.9))
    assert flags(asked, plan(problem=TOO_MUCH))[0] == "--max-model-len 20000"


def test_what_is_free_is_asked_for_at_every_try() -> None:
    """Others may take memory meanwhile: what was free for one try is not for the next."""
    free = itertools.chain([0.7, 0.6, 0.6], itertools.repeat(0.5))
    tried = fallback_configs(Config(), lambda lower: plan(free_share=next(free), problem=TOO_MUCH))
    shares = [config.cache.gpu_memory_utilization for config in tried]
    assert shares[0] == 0.6 and set(shares[1:]) == {0.5}


def test_without_a_plan_it_begins_where_most_models_do() -> None:
    assert flags(Config(), None) == [
        "--max-model-len 8192",
        "--max-model-len 4096",
        "--max-model-len 2048",
        "--max-num-seqs 128 --max-num-batched-tokens 4096",
        "--max-num-seqs 64 --max-num-batched-tokens 2048",
        "--max-num-seqs 32 --max-num-batched-tokens 1024",
    ]


def test_a_context_that_is_short_is_not_made_shorter() -> None:
    asked = Config(model=ModelOptions(max_model_len=LEAST_CONTEXT))
    tried = flags(asked, plan(problem=TOO_MUCH, free_share=0.75, max_model_len=LEAST_CONTEXT))
    assert len(tried) == HALVINGS and all("--max-num-seqs" in flag for flag in tried)


def test_a_context_below_the_least_is_tried_where_no_longer_one_fits() -> None:
    tried = flags(Config(), plan(problem=TOO_MUCH, free_share=0.75, largest_context=700))
    assert tried[:4] == [f"--max-model-len {context}" for context in (16384, 8192, 4096, 700)]


def test_on_a_cpu_the_cache_shrinks_with_the_context() -> None:
    """It has a size of its own there; 33 KiB a token are 264 MiB for 8192 and a block of padding."""
    made = plan("cpu", kv_per_token=33 * 1024, max_model_len=32768, largest_context=8192)
    assert flags(Config(), made)[:3] == [
        "--max-model-len 16384 --kv-cache-memory-mb 512",
        "--max-model-len 8192 --kv-cache-memory-mb 265",
        "--max-model-len 4096 --kv-cache-memory-mb 133",
    ]


def test_a_step_never_has_fewer_tokens_than_requests() -> None:
    asked = Config(scheduler=SchedulerOptions(max_num_seqs=100, max_num_batched_tokens=100))
    for config in fallback_configs(asked, lambda lower: plan(max_num_seqs=100, max_num_batched_tokens=100)):
        assert config.scheduler.max_num_batched_tokens >= config.scheduler.max_num_seqs >= 1


def test_the_ladder_has_an_end() -> None:
    for made in (None, plan(), plan("cpu"), plan(max_num_seqs=1), plan(max_model_len=2**24, largest_context=0)):
        assert (
            len(list(fallback_configs(Config(cache=CacheOptions(num_blocks=9)), lambda lower, made=made: made))) <= 10
        )
