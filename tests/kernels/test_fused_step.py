"""The native step gives the reference's logits and the reference's cache."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from tests.kernels.steps import MAX_MODEL_LEN, Step, config, random_cache, random_step, random_weights
from weft.kernels import REFERENCE, AttentionBatch, InputEmbeds
from weft.kernels.cpu import native_step
from weft.kernels.cpu.fused_step import FusedStep
from weft.kernels.cpu.ops import argmax_rows
from weft.kernels.weights import DecoderWeights
from weft.model.dense import DenseConfig, DenseModel

FAMILIES = {
    "gqa": {},
    "mha": {"num_heads": 3, "num_kv_heads": 3},
    "mqa": {"num_heads": 5, "num_kv_heads": 1},
    "wide group": {"num_heads": 20, "num_kv_heads": 1},
    "tied": {"tied_embeddings": True},
    "biases": {"qkv_bias": True, "output_bias": True},
    "qk norm": {"qk_norm": True, "head_dim": 64},
    "everything": {"qkv_bias": True, "output_bias": True, "qk_norm": True, "tied_embeddings": True},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 59, "head_dim": 34, "vocab_size": 211},
    "wide heads": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "hidden_size": 130},
    "large": {"hidden_size": 192, "intermediate_size": 768, "vocab_size": 1003, "num_layers": 3},
}

STEPS = {
    "one decode": ([1], [40]),
    "first token": ([1], [1]),
    "block borders": ([1] * 5, [15, 16, 17, 32, 33]),
    "parts": ([1] * 4, [128, 129, 300, 127]),
    "seven decodes": ([1] * 7, [3, 90, 41, 200, 1, 16, 77]),
    "prompt": ([33], [33]),
    "chunk": ([21], [150]),
    "mixed": ([1, 1, 1, 9, 40], [50, 130, 257, 9, 200]),
}


def expected(c: DenseConfig, weights: DecoderWeights, cache: Tensor, step: Step) -> Tensor:
    model = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN)
    return model.logits(model.forward(step.tokens, step.positions, cache, step.batch))


def native(c: DenseConfig, weights: DecoderWeights, cache: Tensor, num_threads: int = 2) -> FusedStep:
    rotations = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN).rotations
    return FusedStep(weights, c.heads, c.norm_eps, rotations, cache, num_threads)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no kernel has written is NaN."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cache_are_the_references(family: str, step_name: str) -> None:
    c = config(**FAMILIES[family])
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    # Nothing may be read from the null block.
    cache[:, 0] = float("nan")
    step = random_step(c, *STEPS[step_name], cache)
    wanted_cache = cache.clone()
    wanted = expected(c, weights, wanted_cache, step)
    run = native(c, weights, cache)
    logits = run(step.tokens, step.positions, step.batch)
    run.close()
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, wanted_cache, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert torch.equal(argmax_rows(logits), wanted.argmax(-1))


@pytest.mark.parametrize("block_size", [1, 5, 8, 32])
def test_block_sizes(block_size: int) -> None:
    c = config()
    weights = random_weights(c)
    cache = random_cache(c, 1 + 600 // block_size, block_size)
    step = random_step(c, [1, 1, 7], [140, 33, 60], cache)
    wanted = expected(c, weights, cache.clone(), step)
    run = native(c, weights, cache)
    torch.testing.assert_close(run(*step), wanted, atol=1e-4, rtol=1e-4)
    run.close()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_thread_counts_agree_to_the_bit(num_threads: int) -> None:
    c = config(hidden_size=96, intermediate_size=200)
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    step = random_step(c, [1] * 9, [5, 16, 90, 128, 129, 17, 60, 1, 33], cache)
    alone, team = native(c, weights, cache, 1), native(c, weights, cache, num_threads)
    wanted = alone(*step)
    for _ in range(20):
        assert torch.equal(team(*step), wanted)
    team.close()


def some_rows(step: Step, start: int, stop: int) -> Step:
    """The decodes from `start` to `stop` of a step of decodes."""
    batch = AttentionBatch(
        num_decodes=stop - start,
        query_starts=torch.arange(stop - start + 1),
        lengths=step.batch.lengths[start:stop],
        block_tables=step.batch.block_tables[start:stop],
        slots=step.batch.slots[start:stop],
    )
    return Step(step.tokens[start:stop], step.positions[start:stop], batch)


def test_a_row_does_not_depend_on_the_others() -> None:
    c = config(hidden_size=96, intermediate_size=200)
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1] * 9, [5, 16, 90, 128, 200, 17, 60, 1, 33], cache)
    together = run(*step)
    for start, stop in ((0, 1), (1, 2), (4, 5), (3, 5), (2, 5), (5, 9), (1, 6), (0, 7)):
        assert torch.equal(run(*some_rows(step, start, stop)), together[start:stop])
    run.close()


def test_rows_choose_the_logits() -> None:
    c = config()
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1, 12, 30], [44, 12, 90], cache)
    every = run(*step)
    assert torch.equal(run(*step, step.last_rows), every[step.last_rows])
    assert run(*step, torch.tensor([], dtype=torch.int64)).shape == (0, c.vocab_size)
    run.close()


def test_hidden_states_come_beside_logits_and_change_none_of_them() -> None:
    c = config()
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    run = native(c, weights, cache)
    step = random_step(c, [1, 12, 30], [44, 12, 90], cache)
    model = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN)
    wanted = model.forward(step.tokens, step.positions, cache.clone(), step.batch)
    plain = run(*step, step.last_rows)
    rows = torch.tensor([5, 0, 42, 13])
    logits, hidden = run.with_hidden(*step, step.last_rows, rows)
    assert torch.equal(logits, plain)
    torch.testing.assert_close(hidden, wanted[rows], atol=1e-4, rtol=1e-4)
    none = torch.tensor([], dtype=torch.int64)
    alone, every = run.with_hidden(*step, none, torch.arange(43))
    assert alone.shape == (0, c.vocab_size) and torch.equal(every[rows], hidden)
    assert run.with_hidden(*step, step.last_rows, none)[1].shape == (0, c.hidden_size)
    assert torch.equal(run(*step, step.last_rows), plain)
    run.close()


@pytest.mark.parametrize("at", [[0], [5, 4, 12], list(range(43))], ids=str)
def test_input_embeds_stand_in_the_place_of_embeddings(at: list[int]) -> None:
    c = config()
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    step = random_step(c, [1, 12, 30], [44, 12, 90], cache)
    values = torch.randn(len(at), c.hidden_size, generator=torch.Generator().manual_seed(3))
    model = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN)
    input_embeds = InputEmbeds(torch.tensor(at), values)
    wanted = model.logits(
        model.forward(step.tokens, step.positions, cache.clone(), step.batch, input_embeds=input_embeds)
    )
    run = native(c, weights, cache)
    plain = run(*step)
    torch.testing.assert_close(run(*step, input_embeds=input_embeds), wanted, atol=1e-4, rtol=1e-4)
    own = InputEmbeds(input_embeds.at, weights.embedding[step.tokens[input_embeds.at]])
    assert torch.equal(run(*step, input_embeds=own), plain), "a token's own embedding is no other token"
    run.close()


def test_input_embeds_have_a_place_and_the_right_width() -> None:
    c = config()
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1, 12], [44, 12], cache)
    with pytest.raises(IndexError, match="places of input embeds"):
        run(*step, input_embeds=InputEmbeds(torch.tensor([13]), torch.zeros(1, c.hidden_size)))
    with pytest.raises(IndexError, match="input embeds must have"):
        run(*step, input_embeds=InputEmbeds(torch.tensor([0]), torch.zeros(1, c.hidden_size - 1)))
    run.close()


def test_rows_point_at_tokens() -> None:
    c = config()
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1, 12], [44, 12], cache)
    inside, outside = torch.tensor([0]), torch.tensor([13])
    for rows, hidden_rows, message in (
        (outside, inside, "rows of a step"),
        (inside, outside, "rows of hidden states"),
        (torch.zeros(14, dtype=torch.int64), inside, "no more rows of logits than tokens"),
    ):
        with pytest.raises(IndexError, match=message):
            run.with_hidden(*step, rows, hidden_rows)
    run.close()


def test_callers_on_several_threads_take_turns() -> None:
    c = config()
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1] * 9, [5, 16, 90, 128, 200, 17, 60, 1, 33], cache)
    wanted = run(*step)
    wrong: list[int] = []

    def work(count: int) -> None:
        for _ in range(10):
            if not torch.equal(run(*some_rows(step, 0, count)), wanted[:count]):
                wrong.append(count)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 9, 4, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    run.close()


def test_overflow_is_seen() -> None:
    c = config()
    weights = random_weights(c)
    weights.layers[1].down[3, 5] = float("nan")
    cache = random_cache(c, 16, 16)
    run = native(c, weights, cache)
    assert run(*random_step(c, [1], [20], cache)).isnan().all()
    run.close()


@pytest.mark.parametrize("what", ["tokens", "positions", "slots", "block_tables"])
@pytest.mark.parametrize("value", [-1, 10**6])
def test_nothing_points_outside(what: str, value: int) -> None:
    c = config()
    cache = random_cache(c, 16, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1, 1], [20, 33], cache)
    target = getattr(step, what) if what in step._fields else getattr(step.batch, what)
    target.view(-1)[1] = value
    with pytest.raises(IndexError, match=what.replace("_", " ")):
        run(*step)
    run.close()


def test_closed_is_closed() -> None:
    c = config()
    cache = random_cache(c, 16, 16)
    run = native(c, random_weights(c), cache)
    run.close()
    run.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(*random_step(c, [1], [20], cache))


def test_other_floats_have_no_native_step() -> None:
    c = config()
    weights = random_weights(c)
    cache = random_cache(c, 16, 16)
    rotations = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN).rotations
    assert native_step(weights, c.heads, c.norm_eps, rotations, cache.bfloat16()) is None
    half = weights._replace(norm=weights.norm.bfloat16())
    assert native_step(half, c.heads, c.norm_eps, rotations, cache) is None
    run = native_step(weights, c.heads, c.norm_eps, rotations, cache)
    assert run is not None
    run.close()
