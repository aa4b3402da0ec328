"""Any batch against an oracle in plain Python, written from the definitions; and a row against itself in company."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.effort import EFFORT
from tests.worker.targets import Target, sample, sample_rows, table_of, target
from weft.kernels import REFERENCE
from weft.kernels.sampling import gumbel_noise
from weft.plan import RowAdmission, StepPlan
from weft.types import SamplingParams
from weft.worker.sampler import warm_up_sampler

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 24
ROUNDING = 1e-4
MASK = 2**64 - 1

tokens = st.integers(0, VOCABULARY - 1)
# Of a few values only: many logits are equal.
logits_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=VOCABULARY, max_size=VOCABULARY)


@st.composite
def targets(draw: st.DrawFn) -> Target:
    history = draw(st.lists(tokens, min_size=1, max_size=12))
    return target(
        history,
        draw(st.integers(1, len(history))),
        draw(st.lists(tokens, max_size=3)),
        temperature=draw(st.sampled_from([0.0, 1e-35, 0.1, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, VOCABULARY, 1000])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.95, 0.6, 0.3, 1e-6])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.4, 1.0])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7, -1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3)),
        min_tokens=draw(st.integers(0, 8)),
        logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
    )


batches = st.lists(st.tuples(logits_rows, targets()), min_size=1, max_size=6)


def mixed(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def noise(seed: int, position: int, token: int) -> float:
    key = mixed(mixed(seed & MASK) ^ position)
    bits = token * 0x9E3779B1 + (key & 0xFFFFFFFF)
    bits = (bits ^ (bits >> 16) ^ (key >> 32)) & 0xFFFFFFFF
    bits = bits * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    bits ^= bits >> 16
    return -math.log(-math.log((bits + 0.5) / 2**32))


def adjusted(logits: list[float], wanted: Target) -> list[float]:
    params, answer = wanted.params, wanted.history[wanted.num_prompt :]
    out = list(logits)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in set(wanted.history):
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, times in Counter(answer).items():
        out[token] -= params.presence_penalty + times * params.frequency_penalty
    if len(answer) < params.min_tokens:
        for token in wanted.stops:
            out[token] = -math.inf
    return out


def threshold(logits: list[float], params: SamplingParams, slack: float) -> float:
    """The least logit that may be drawn, if every border were moved by `slack`."""
    peak, temperature = max(logits), params.temperature
    least = -math.inf
    if params.min_p:
        least = peak + temperature * math.log(params.min_p) + slack
    if 0 < params.top_k < len(logits):
        least = max(least, sorted(logits)[-params.top_k] + slack)
    if params.top_p < 1:
        masses = Counter[float]()
        for logit in logits:
            masses[logit] += math.exp((logit - peak) / temperature) * (logit >= least)
        reached = 0.0
        for logit in sorted(masses, reverse=True):
            reached += masses[logit]
            if reached >= (params.top_p - slack) * masses.total():
                least = max(least, logit + slack)
                break
    return least


def check(token: int, logits: list[float], wanted: Target) -> None:
    params, logits = wanted.params, adjusted(logits, wanted)
    if params.temperature < 1e-30:
        assert logits[token] >= max(logits) - ROUNDING
        return
    assert params.seed is not None
    scores = [x / params.temperature + noise(params.seed, len(wanted.history), i) for i, x in enumerate(logits)]
    assert logits[token] >= threshold(logits, params, -1e-6), "a token that must not be drawn"
    least = threshold(logits, params, 1e-6)
    assert all(scores[token] >= score - ROUNDING for score, x in zip(scores, logits, strict=True) if x >= least)


@given(batches)
@settings(max_examples=60 * EFFORT)
def test_every_row_is_the_oracles(batch: list[tuple[list[float], Target]]) -> None:
    logits = torch.tensor([row for row, _ in batch])
    before = logits.clone()
    sampled = sample(logits, [wanted for _, wanted in batch]).read()
    assert torch.equal(logits, before), "the model's own logits changed"
    for got, (row, wanted) in zip(sampled, batch, strict=True):
        check(got.token_id, row, wanted)
        if wanted.params.logprobs is None:
            assert got.logprob is None
            continue
        total = math.log(sum(map(math.exp, row)))
        assert got.logprob is not None
        assert got.logprob.logprob == pytest.approx(row[got.token_id] - total, abs=ROUNDING)
        assert len(got.logprob.top) == min(wanted.params.logprobs, VOCABULARY)
        assert [value for _, value in got.logprob.top] == pytest.approx(
            [x - total for x in sorted(row, reverse=True)[: wanted.params.logprobs]], abs=ROUNDING
        )
        assert all(value == pytest.approx(row[token] - total, abs=ROUNDING) for token, value in got.logprob.top)


@given(batches, st.randoms(use_true_random=False), tokens)
@settings(max_examples=60 * EFFORT)
def test_company_order_and_old_tokens_change_nothing(
    batch: list[tuple[list[float], Target]], order: Any, stale: int
) -> None:
    alone = [sample(torch.tensor([row]), [wanted]).read()[0] for row, wanted in batch]
    places = list(range(len(batch)))
    order.shuffle(places)
    logits = torch.tensor([batch[place][0] for place in places])
    together = sample(logits, [batch[place][1] for place in places], stale=stale).read()
    assert together == [alone[place] for place in places]


@given(batches)
@settings(max_examples=20 * EFFORT)
def test_what_is_sampled_is_in_the_table(batch: list[tuple[list[float], Target]]) -> None:
    logits, wanted = torch.tensor([row for row, _ in batch]), [wanted for _, wanted in batch]
    table, positions = table_of(wanted), [len(one.history) for one in wanted]
    rows = list(range(len(batch)))
    table.tokens[rows, positions] = REFERENCE.greedy(logits)[0]
    sampled = sample_rows(logits, table, rows, positions).read()
    assert table.tokens[rows, positions].tolist() == [one.token_id for one in sampled]
    for row, one in enumerate(wanted):
        assert table.tokens[row, : positions[row]].tolist() == list(one.history)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**20), st.integers(0, 2**18))
def test_the_noise_is_the_definitions(seed: int, position: int, token: int) -> None:
    found = gumbel_noise(seed, position, torch.tensor([token])).item()
    assert found == pytest.approx(noise(seed, position, token), abs=1e-5)


def test_a_row_forgets_who_had_it_before() -> None:
    rows_needing_sampler = target(temperature=1.0, seed=3, logit_bias={2: 100.0}, repetition_penalty=9.0, logprobs=2)
    table = table_of([rows_needing_sampler, rows_needing_sampler])
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    assert [one.token_id for one in sample_rows(logits, table, [0, 1], [3, 3]).read()] == [2, 2]
    plain = RowAdmission(0, [1, 1, 1], 3, SamplingParams(temperature=0, seed=0), [])
    table.take_in(StepPlan(1, [0], [plain], []))
    assert table.settings.rows_needing_sampler == {1}
    for rows in ([0], [0, 1]):
        sampled = sample_rows(logits[: len(rows)], table, rows, [3] * len(rows)).read()
        assert sampled[0].token_id == 1 and sampled[0].logprob is None


class Watch(TorchDispatchMode):
    """Notes the ops that run; those that would wait for a device are errors."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].lstrip("_")
        if self.is_on:
            self.seen.append(name)
            assert not any(name.startswith(wait.lstrip("_")) for wait in self.WAITS), f"{name} waits for the device"
            if name.startswith("index"):
                indices = [index for index in args[1] if isinstance(index, Tensor)]
                assert all(index.dtype == torch.int64 for index in indices), "a mask as an index waits for the device"
        return func(*args, **(kwargs or {}))

    @contextmanager
    def off(self) -> Iterator[None]:
        self.is_on = False
        yield
        self.is_on = True


