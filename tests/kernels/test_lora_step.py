"""The native step with adapters gives what torch's operators give, and each token what it has alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from tests.kernels.steps import MAX_MODEL_LEN, config, random_cache, random_step, random_weights
from tests.kernels.test_fused_step import FAMILIES, native, poisoned_memory, some_rows
from weft.kernels import REFERENCE
from weft.kernels.batch import AdapterGroups
from weft.kernels.weights import AdaptedLayer, AdaptedRun, AdapterWeights, LowRank
from weft.model.dense import DenseConfig, DenseModel
from weft.model.dense_lora import AdapterSlots, forward_adapted

__all__ = ["poisoned_memory"]

MIXED = ([1, 1, 1, 9, 40], [50, 130, 257, 9, 200])


def random_adapter(
    c: DenseConfig, rank: int, seed: int, *, without: tuple[str, ...] = (), of_halves: bool = False
) -> AdapterWeights:
    """Return an adapter of another rank in every layer; `of_halves`: one whose numbers have 16 bits."""
    generator = torch.Generator().manual_seed(seed)
    heads, hidden, middle = c.heads, c.hidden_size, c.intermediate_size
    shapes = {
        "qkv": ((heads.q_size, heads.kv_size // 2, heads.kv_size // 2), hidden),
        "output": ((hidden,), heads.q_size),
        "gate_up": ((middle, middle), hidden),
        "down": ((hidden,), middle),
    }

    def low_rank(parts: tuple[int, ...], columns: int, rank: int) -> LowRank:
        shrink = torch.randn(len(parts) * rank, columns, generator=generator) * columns**-0.5
        expand = [torch.randn(rows, rank, generator=generator) * rank**-0.5 for rows in parts]
        shrink, *expand = (matrix.half().float() if of_halves else matrix for matrix in (shrink, *expand))
        return LowRank(shrink, tuple(expand))

    return AdapterWeights(
        [
            AdaptedLayer(
                **{name: None if name in without else low_rank(*shape, rank + layer) for name, shape in shapes.items()}
            )
            for layer in range(c.num_layers)
        ]
    )


def in_slots(model: DenseModel, runs: list[AdaptedRun], num_tokens: int) -> tuple[AdapterSlots, AdapterGroups]:
    """The adapters of runs, each in a slot of its own, and the groups of tokens."""
    slots = AdapterSlots(model, len(runs), 32)
    groups = torch.zeros(num_tokens, dtype=torch.int64)
    for slot, run in enumerate(runs):
        slots.write(slot, run.weights)
        groups[run.first : run.first + run.num_tokens] = slot + 1
    ends = torch.bincount(groups, minlength=len(runs) + 1).cumsum(0)
    return slots, AdapterGroups(groups.argsort(stable=True), torch.cat([torch.zeros(1, dtype=torch.int64), ends]))


@pytest.mark.parametrize("of_halves", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_cache_are_those_of_torchs_operators(family: str, of_halves: bool) -> None:
    """Two decodes and a prompt of three have adapters: one of rank 1, one of more tokens than a run has, and one for
    some of the weights."""
    c = config(**FAMILIES[family])
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    step = random_step(c, *MIXED, cache)
    runs = [
        AdaptedRun(random_adapter(c, 1, 1, of_halves=of_halves), 0, 1),
        AdaptedRun(random_adapter(c, 13, 2, without=("output", "gate_up"), of_halves=of_halves), 2, 1),
        AdaptedRun(random_adapter(c, 6, 3, of_halves=of_halves), 12, 40),
    ]
    wanted_cache = cache.clone()
    model = DenseModel(c, weights, REFERENCE, MAX_MODEL_LEN)
    placed = in_slots(model, runs, len(step.tokens))
    hidden = forward_adapted(model, step.tokens, step.positions, wanted_cache, step.batch, *placed)
    run = native(c, weights, cache)
    logits = run(step.tokens, step.positions, step.batch, None, runs)
    run.close()
    torch.testing.assert_close(logits, model.logits(hidden), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache, wanted_cache, atol=1e-4, rtol=1e-4)


def owners_of(c: DenseConfig) -> list[AdapterWeights | None]:
    """Whose each of nine decodes is."""
    one, two = random_adapter(c, 4, 1, of_halves=True), random_adapter(c, 11, 2, without=("qkv",))
    return [one, one, None, two, one, two, None, two, two]


def runs_of(owners: list[AdapterWeights | None]) -> list[AdaptedRun]:
    return [AdaptedRun(owner, i, 1) for i, owner in enumerate(owners) if owner is not None]


def test_a_row_does_not_depend_on_the_others() -> None:
    """Nor does one without an adapter on those that have one."""
    c = config(hidden_size=96, intermediate_size=200)
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1] * 9, [5, 16, 90, 128, 200, 17, 60, 1, 33], cache)
    owners = owners_of(c)
    together = run(*step, None, runs_of(owners))
    for start, stop in ((0, 1), (1, 2), (4, 5), (3, 5), (2, 5), (5, 9), (1, 6), (0, 7)):
        some = run(*some_rows(step, start, stop), None, runs_of(owners[start:stop]))
        assert torch.equal(some, together[start:stop])
    plain = run(*step)
    for i, owner in enumerate(owners):
        assert torch.equal(plain[i], together[i]) == (owner is None)
    run.close()


@pytest.mark.parametrize("of_halves", [False, True])
@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_thread_counts_and_runs_agree_to_the_bit(num_threads: int, of_halves: bool) -> None:
    """However the tokens with one adapter are told of: together, or one by one."""
    c = config(hidden_size=96, intermediate_size=200)
    weights = random_weights(c)
    cache = random_cache(c, 64, 16)
    step = random_step(c, *MIXED, cache)
    adapter = random_adapter(c, 6, 3, of_halves=of_halves)
    alone, team = native(c, weights, cache, 1), native(c, weights, cache, num_threads)
    wanted = alone(*step, None, [AdaptedRun(adapter, 1, 11)])
    for _ in range(10):
        assert torch.equal(team(*step, None, [AdaptedRun(adapter, i, 1) for i in range(1, 12)]), wanted)
    team.close()
    alone.close()


def test_halves_add_what_the_same_numbers_add_as_floats() -> None:
    """One number that is no half makes an adapter one of floats; it is far too small to change a logit by much."""
    c = config(hidden_size=96, intermediate_size=200)
    cache = random_cache(c, 64, 16)
    run = native(c, random_weights(c), cache)
    step = random_step(c, [1, 1, 7], [50, 130, 9], cache)
    halves, floats = (random_adapter(c, 6, 3, of_halves=True) for _ in range(2))
    for layer in floats.layers:
        for added in layer:
            assert added is not None
            added.shrink[0, 0] += 1e-7
    logits = [run(*step, None, [AdaptedRun(adapter, 0, 9)]) for adapter in (halves, floats)]
    run.close()
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
