"""KV caches of halves and of int8 on a CPU: the native step gives what the reference gives with the same cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from tests.kernels.steps import MAX_MODEL_LEN, config, random_cache, random_step, random_weights
from tests.kernels.test_fused_step import FAMILIES, STEPS, some_rows
from weft.kernels import REFERENCE
from weft.kernels.cpu.fused_step import FusedStep
from weft.kernels.kv_cache import Int8Cache, cache_bytes, cache_in, zero_cache
from weft.kernels.weights import DecoderWeights
from weft.model.dense import DenseConfig, DenseModel

CPU = torch.device("cpu")
TYPES = [torch.float16, torch.int8]
Cache = Tensor | list[Int8Cache]


def filled(c: DenseConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> Cache:
    """A cache that holds the same numbers each time, rounded."""
    numbers = random_cache(c, num_blocks, block_size)
    if dtype == torch.float16:
        return numbers.half()
    cache = cache_in(torch.zeros(cache_bytes(numbers.shape, dtype), dtype=torch.uint8), numbers.shape, dtype)
    slots = torch.arange(num_blocks * block_size)
    for layer, given in zip(cache, numbers, strict=True):
        assert isinstance(layer, Int8Cache)
        layer.write(slots, given.flatten(0, 1))
    return cache


def floats_of(cache: Cache, layer: int) -> Tensor:
    one = cache[layer]
    return one.read(torch.arange(len(one.numbers))) if isinstance(one, Int8Cache) else one.float()


def native(c: DenseConfig, weights: DecoderWeights, cache: Cache) -> FusedStep:
    rotations = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN).rotations
    return FusedStep(weights, c.heads, c.norm_eps, rotations, cache, 2)


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("family", ["gqa", "wide group", "everything", "odd sizes", "wide heads"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_logits_and_cache_are_the_references(dtype: torch.dtype, family: str, step_name: str) -> None:
    c = config(**FAMILIES[family])
    weights = random_weights(c)
    cache, wanted_cache = (filled(c, 64, 16, dtype) for _ in range(2))
    step = random_step(c, *STEPS[step_name], random_cache(c, 64, 16))
    model = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN)
    wanted = model.logits(model.forward(step.tokens, step.positions, wanted_cache, step.batch))
    run = native(c, weights, cache)
    logits = run(step.tokens, step.positions, step.batch)
    run.close()
    # What lies near the border of two numbers may be rounded to either.
    torch.testing.assert_close(logits, wanted, atol=1e-2, rtol=0)
    for layer in range(c.num_layers):
        torch.testing.assert_close(floats_of(cache, layer), floats_of(wanted_cache, layer), atol=0.03, rtol=0.01)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    c = config(hidden_size=96, intermediate_size=200)
    step = random_step(c, [1] * 9, [5, 16, 90, 128, 200, 17, 60, 1, 33], random_cache(c, 64, 16))
    run = native(c, random_weights(c), filled(c, 64, 16, dtype))
    together = run(*step)
    for start, stop in ((0, 1), (4, 5), (2, 5), (5, 9)):
        assert torch.equal(run(*some_rows(step, start, stop)), together[start:stop])
    run.close()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_overflow_is_seen(dtype: torch.dtype, value: float) -> None:
    c = config()
    weights = random_weights(c)
    weights.layers[0].qkv[c.heads.q_size + 3, 5] = value
    run = native(c, weights, filled(c, 16, 16, dtype))
    assert run(*random_step(c, [1], [20], random_cache(c, 16, 16))).isnan().all()
    run.close()


def test_int8_is_within_half_a_step_of_what_is_written() -> None:
    [cache] = zero_cache((1, 5, 16, 2, 3, 32), torch.int8, CPU)
    assert isinstance(cache, Int8Cache)
    given = torch.randn(20, 2, 3, 32) * torch.exp2(torch.randint(-9, 9, (20, 2, 3, 1)).float())
    given[3] = 0
    slots = torch.randperm(5 * 16)[:20]
    cache.write(slots, given)
    found = cache.read(torch.arange(5)).flatten(0, 1)
    steps = given.abs().amax(-1, keepdim=True) / 127
    assert bool(((found[slots] - given).abs() <= 0.501 * steps).all())
    found[slots] = 0
    assert not found.any()


@pytest.mark.parametrize(("dtype", "head_bytes"), [(torch.float16, 64), (torch.int8, 36), (torch.float32, 128)])
def test_it_has_the_size_that_is_planned_for(dtype: torch.dtype, head_bytes: int) -> None:
    assert cache_bytes((2, 5, 16, 2, 3, 32), dtype) == 2 * 5 * 16 * 2 * 3 * head_bytes