def of_a_device(op: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    """The kernels of a GPU wait for nothing, whatever their references do."""

    def unwatched(*args: Any) -> Any:
        with watch.off():
            return op(*args)

    return unwatched


EVERYTHING = target(
    [1, 2, 3, 4], 2, [5], temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, seed=5, presence_penalty=0.5,
    frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 1.0}, min_tokens=9, logprobs=3,
)  # fmt: skip


def watched(wanted: list[Target]) -> list[str]:
    """The ops of a batch, those of the op table apart."""
    watch = Watch()
    ops = REFERENCE._replace(
        greedy=of_a_device(REFERENCE.greedy, watch),
        keep_thresholds=of_a_device(REFERENCE.keep_thresholds, watch),
        gumbel_sample=of_a_device(REFERENCE.gumbel_sample, watch),
    )
    logits, table = torch.randn(len(wanted), VOCABULARY), table_of(wanted)
    with watch:
        sample_rows(logits, table, list(range(len(wanted))), [len(one.history) for one in wanted], ops)
    return watch.seen


def test_nothing_waits_for_the_device() -> None:
    assert "scatter_add_" in watched([EVERYTHING, target(), EVERYTHING])


def test_what_nobody_wants_is_not_done() -> None:
    assert watched([target(), target()]) == []
    temperature_alone = watched([target(temperature=0.5), target()])
    assert not {"scatter_add_", "topk", "logsumexp", "arange", "zeros"} & set(temperature_alone)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    logits = torch.randn(3, VOCABULARY)
    before = logits.clone()
    warm_up_sampler(logits, REFERENCE)
    assert torch.equal(logits, before)
