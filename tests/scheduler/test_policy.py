"""How large steps may be: after one for which there was no memory, and by the time that they take."""

from __future__ import annotations

from tests.scheduler.simulation import Simulation, limits, request
from weft.plan import Row, StepPlan, StepResult
from weft.scheduler.policy import LEAST_TOKENS, PATIENCE, StepPace, Throttle

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


def test_without_a_goal_the_time_of_steps_changes_nothing() -> None:
    pace = StepPace(1024, 0.0)
    pace.took(1024, 60.0)
    assert pace.tokens == 1024


def test_prefills_follow_the_time_that_steps_take() -> None:
    pace = StepPace(1024, 0.2)
    assert pace.tokens == 1024, "until something is known"
    pace.took(256, 0.512)
    assert pace.tokens == 96, "of 2 ms each, in whole lots of 16"
    for _ in range(20):
        pace.took(pace.tokens, pace.tokens * 0.001)
    assert 176 <= pace.tokens <= 192
    pace.took(1, 0.1)
    assert 176 <= pace.tokens <= 192, "a step of one token reads all weights for it"
    pace.took(64, 60.0)
    assert pace.tokens == LEAST_TOKENS
    for _ in range(50):
        pace.took(pace.tokens, 0.0)
    assert pace.tokens == 1024


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_prompt_is_cut_so_that_no_step_takes_longer_than_the_goal() -> None:
    """A token costs the more the more come before it; another request decodes meanwhile."""
    roomy = limits(
        num_blocks=400, max_model_len=1400, max_num_batched_tokens=512, max_prefill_chunk=256, max_step_seconds=0.2
    )
    simulation, clock = Simulation(roomy), Clock()
    simulation.scheduler._clock = clock
    simulation.add(request("short", [1], 200))
    simulation.step()
    simulation.add(request("long", [2] * 1200, 1))
    lasted = []
    execute = simulation.worker.execute

    def slowly(plan: StepPlan) -> StepResult:
        lasted.append(sum(row.count * (0.5 + row.start / 500) for row in plan.rows) / 1000)
        clock.now += lasted[-1]
        return execute(plan)

    simulation.worker.execute = slowly
    simulation.run()
    assert len(lasted) > 10 and 0.1 < max(lasted) < 0.25


def test_steps_that_decode_have_a_goal_of_their_own_and_are_filled_up_in_powers_of_two() -> None:
    """While a prompt longer than a step and a half is under way, also when nothing else waits."""
    wide = limits(
        num_blocks=4100, max_model_len=16_000, max_num_batched_tokens=2048, max_prefill_chunk=2048,
        max_mixed_prefill=384, max_mixed_step_seconds=0.04,
    )  # fmt: skip
    simulation, clock = Simulation(wide), Clock()
    simulation.scheduler._clock = clock
    simulation.add(request("long", [2] * 9000, 1))
    sizes = []
    execute = simulation.worker.execute

    def slowly(plan: StepPlan) -> StepResult:
        sizes.append(plan.num_tokens)
        clock.now += plan.num_tokens * 50e-6
        return execute(plan)

    simulation.worker.execute = slowly
    simulation.step()
    assert sizes == [2048], "nothing decodes: the step may take its time"
    simulation.add(request("short", [1], 100))
    simulation.step()
    simulation.step()
    simulation.step()
    assert sizes[-1] == 512, "of 800 that there is time for"
    simulation.run()
    assert sizes.count(sizes[3]) > 5 and sizes[-1] == 1
