"""The sampler against oracles written from the definitions, in numpy and double precision."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.targets import Target, draws, sample, target
from weft.kernels import sampling
from weft.kernels.sampling import gumbel_noise
from weft.plan import Sampled

pytestmark = pytest.mark.usefixtures("one_thread")

LOGITS = torch.tensor([1.0, 3.0, -2.0, 0.5, 2.5, -1.0, 0.0, 2.0])
NUM_DRAWS = 1_000
# The chi-square that a right distribution stays under 999 times of 1000, by degrees of freedom.
CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 15: 37.70, 63: 103.44}


def choose(logits: Tensor, *targets: Target) -> list[Sampled]:
    """One row for each target, all of them with the same logits."""
    return sample(logits.repeat(len(targets), 1), targets).read()


def greedy(logits: Tensor, **how: Any) -> int:
    return choose(logits, target(**how))[0].token_id


def softmax(logits: Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = logits.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept(probabilities: np.ndarray, ids: set[int]) -> np.ndarray:
    """The distribution over some of the tokens alone."""
    masked = np.array([p if i in ids else 0.0 for i, p in enumerate(probabilities)])
    return masked / masked.sum()


def assert_distribution(tokens: list[int], expected: np.ndarray) -> None:
    counts = Counter(tokens)
    possible = [i for i, p in enumerate(expected) if p > 0]
    assert set(counts) <= set(possible), "a token that cannot be drawn"
    chi_square = sum((counts[i] - len(tokens) * expected[i]) ** 2 / (len(tokens) * expected[i]) for i in possible)
    assert chi_square < CHI_SQUARE_999[len(possible) - 1]


# Greedy, and what changes the logits before the choice.


def test_temperature_zero_takes_the_likeliest() -> None:
    assert greedy(LOGITS) == 1
    assert greedy(LOGITS, top_p=0.1, top_k=3, min_p=0.5, seed=99) == 1


def test_a_tie_goes_to_the_same_token_in_every_batch() -> None:
    tied = torch.tensor([0.0, 2.0, 2.0, 1.0])
    alone = greedy(tied)
    assert [row.token_id for row in choose(tied, *[target() for _ in range(9)])] == [alone] * 9


def test_logit_bias_forces_and_forbids() -> None:
    assert greedy(LOGITS, logit_bias={2: 100.0}) == 2
    assert greedy(LOGITS, logit_bias={1: -100.0}) == 4
    assert greedy(LOGITS, logit_bias={1: -100.0, 4: -100.0, 0: 0.5}) == 7
    assert set(draws(LOGITS, 50, logit_bias={6: 100.0})) == {6}
    assert 1 not in draws(LOGITS, 1000, logit_bias={1: -100.0})


def test_presence_penalty_counts_an_answered_token_once() -> None:
    # 3.0 - 0.6 = 2.4 is below the 2.5 of token 4, however often it was written.
    assert greedy(LOGITS, history=[5, 5, 5, 1], presence_penalty=0.4) == 1
    assert greedy(LOGITS, history=[5, 5, 5, 1], presence_penalty=0.6) == 4
    assert greedy(LOGITS, history=[5, 5, 5, 1, 1, 1], presence_penalty=0.4) == 1


def test_frequency_penalty_counts_every_time() -> None:
    assert greedy(LOGITS, history=[5, 5, 5, 1, 1], frequency_penalty=0.2) == 1
    assert greedy(LOGITS, history=[5, 5, 5, 1, 1, 1], frequency_penalty=0.2) == 4


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    assert greedy(LOGITS, history=[1, 1, 1], presence_penalty=2.0, frequency_penalty=2.0) == 1


def test_negative_penalties_reward() -> None:
    assert greedy(LOGITS, history=[0, 0, 0, 4], presence_penalty=-0.6) == 4


def test_repetition_penalty_divides_above_zero_and_multiplies_below_and_counts_the_prompt() -> None:
    # 3.0 / 1.25 = 2.4 is below 2.5; 3.0 / 1.15 = 2.61 is not.
    assert greedy(LOGITS, history=[1, 6, 6], repetition_penalty=1.25) == 4
    assert greedy(LOGITS, history=[1, 6, 6], repetition_penalty=1.15) == 1
    below = torch.tensor([-1.0, -1.1, -3.0])
    assert greedy(below, history=[0, 0, 0], repetition_penalty=1.2) == 1
    assert greedy(below, history=[0, 0, 0], repetition_penalty=1.05) == 0
    # Below one it rewards: 2.5 / 0.8 = 3.125.
    assert greedy(LOGITS, history=[4, 6, 6], repetition_penalty=0.8) == 4


def test_all_penalties_together_by_hand() -> None:
    # 1: (3.0 + 1.0) / 2 - (0.5 + 2 * 0.25) = 1.0; 4: 2.5 - (0.5 + 0.25), and 2.5 / 2 first: 0.5; 7: 2.0 / 2 = 1.0;
    # 0: 1.0 + 0.1 stays, being neither in the prompt nor in the answer.
    how = {
        "history": [7, 7, 7, 1, 4, 1],
        "logit_bias": {1: 1.0, 0: 0.1},
        "repetition_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    assert greedy(LOGITS, **how) == 0
    assert greedy(LOGITS, **(how | {"logit_bias": {1: 1.5}})) == 1


def test_min_tokens_masks_what_would_stop() -> None:
    # Three of prompt; the answer must have two tokens before one that stops.
    for written, expected in ((0, 4), (1, 4), (2, 1)):
        assert greedy(LOGITS, history=[0] * (3 + written), min_tokens=2, stops=[1, 7]) == expected
    assert 1 not in draws_before_min(stops=[1, 4])
    assert greedy(LOGITS, min_tokens=2) == 1


def draws_before_min(stops: list[int]) -> set[int]:
    rows = [target(temperature=1.0, seed=seed, min_tokens=1, stops=stops) for seed in range(500)]
    tokens = {row.token_id for row in choose(LOGITS, *rows)}
    assert not tokens & set(stops)
    return tokens


# The distribution of what is drawn.


@pytest.mark.parametrize(("temperature", "num_draws"), [(0.5, NUM_DRAWS), (1.0, 4 * NUM_DRAWS), (2.0, NUM_DRAWS)])
def test_temperature(temperature: float, num_draws: int) -> None:
    assert_distribution(draws(LOGITS, num_draws, temperature=temperature), softmax(LOGITS, temperature))


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40, 1e-300])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draws(LOGITS, 100, temperature=temperature)) == {1}
    assert set(draws(LOGITS, 100, temperature=temperature, top_p=0.9, min_p=0.1)) == {1}


@pytest.mark.parametrize("top_k", [1, 3, 8, 1000])
def test_top_k(top_k: int) -> None:
    likeliest = set(np.argsort(-LOGITS.numpy())[:top_k].tolist())
    tokens = draws(LOGITS, NUM_DRAWS, top_k=top_k)
    if top_k == 1:
        assert set(tokens) == {1}
    else:
        assert_distribution(tokens, kept(softmax(LOGITS), likeliest))


def nucleus(probabilities: np.ndarray, top_p: float) -> set[int]:
    """The fewest likeliest tokens that together have at least top_p."""
    ids: set[int] = set()
    reached = 0.0
    for i in np.argsort(-probabilities):
        if ids and reached >= top_p:
            break
        ids.add(int(i))
        reached += probabilities[i]
    return ids


@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.7, 0.9, 0.99])
def test_top_p(top_p: float) -> None:
    ids = nucleus(softmax(LOGITS), top_p)
    tokens = draws(LOGITS, NUM_DRAWS, top_p=top_p)
    assert set(tokens) == ids
    if len(ids) > 1:
        assert_distribution(tokens, kept(softmax(LOGITS), ids))


@pytest.mark.parametrize("first", [1, 2, 4])
def test_top_p_looks_further_when_the_first_candidates_are_too_few(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draws(LOGITS, 500, top_p=0.9)
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", first)
    assert draws(LOGITS, 500, top_p=0.9) == whole


def test_top_p_over_a_flat_vocabulary_larger_than_the_first_candidates() -> None:
    flat = torch.zeros(4 * sampling.FIRST_CANDIDATES)
    tokens = draws(flat, 300, top_p=0.5)
    assert len(set(tokens)) > 200


def test_top_p_is_of_what_top_k_leaves() -> None:
    # Of the three likeliest, 1 has 0.506, 4 has 0.307, 7 has 0.186: two of them have 0.8. Of all tokens three do.
    assert len(nucleus(softmax(LOGITS), 0.8)) == 3
    assert set(draws(LOGITS, 1000, top_k=3, top_p=0.8)) == {1, 4}


@pytest.mark.parametrize(
    "how", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}, {"top_k": 2, "top_p": 0.9}, {"min_p": 1.0}]
)
def test_equal_logits_are_kept_together(how: dict[str, Any]) -> None:
    assert set(draws(torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]), 200, **how)) == {1, 3, 4}


def test_top_p_is_of_all_equal_logits_that_top_k_keeps() -> None:
    # The first has 0.40 of all five, and 0.58 of the three largest.
    assert set(draws(torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0]), 200, top_k=2, top_p=0.5)) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p(min_p: float) -> None:
    probabilities = softmax(LOGITS)
    ids = {i for i, p in enumerate(probabilities) if p >= min_p * probabilities.max()}
    tokens = draws(LOGITS, NUM_DRAWS, min_p=min_p)
    assert set(tokens) == ids
    if len(ids) > 1:
        assert_distribution(tokens, kept(probabilities, ids))


def test_min_p_is_of_the_heated_distribution() -> None:
    probabilities = softmax(LOGITS, 2.0)
    ids = {i for i, p in enumerate(probabilities) if p >= 0.3 * probabilities.max()}
    assert set(draws(LOGITS, 1000, temperature=2.0, min_p=0.3)) == ids != {1, 4, 7}


def test_a_wide_vocabulary_is_drawn_evenly() -> None:
    buckets = [token * 64 // 4096 for token in draws(torch.zeros(4096), NUM_DRAWS)]
    assert_distribution(buckets, np.full(64, 1 / 64))


# The noise.


def test_neighbouring_positions_are_independent() -> None:
    tokens = draws(torch.zeros(4), 2 * NUM_DRAWS)
    pairs = [4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_distribution(pairs, np.full(16, 1 / 16))


def test_neighbouring_seeds_are_independent() -> None:
    flat = torch.zeros(4)
    rows = [target(temperature=1.0, seed=seed) for seed in range(2_000)]
    tokens = [row.token_id for row in choose(flat, *rows)]
    pairs = [4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_distribution(pairs, np.full(16, 1 / 16))


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise(3, 14, torch.arange(200_000)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert noise.isfinite().all()


def test_noise_of_a_token_does_not_depend_on_which_others_are_asked() -> None:
    everything = gumbel_noise(5, 6, torch.arange(1000))
    some = torch.tensor([999, 3, 500])
    assert torch.equal(gumbel_noise(5, 6, some), everything[some])


def test_the_same_seed_and_position_give_the_same_token_in_any_batch() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    mine = target(temperature=0.9, top_p=0.95, seed=42)
    alone = choose(logits, mine)[0]
    strangers = [target(temperature=1.5, seed=i, top_k=i) for i in range(1, 6)]
    for place in range(6):
        rows = [*strangers[:place], mine, *strangers[place:]]
        other = torch.randn(6, 50, generator=torch.Generator().manual_seed(place))
        other[place] = logits
        assert sample(other, rows).read()[place] == alone
    torch.manual_seed(0)
    assert choose(logits, mine)[0] == alone


def test_other_positions_and_other_seeds_give_other_tokens() -> None:
    flat = torch.zeros(1000)
    first = draws(flat, 64, seed=1)
    assert len(set(first)) > 55
    second = draws(flat, 64, seed=2)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 4


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**32, 2**63 - 1])
def test_every_seed_that_a_request_may_have(seed: int) -> None:
    assert_distribution(draws(torch.zeros(8), 500, seed=seed), np.full(8, 1 / 8))


def test_seeds_at_the_ends_of_their_range_are_different_seeds() -> None:
    flat = torch.zeros(1000)
    seeds = [-(2**63), -(2**63) + 1, -(2**32), -1, 0, 2**32, 2**63 - 1]
    streams = [tuple(draws(flat, 16, seed=seed)) for seed in seeds]
    assert len(set(streams)) == len(seeds)


# What comes back besides the token.


@pytest.mark.parametrize("how", [{}, {"temperature": 1.7, "top_k": 2, "seed": 3}, {"logit_bias": {2: 100.0}}])
def test_logprobs_are_of_the_raw_logits(how: dict[str, Any]) -> None:
    expected = np.log(softmax(LOGITS))
    result = choose(LOGITS, target(logprobs=3, **how))[0]
    assert result.logprob is not None
    assert result.logprob.logprob == pytest.approx(expected[result.token_id], abs=1e-5)
    assert [token for token, _ in result.logprob.top] == [1, 4, 7]
    assert [value for _, value in result.logprob.top] == pytest.approx(expected[[1, 4, 7]].tolist(), abs=1e-5)


def test_logprobs_of_no_others_and_of_nobody() -> None:
    without, only_mine = choose(LOGITS, target(), target(logprobs=0))
    assert without.logprob is None
    assert only_mine.logprob is not None and only_mine.logprob.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.0, "seed": 1, "top_k": 2},
        {"repetition_penalty": 1.2, "presence_penalty": 1.0, "logprobs": 2},
    ],
)
def test_a_broken_row_fails_alone(bad: float, how: dict[str, Any]) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = bad
    first, broken, last = sample(logits, [target(**how), target(**how), target(**how)]).read()
    assert broken.error and broken.token_id == -1
    assert first == last == choose(LOGITS, target(**how))[0]
    assert not first.error


def test_a_row_without_any_finite_logit_fails() -> None:
    logits = LOGITS.repeat(2, 1)
    logits[0] = -math.inf
    broken, sound = sample(logits, [target(), target()]).read()
    assert broken.error and not sound.error


def test_single_infinities_below_are_no_fault() -> None:
    logits = LOGITS.clone()
    logits[1] = -math.inf
    assert greedy(logits) == 4
    assert 1 not in draws(logits, 500, top_p=0.95)


def test_half_precision_logits() -> None:
    half = LOGITS.to(torch.bfloat16)
    assert greedy(half) == 1
    assert draws(half, 200, top_p=0.9) == draws(LOGITS, 200, top_p=0.9)
