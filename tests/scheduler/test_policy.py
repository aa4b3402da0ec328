"""How large steps may be after one for which there was no memory, and after many for which there was."""

from __future__ import annotations

from tests.scheduler.simulation import limits
from weft.plan import Row, StepPlan
from weft.scheduler.policy import LEAST_TOKENS, PATIENCE, Throttle

WIDE = limits(max_num_seqs=64, max_num_batched_tokens=1024)


def step(num_rows: int, num_tokens: int) -> StepPlan:
    counts = [1] * (num_rows - 1) + [num_tokens - num_rows + 1]
    return StepPlan(0, [], [], [Row(i, 0, count, [], True) for i, count in enumerate(counts)])


def good_steps(throttle: Throttle, count: int) -> None:
    for _ in range(count):
        throttle.went_well()


def size(throttle: Throttle) -> tuple[int, int]:
    return throttle.rows, throttle.tokens


def test_at_first_a_step_may_be_what_the_limits_say() -> None:
    assert size(Throttle(WIDE)) == (64, 1024)


def test_a_failure_leaves_half_of_the_step_that_failed() -> None:
    throttle = Throttle(WIDE)
    throttle.failed(step(64, 1024))
    assert size(throttle) == (32, 512)
    throttle.failed(step(10, 100))
    assert size(throttle) == (5, 50)


def test_every_running_request_keeps_its_token() -> None:
    throttle = Throttle(WIDE)
    throttle.failed(step(64, 64))
    assert size(throttle) == (32, 32)


def test_failures_end_at_one_request_and_a_few_tokens() -> None:
    throttle = Throttle(WIDE)
    for _ in range(20):
        throttle.failed(step(throttle.rows, throttle.tokens))
    assert size(throttle) == (1, LEAST_TOKENS) and throttle.is_least
    throttle.failed(step(1, 1))
    assert size(throttle) == (1, LEAST_TOKENS)


def test_a_larger_step_than_the_last_that_failed_is_not_tried_at_once() -> None:
    """A step that was launched before another failed may fail after it, and be larger."""
    throttle = Throttle(WIDE)
    throttle.failed(step(8, 80))
    throttle.failed(step(64, 1024))
    assert size(throttle) == (2, 20)


def test_good_steps_let_it_grow_back_to_the_limits_and_no_further() -> None:
    throttle = Throttle(WIDE)
    throttle.failed(step(16, 256))
    sizes = [size(throttle)]
    for _ in range(5):
        good_steps(throttle, 2 * PATIENCE - 1)
        assert size(throttle) == sizes[-1]
        good_steps(throttle, 1)
        sizes.append(size(throttle))
    assert sizes == [(8, 128), (16, 256), (32, 512), (64, 1024), (64, 1024), (64, 1024)]


def test_what_fails_again_and_again_is_tried_less_and_less() -> None:
    throttle = Throttle(WIDE)
    assert [steps_to_recover(throttle) for _ in range(3)] == [2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]
    good_steps(throttle, 8 * PATIENCE)
    assert steps_to_recover(throttle) == 2 * PATIENCE, "so many good steps at the full size are a new start"


def steps_to_recover(throttle: Throttle) -> int:
    throttle.failed(step(64, 1024))
    for good in range(100 * PATIENCE):
        if size(throttle) == (64, 1024):
            return good
        throttle.went_well()
    raise AssertionError("it never recovers")


def test_limits_below_the_least_are_kept() -> None:
    throttle = Throttle(limits(max_num_seqs=1, max_num_batched_tokens=8))
    assert size(throttle) == (1, 8) and throttle.is_least
    throttle.failed(step(1, 8))
    assert size(throttle) == (1, 8)
