"""A request's tokens are its own: they do not depend on who shares its steps, nor on how its work was cut up.

Every test serves the same requests, greedy and seeded sampling alike, and expects what each gave when it ran alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import VOCAB_SIZE
from tests.worker.driving import load, request, run
from tests.worker.subjects import AFTER_THE_FIRST, Subject, alone, cached_chunks, cases, preempted, strangers, tiny_pool

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tiny_directory: Callable[[str], Path]) -> Subject:
    driven = load(tiny_directory("llama3"), num_blocks=256)
    prompts = [[(a * i + b) % VOCAB_SIZE for i in range(n)] for a, b, n in ((7, 1, 5), (31, 2, 33), (11, 3, 100))]
    return alone(driven, prompts, 40)


def test_seeded_sampling_is_no_greedy_choice(tiny: Subject) -> None:
    for i in range(len(tiny.prompts)):
        assert tiny.alone[f"sampled {i}"] != tiny.alone[f"greedy {i}"]


def test_with_each_other(tiny: Subject) -> None:
    tiny.check(run(tiny.driven, tiny.requests()))


def test_with_strangers(tiny: Subject) -> None:
    tiny.check(run(tiny.driven, tiny.requests(), later=strangers(5, 20)))


def test_in_chunks(tiny: Subject) -> None:
    outcome = run(tiny.driven, tiny.requests(), max_prefill_chunk=7)
    tiny.check(outcome)
    assert outcome.stats.steps > tiny.num_tokens + 5


def test_in_chunks_over_a_cached_prefix(tiny: Subject) -> None:
    tiny.check(cached_chunks(tiny))


def test_a_cached_prefix_is_not_computed_again(tiny: Subject) -> None:
    longest = max(tiny.prompts, key=len)
    first, second = request("first", longest, 2), request("greedy 2", longest, tiny.num_tokens)
    outcome = run(tiny.driven, [first], later=[(AFTER_THE_FIRST, second)])
    assert outcome.tokens("greedy 2") == tiny.alone["greedy 2"]
    cached = (len(longest) - 1) // 16 * 16
    assert outcome.outputs["greedy 2"].cached_tokens == cached == 96
    assert outcome.stats.computed_tokens == len(longest) + 1 + (len(longest) - cached) + tiny.num_tokens - 1


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_every_third_step(tiny: Subject, caching: bool) -> None:
    tiny.check(preempted(tiny, enable_prefix_caching=caching))


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_by_a_tiny_pool(tiny: Subject, caching: bool) -> None:
    tiny.check(tiny_pool(tiny, enable_prefix_caching=caching))


def test_results_one_step_late(tiny: Subject) -> None:
    tiny.check(run(tiny.driven, tiny.requests(), overlap=True))


def test_beside_requests_that_are_aborted(tiny: Subject) -> None:
    later = [(1, request("in its prompt", [5] * 60, 50)), (6, request("in its answer", [6] * 20, 50))]
    aborts = [(4, "in its prompt"), (20, "in its answer")]
    for overlap in (False, True):
        tiny.check(run(tiny.driven, tiny.requests(), later=later, aborts=aborts, max_prefill_chunk=7, overlap=overlap))


def test_resumed_from_every_point(tiny: Subject) -> None:
    resumed = [
        request(f"{name} from {done}", prompt, tiny.num_tokens, done=tiny.alone[name][:done], **params)
        for name, prompt, params in cases(tiny.prompts)[2:4]
        for done in range(1, tiny.num_tokens)
    ]
    outcome = run(tiny.driven, resumed)
    for made in resumed:
        name = made.request_id.split(" from ")[0]
        assert made.output_token_ids + outcome.tokens(made.request_id) == tiny.alone[name]


def test_resumed_and_then_preempted(tiny: Subject) -> None:
    tiny.check(run(tiny.driven, tiny.requests(11), force_preempt_every=3, overlap=True), 11)


def test_everything_at_once(tiny: Subject) -> None:
    tiny.check(
        tiny_pool(
            tiny,
            later=strangers(5, 20),
            overlap=True,
            max_prefill_chunk=7,
            force_preempt_every=3,
            enable_prefix_caching=False,
        )
    )


def test_logprobs_do_not_change_what_is_chosen(tiny: Subject) -> None:
    asked = [
        request(name, prompt, tiny.num_tokens, logprobs=5, **params) for name, prompt, params in cases(tiny.prompts)
    ]
    outcome = run(tiny.driven, asked)
    tiny.check(outcome)
    assert all(len(output.logprobs) == tiny.num_tokens for output in outcome.outputs.values())
