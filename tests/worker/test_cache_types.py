"""A KV cache of e4m3 numbers under the reference ops, and of halves and int8 by a CPU's own: what it rounds, and that
answers depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny_models import VOCAB_SIZE
from tests.worker.driving import Driven, load, request, run, watched_logits
from tests.worker.subjects import Subject, alone, cached_chunks, preempted, tiny_pool
from weft.errors import ConfigError
from weft.hub.resolve import resolve
from weft.kernels import REFERENCE, ops_for
from weft.kernels.fp8 import E4M3, E4M3_MAX
from weft.kernels.kv_cache import Fp8Cache, quantise_heads, zero_cache
from weft.model.dense import DenseModel
from weft.options import CacheOptions, Config, ModelOptions
from weft.worker.forward_step import Stepper
from weft.worker.memory_profile import cache_shape
from weft.worker.rows import RowTable
from weft.worker.runner import Runner
from weft.worker.worker import Worker

CPU = torch.device("cpu")


def test_a_scale_is_the_least_power_of_two_with_which_a_head_fits() -> None:
    largest = torch.tensor([448.0, 448.5, 1.0, 1.75, 1.7500001, 3e38, 2.0**-118, 1e-38])
    _, scales = quantise_heads(torch.stack([-largest, largest / 3, torch.zeros_like(largest)], dim=-1))
    scales = scales.float()
    assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5)), "no powers of two"
    assert bool((largest / scales <= E4M3_MAX).all())
    # Of smaller numbers bfloat16 has no smaller scale.
    assert bool((largest / (scales / 2) > E4M3_MAX)[:-1].all()) and scales[-1] == 2.0**-126


def test_heads_are_rounded_to_four_digits_of_their_own() -> None:
    heads = torch.randn(50, 3, 64) * torch.exp2(torch.randint(-30, 30, (50, 3, 1)).float())
    numbers, scales = quantise_heads(heads)
    found, most = numbers.float() * scales[..., None].float(), heads.abs().amax(-1, keepdim=True)
    # Half of a last digit; below e4m3's least exponent the digits are those of the head's largest number.
    assert bool(((found - heads).abs() <= torch.maximum(heads.abs() / 16, most * 2.0**-17)).all())
    zeros, least = quantise_heads(torch.zeros(2, 64))
    assert not zeros.float().any() and bool((least == 2.0**-126).all())
    assert bool(quantise_heads(torch.full((1, 64), float("nan")))[0].float().isnan().all())


def test_what_is_written_is_read() -> None:
    [cache] = zero_cache((1, 5, 16, 2, 3, 32), E4M3, CPU)
    assert isinstance(cache, Fp8Cache)
    keys_values = torch.randn(20, 2, 3, 32) * torch.exp2(torch.randint(-9, 9, (20, 2, 3, 1)).float())
    slots = torch.randperm(5 * 16)[:20]
    cache.write(slots, keys_values)
    numbers, scales = quantise_heads(keys_values)
    blocks = cache.read(torch.tensor([4, 0, 1, 2, 3])).roll(-1, dims=0).flatten(0, 1)
    assert torch.equal(blocks[slots], numbers.float() * scales[..., None].float())
    blocks[slots] = 0
    assert not blocks.any()


def test_it_has_the_size_that_is_planned_for() -> None:
    caches = zero_cache((2, 5, 16, 2, 3, 32), E4M3, CPU)
    assert isinstance(caches, list)
    assert sum(part.nbytes for one in caches for part in one) == 2 * 5 * 16 * 2 * 3 * (32 + 2)


def with_fp8_cache(driven: Driven, name: str = "") -> Driven:
    """The same weights, under the reference ops or those of a device, with a cache of e4m3."""
    loaded, limits = driven.runner.stepper.model, driven.limits
    model = DenseModel(loaded.config, loaded.weights, ops_for(name) if name else REFERENCE, limits.max_model_len)
    table = RowTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, CPU)
    cache = zero_cache(cache_shape(model.config, limits.num_blocks, limits.block_size), E4M3, CPU)
    return Driven(Runner(Stepper(model, cache, table)), limits)


@pytest.fixture(scope="module")
def floats(tiny_directory: Callable[[str], Path]) -> Driven:
    return load(tiny_directory("qwen3"), num_blocks=256)


@pytest.fixture(scope="module")
def tiny(floats: Driven) -> Subject:
    prompts = [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 33), (11, 3, 100))]
    return alone(with_fp8_cache(floats), prompts, 30)


@pytest.fixture(scope="module", params=["fp16", "int8"])
def on_cpu(request: pytest.FixtureRequest, tiny_directory: Callable[[str], Path]) -> Driven:
    return load(tiny_directory("qwen3"), num_blocks=256, kv_cache_dtype=request.param)


def test_logits_of_a_cpu_are_near_those_of_floats(floats: Driven, on_cpu: Driven) -> None:
    seen = []
    for driven in (floats, on_cpu):
        with watched_logits() as logits:
            run(driven, [request("r", list(range(3, 60)), 1)])
        seen.append(logits[0])
    assert 1e-6 < (seen[1] - seen[0]).norm() / seen[0].norm() < 0.03


def test_answers_of_a_cpu_depend_on_nothing_else(tiny: Subject, on_cpu: Driven) -> None:
    subject = alone(on_cpu, tiny.prompts, 30)
    subject.check(cached_chunks(subject))
    subject.check(preempted(subject, enable_prefix_caching=True))
    subject.check(tiny_pool(subject, enable_prefix_caching=False))


def test_logits_are_near_those_of_floats(floats: Driven) -> None:
    prompt = list(range(3, 60))
    seen = []
    for driven in (floats, with_fp8_cache(floats), with_fp8_cache(floats, "cpu")):
        with watched_logits() as logits:
            run(driven, [request("r", prompt, 1)])
        seen.append(logits[0])
    exact, rounded, of_cpu = seen
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.1
    torch.testing.assert_close(of_cpu, rounded, atol=1e-2, rtol=0)


def test_in_chunks_over_a_cached_prefix(tiny: Subject) -> None:
    tiny.check(cached_chunks(tiny))


@pytest.mark.parametrize("caching", [True, False])
def test_preempted(tiny: Subject, caching: bool) -> None:
    tiny.check(preempted(tiny, enable_prefix_caching=caching))
    tiny.check(tiny_pool(tiny, enable_prefix_caching=caching))


def test_a_cpu_refuses_it(tiny_directory: Callable[[str], Path]) -> None:
    config = Config(model=ModelOptions(device="cpu"), cache=CacheOptions(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="A CPU has no FP8: --kv-cache-dtype fp8 needs an NVIDIA GPU") as refused:
        Worker(config, resolve(str(tiny_directory("qwen3"))))
    assert refused.value.hint == "Leave --kv-cache-dtype out."
