"""How large steps may be: after one for which there was no memory, and by the time that they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import Simulation, limits, request
from weft.plan import Limits, Row, Sampled, StepPlan, StepResult
from weft.scheduler.policy import LEAST_TOKENS, PATIENCE, StepPace, Throttle
from weft.scheduler.scheduler import Scheduler
from weft.types import Request

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
    pace = StepPace(1024, 0.0, first=32)
    pace.took(1024, 60.0)
    assert pace.tokens_at() == pace.tokens_at(5000) == 1024


def test_prefills_follow_the_time_that_steps_take() -> None:
    pace = StepPace(1024, 0.2, first=32)
    assert pace.tokens_at() == pace.tokens_at(5000) == 32, "until something is known"
    pace.took(256, 0.512, 1000)
    assert pace.tokens_at() == 96, "of 2 ms each, in whole lots of 16"
    for _ in range(20):
        pace.took(pace.tokens_at(), pace.tokens_at() * 0.001, 1000)
    assert 176 <= pace.tokens_at() <= 192
    pace.took(1, 0.1)
    assert 176 <= pace.tokens_at() <= 192, "a step of one token reads all weights for it"
    assert pace.tokens_at(8000) < 64, "attention over a long context takes its time"
    pace.took(64, 60.0)
    assert pace.tokens_at() == LEAST_TOKENS
    for _ in range(50):
        pace.took(pace.tokens_at(), 0.0, 1000)
    assert pace.tokens_at() == 1024


def test_on_a_gpu_steps_have_whole_tiles_and_the_next_prompt_begins_with_large_ones() -> None:
    """Costs behind a short context are trusted to be smaller once it is known how they grow."""
    pace = StepPace(2048, 0.045, 256, growth=0.0, on_gpu=True)
    sizes = []
    for _ in range(4):
        context, sizes = 0, []
        while context < 16_000:
            tokens = pace.tokens_at(context)
            sizes.append(tokens)
            pace.took(tokens, tokens * 25e-6 * (1 + (context + tokens / 2) / 32_000), context + tokens / 2)
            context += tokens
    assert sizes[0] == 1536 and sizes[-1] == 1024 and sizes == sorted(sizes, reverse=True)


GOAL = 0.2


@settings(max_examples=200)
@given(
    token_cost=st.floats(1e-4, 5e-3),
    growth=st.floats(0, 1 / 400),
    step_cost=st.floats(0, 0.02 * GOAL),
    error=st.sampled_from([0.0, 0.05, 0.1]),
    slow_from=st.integers(500, 5500),
    start=st.sampled_from([0, 0, 3000]),
    rng=st.randoms(use_true_random=False),
)
def test_no_step_of_a_long_prompt_takes_longer_than_the_goal(
    token_cost: float, growth: float, step_cost: float, error: float, slow_from: int, start: int, rng: Random
) -> None:
    """A token costs the more the more come before it, times are measured with an error, and the machine becomes half as
    fast in mid-prompt. Chunks of any size would take almost as long for the whole prompt."""

    def costs(tokens: int, context: int) -> float:
        slow_tokens = min(tokens, max(0, context + tokens - slow_from))
        return step_cost + token_cost * (tokens + slow_tokens) * (1 + growth * (context + tokens / 2))

    def whole(chunk: Callable[[int], int]) -> float:
        total, context = 0.0, start
        while context < 6000:
            tokens = min(chunk(context), 6000 - context)
            total += costs(tokens, context)
            context += tokens
        return total

    pace = StepPace(1024, GOAL, first=32)
    context, was_slow = start, start > slow_from
    # Of what was computed before nothing tells how costs grow.
    pace.took(256, costs(256, 0), 128)
    chunks = {}
    while context < 6000:
        tokens = chunks[context] = min(256, pace.tokens_at(context), 6000 - context)
        seconds = costs(tokens, context) * rng.uniform(1 - error, 1 + error)
        is_slow = context + tokens > slow_from
        if tokens > LEAST_TOKENS and is_slow == was_slow and context > start:
            # A fifth more, while little is known of the growth.
            assert seconds <= 1.2 * GOAL * (1 + error) / (1 - error)
        pace.took(tokens, seconds, context + tokens / 2)
        # A step that became slow in its midst does not tell yet by how much.
        context, was_slow = context + tokens, context >= slow_from
    is_too_slow = LEAST_TOKENS in chunks.values()
    assert is_too_slow or whole(lambda context: 256) >= 0.95 * whole(chunks.__getitem__)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def timed(simulation: Simulation) -> list[float]:
    """Let time pass in a simulation: a token costs the more the more come before it. Returns a list that gets the
    seconds of every step."""
    clock, lasted = Clock(), list[float]()
    simulation.scheduler._clock = clock
    execute = simulation.worker.execute

    def slowly(plan: StepPlan) -> StepResult:
        lasted.append(sum(row.count * (0.5 + row.start / 500) for row in plan.rows) / 1000)
        clock.now += lasted[-1]
        return execute(plan)

    simulation.worker.execute = slowly
    return lasted


ROOMY = limits(
    num_blocks=400, max_model_len=1400, max_num_batched_tokens=512, max_prefill_chunk=256, max_step_seconds=0.2
)


def test_a_long_prompt_is_cut_so_that_no_step_takes_longer_than_the_goal() -> None:
    """Another request decodes meanwhile."""
    simulation = Simulation(ROOMY)
    lasted = timed(simulation)
    simulation.add(request("short", [1], 200))
    simulation.step()
    simulation.add(request("long", [2] * 1200, 1))
    simulation.run()
    assert len(lasted) > 10 and 0.1 < max(lasted) < 0.21


def test_a_prompt_behind_a_long_cached_one_is_cut_from_its_first_chunk_on() -> None:
    simulation = Simulation(ROOMY)
    lasted = timed(simulation)
    document = [i * i % 47 for i in range(1000)]
    simulation.add(request("first", document, 1))
    simulation.run()
    for i in range(8):
        simulation.add(request(f"short {i}", [i] * 100, 1))
        simulation.run()
    lasted.clear()
    simulation.add(request("second", document + [7] * 300, 1))
    simulation.run()
    assert len(lasted) > 1 and max(lasted) < 0.21


def test_decodes_are_a_part_of_the_time_of_a_step() -> None:
    wide = limits(
        num_blocks=800, max_model_len=1400, max_num_seqs=49, max_num_batched_tokens=512, max_prefill_chunk=256,
        max_mixed_prefill=256, max_step_seconds=0.2,
    )  # fmt: skip
    simulation = Simulation(wide)
    lasted = timed(simulation)
    for i in range(48):
        simulation.add(request(f"decodes {i}", [i], 60))
    simulation.step()
    simulation.add(request("long", [2] * 1200, 1))
    simulation.run()
    assert len(lasted) > 10 and 0.1 < max(lasted) < 0.22


def test_steps_that_decode_have_a_goal_of_their_own_and_whole_tiles() -> None:
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
    assert sizes[-1] == 768, "of 800 that there is time for"
    simulation.run()
    assert sizes.count(sizes[3]) > 5 and sizes[-1] == 1


def test_beside_decodes_a_step_has_the_tokens_there_is_time_for_however_long_decodes_take_alone() -> None:
    """A token that is decoded costs more than one of a prompt: its context is read for it alone."""
    wide = limits(
        num_blocks=4100, max_model_len=10_000, max_num_seqs=300, max_num_batched_tokens=2048, max_prefill_chunk=2048,
        max_mixed_prefill=384, max_mixed_step_seconds=0.06,
    )  # fmt: skip
    simulation, clock, sizes = Simulation(wide), Clock(), list[int]()
    simulation.scheduler._clock = clock
    execute = simulation.worker.execute

    def slowly(plan: StepPlan) -> StepResult:
        sizes.append(plan.num_tokens)
        clock.now += sum(100e-6 if row.count == 1 else row.count * 15e-6 for row in plan.rows)
        return execute(plan)

    simulation.worker.execute = slowly
    for i in range(256):
        simulation.add(request(f"decodes {i}", [i % 50], 20))
    for _ in range(4):
        simulation.step()
    simulation.add(request("long", [2] * 9000, 1))
    simulation.run()
    assert sizes[1:10] == [256, 256, 256, *[2048] * 5, 256 + 9000 - 5 * (2048 - 256)]
    # That last step took longer for each of its tokens, but tells nothing of the next prompt.
    sizes.clear()
    simulation.add(request("few", [3], 20))
    simulation.step()
    simulation.add(request("next", [4] * 9000, 1))
    simulation.run()
    assert sizes[1:5] == [2048] * 4


class Gpu:
    """A GPU that computes steps while the next one is launched, which takes its time when that has many prefills."""

    token_seconds, launch_seconds = 11e-6, 0.02
    is_deep = False
    """The kernels of one step are more than may wait for the device."""

    def __init__(self, wide: Limits) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(wide, clock=self.clock)
        self.sizes: list[int] = []
        """Of steps that prefill and decode, more than those captured have."""
        self._ends_at = 0.0

    def _launch(self, plan: StepPlan) -> float:
        """Launch a step, and return when it will end."""
        decodes = sum(row.count == 1 for row in plan.rows)
        is_captured = plan.num_tokens - decodes <= self.scheduler.limits.max_mixed_prefill
        begins_at = max(self._ends_at, self.clock.now)
        was_idle = self._ends_at <= self.clock.now
        if self.is_deep and not is_captured:
            self.clock.now = begins_at
        self.clock.now += 0.001 if is_captured else self.launch_seconds
        self._ends_at = max(begins_at + plan.num_tokens * self.token_seconds, self.clock.now)
        self.scheduler.launched(plan, was_idle=was_idle)
        if decodes and not is_captured:
            self.sizes.append(plan.num_tokens)
        return self._ends_at

    def run(self, requests: Iterable[Request]) -> list[int]:
        """Compute requests, and return the sizes of their mixed steps."""
        self.sizes.clear()
        for one in requests:
            self.scheduler.add(one)
        under_way = deque[tuple[StepPlan, float]]()
        while under_way or self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if plan is not None:
                under_way.append((plan, self._launch(plan)))
            if len(under_way) > 1 or plan is None:
                oldest, ends_at = under_way.popleft()
                self.clock.now = max(self.clock.now, ends_at) + 0.0005
                sampled = [[Sampled(1)] for row in oldest.rows if row.samples]
                self.scheduler.apply(oldest, StepResult(oldest.step_id, sampled))
        return list(self.sizes)


def test_steps_do_not_shrink_when_launching_is_what_takes_their_time() -> None:
    """Fewer tokens are launched no faster: smaller and smaller steps would take as long each."""
    wide = limits(
        num_blocks=4000, block_size=16, max_model_len=1000, max_num_seqs=64, max_num_batched_tokens=8192,
        max_prefill_chunk=4096, max_mixed_prefill=384, max_mixed_step_seconds=0.05, enable_prefix_caching=False,
    )  # fmt: skip
    gpu, rounds = Gpu(wide), count()

    def work() -> list[Request]:
        return [request(f"{next(rounds)}", [i % 50] * 512, 20 + i) for i in range(64)]

    while_fast = gpu.run(work())
    assert while_fast and set(while_fast[1:-1]) == {4096}, "45 ms"
    gpu.launch_seconds = 0.065
    gpu.run(work())
    for _ in range(4):
        assert min(gpu.run(work())[:-1]) >= 3072
    gpu.launch_seconds, gpu.token_seconds = 0.02, 22e-6
    gpu.run(work())
    assert set(gpu.run(work())[1:-1]) == {2048}, "the goal holds again"
    gpu.is_deep, gpu.token_seconds = True, 44e-6
    gpu.run(work())
    assert set(gpu.run(work())[1:-1]) == {1024}, "that launching waits for the step before it is no reason for more"
