"""Random workloads: whatever happens, every request ends, with the tokens of its undisturbed run."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from tests.scheduler.simulation import (
    VOCAB,
    Simulation,
    assert_prompt_logprobs,
    embeds,
    expected_output,
    expected_vector,
    limits,
    request,
)
from weft.types import FinishReason, MixedPrompt, Pooling

SHARED = [i % VOCAB for i in range(40)]


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    max_model_len = draw(st.integers(8, 64))
    smallest_pool = -(-max_model_len // block_size) + 1
    return {
        "limits": limits(
            block_size=block_size,
            max_model_len=max_model_len,
            num_blocks=smallest_pool + draw(st.integers(0, 20)),
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(6, 40)),
            max_prefill_chunk=draw(st.integers(1, 40)),
            enable_prefix_caching=draw(st.booleans()),
            max_preemptions=draw(st.integers(0, 3)),
            force_preempt_every=draw(st.sampled_from([0, 0, 1, 2, 3, 7])),
            max_speculative_tokens=draw(st.sampled_from([0, 3, 8, 30])),
            speculates=True,
            has_draft_model=draw(st.booleans()),
            embeds_width=2,
            max_embedding_bytes=4 * draw(st.integers(max_model_len, 3 * max_model_len)),
        ),
        "delay": draw(st.integers(0, 2)),
        "num_requests": draw(st.integers(1, 14)),
        "arrivals_per_step": draw(st.sampled_from([0.2, 1.0, 5.0])),
        "abort_share": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "seed": draw(st.integers(0, 2**32)),
    }


def with_rows(prompt: list[int], rnd: random.Random) -> MixedPrompt:
    """The prompt with prompt embeds, often the same ones, in the place of some of its tokens."""
    start = rnd.randrange(len(prompt))
    stop = rnd.randint(start + 1, len(prompt))
    first = rnd.choice([1, 1, 2])
    rows = embeds(*(first + i % 3 for i in range(2 * (stop - start))))
    return MixedPrompt.of([prompt[:start], rows, prompt[stop:]])


@settings(max_examples=75 * EFFORT)
@given(workloads())
def test_every_request_ends_once_with_its_own_tokens(load: dict) -> None:
    rnd = random.Random(load["seed"])
    simulation = Simulation(load["limits"], load["delay"])
    max_model_len = load["limits"].max_model_len
    to_come = []
    for i in range(load["num_requests"]):
        length = rnd.randint(1, max_model_len - 1)
        prompt = SHARED[:length] if rnd.random() < 0.5 else [rnd.randrange(VOCAB) for _ in range(length)]
        if rnd.random() < 0.3:
            prompt = with_rows(prompt, rnd)
        pooling = rnd.choice([None, None, None, Pooling.MEAN, Pooling.LAST]) if isinstance(prompt, list) else None
        to_come.append(
            request(
                f"r{i}",
                prompt,
                rnd.randint(1, max_model_len),
                salt=rnd.choice(["", "a"]),
                stop=rnd.random() < 0.5,
                priority=rnd.choice([0, 0, -1]),
                tenant=rnd.choice("xyz"),
                pooling=pooling,
                prompt_logprobs=rnd.choice([None, 1]) if pooling is None and isinstance(prompt, list) else None,
            )
        )
    asked = {r.request_id: r for r in to_come}
    aborted = set()
    for _ in range(20_000):
        while to_come and rnd.random() < load["arrivals_per_step"] / 2:
            simulation.add(to_come[-1])
            if rnd.random() < 0.5:
                simulation.foresee(to_come[-1], rnd)
            to_come.pop()
        if simulation.scheduler.cursors and rnd.random() < load["abort_share"] / 4:
            name = rnd.choice(list(simulation.scheduler.cursors))
            assert simulation.abort(name)
            aborted.add(name)
        if not simulation.step() and not to_come:
            break
    assert not simulation.scheduler.has_work
    assert simulation.scheduler.pool.num_free == simulation.scheduler.pool.num_usable
    assert simulation.scheduler.stats().embedding_bytes == 0
    for name, asked_for in asked.items():
        if asked_for.pooling is not None:
            assert name in aborted or simulation.ends[name].embedding == expected_vector(asked_for)
            assert simulation.outputs[name] == []
            continue
        assert_prompt_logprobs(simulation, asked_for)
        expected = expected_output(asked_for, max_model_len)
        got = simulation.outputs[name]
        if name in aborted:
            assert got == expected[: len(got)] and name not in simulation.ends
            continue
        assert got == expected
        stopped = expected[-1] in asked_for.stop_token_ids
        assert simulation.ends[name].finish == (FinishReason.STOP if stopped else FinishReason.LENGTH)
