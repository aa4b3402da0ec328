"""Thousands of requests of both kinds, and random workloads: neither kind starves the other, and every bound that
`weft.scheduler.denoise` states is kept."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from tests.scheduler.simulation import (
    VOCAB,
    Simulation,
    drawing,
    embeds,
    expected_images,
    expected_output,
    image_limits,
    limits,
    request,
)
from weft.plan import DenoiseOutput, ImageLimits, Limits, RowOutput, Sampled, StepPlan, StepResult
from weft.scheduler.denoise import PATIENCE
from weft.scheduler.integrity import check_integrity
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, Request

NUM_REQUESTS = 2_500 * EFFORT
SHARED_PROMPT = [1, 2, 3, 4, 5, 6, 7]


def blank(plan: StepPlan) -> StepResult:
    """What a worker that computes nothing answers."""
    return StepResult(
        plan.step_id,
        [[Sampled(1)] for row in plan.rows if row.samples],
        [RowOutput() for row in plan.rows if row.request is not None],
        [DenoiseOutput(b"" if one.wants_image else None) for one in plan.denoise],
    )


class Seen(NamedTuple):
    """One step, as it was planned."""

    decoding: int
    """Requests that could decode."""
    decoded: int
    denoise_cost: int
    could_draw: bool
    could_prefill: bool
    prompt_tokens: int
    room: int
    """What the decodes left of the budget."""


def steps_of(scheduler: Scheduler, arrivals: list[Request], per_step: float, rnd: random.Random) -> Iterator[Seen]:
    """Serve requests that come `per_step` on average."""
    arrivals.reverse()
    ended, expected = 0, len(arrivals)
    number = 0
    while arrivals or scheduler.has_work:
        while arrivals and (rnd.random() < per_step / (1 + per_step) or not scheduler.has_work):
            scheduler.add(arrivals.pop())
        decoding = {cursor.row for cursor in scheduler.running if cursor.decoding}
        could_draw = any(cursor.todo for cursor in scheduler.images.denoising)
        could_prefill = any(not cursor.decoding and cursor.todo for cursor in scheduler.running)
        plan = scheduler.schedule()
        assert plan is not None, "nothing is planned though there is work"
        decoded = sum(row.row in decoding and row.samples for row in plan.rows)
        tokens = sum(row.count for row in plan.rows)
        yield Seen(
            len(decoding),
            decoded,
            sum(one.cost for one in plan.denoise),
            could_draw,
            could_prefill,
            tokens - decoded,
            scheduler.limits.max_num_batched_tokens - decoded,
        )
        ended += sum(event.finish is not None for event in scheduler.apply(plan, blank(plan)).events)
        number += 1
        if number % 500 == 0:
            check_integrity(scheduler)
    check_integrity(scheduler)
    assert ended == expected


def mixed_requests(rnd: random.Random, *, reads_text: bool) -> list[Request]:
    made: list[Request] = []
    for i in range(NUM_REQUESTS // 5 if reads_text else NUM_REQUESTS):
        prompt = [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 12))]
        tenant, priority = rnd.choice("xyz"), rnd.choice([0, 0, 0, -1])
        if rnd.random() < 0.3:
            made.append(
                drawing(
                    f"r{i}",
                    prompt,
                    rnd.choice([1, 4, 12]),
                    guidance=rnd.choice([1.0, 3.0]),
                    sampler="euler" if reads_text else rnd.choice(["euler", "euler", "heun"]),
                    negative=() if reads_text else rnd.choice([(), (1, 2)]),
                    text="a cat" if reads_text else "",
                    preview_every=rnd.choice([0, 0, 3]),
                    tenant=tenant,
                    priority=priority,
                )
            )
        else:
            long = prompt * 5 if rnd.random() < 0.1 else prompt
            made.append(request(f"r{i}", long[:50], rnd.randint(1, 12), tenant=tenant, priority=priority))
    return made


SHAPES = {
    "roomy": (limits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=128), image_limits(max_num_images=8)),
    "tight": (
        limits(num_blocks=60, max_num_seqs=16, max_num_batched_tokens=24, max_mixed_prefill=8),
        image_limits(max_mixed_denoise=4),
    ),
    "full of decodes": (
        limits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=16),
        image_limits(max_num_images=8, max_mixed_denoise=16),
    ),
    "a text encoder and a VAE": (
        limits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=128),
        image_limits(max_num_images=8, reads_text=True, encode_cost=24, decode_cost=40, max_num_embeds=0),
    ),
    "a VAE that is larger than a step": (
        limits(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=24),
        image_limits(max_num_images=8, reads_text=True, encode_cost=5, decode_cost=60, max_num_embeds=0),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_neither_kind_starves_the_other(shape: str) -> None:
    here, of_images = SHAPES[shape]
    rnd = random.Random(shape)
    scheduler = Scheduler(with_images(here, of_images))
    costliest = max(16, of_images.encode_cost, of_images.decode_cost)
    seen = list(steps_of(scheduler, mixed_requests(rnd, reads_text=of_images.reads_text), 0.7, rnd))

    # Decodes: every one of them in every step, but for steps of images alone, one of PATIENCE + 1 at most.
    for step in seen:
        assert step.decoded == step.decoding or step.decoded == step.prompt_tokens == 0
    skipped = [i for i, step in enumerate(seen) if step.decoding and not step.decoded]
    assert all(b - a > PATIENCE for a, b in itertools.pairwise(skipped))

    # Beside decodes: a step's denoise cost, and that of any run of steps.
    surplus = 0
    for step in seen:
        if not step.decoded:
            surplus = 0
            continue
        assert step.denoise_cost <= max(of_images.max_mixed_denoise, costliest)
        surplus = max(0, surplus + step.denoise_cost - of_images.max_mixed_denoise)
        assert surplus <= costliest

    # Images: some denoise step at least every so many steps while there is one to make.
    least_credit = max(1, min(of_images.max_mixed_denoise, min(step.room for step in seen) // 2))
    longest = PATIENCE + 1 + (math.ceil(costliest / least_credit) if min(step.room for step in seen) > 1 else costliest)
    assert longest_drought([step.could_draw and not step.denoise_cost for step in seen]) <= longest

    # Prompts that run go on as well.
    assert longest_drought([step.could_prefill and not step.prompt_tokens for step in seen]) <= 2 * PATIENCE


def with_images(here: Limits, of_images: ImageLimits) -> Limits:
    return Limits(**{name: getattr(here, name) for name in here.__struct_fields__} | {"image": of_images})


def longest_drought(dry: list[bool]) -> int:
    longest = current = 0
    for is_dry in dry:
        current = current + 1 if is_dry else 0
        longest = max(longest, current)
    return longest


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, object]:
    return {
        "limits": limits(
            block_size=draw(st.sampled_from([1, 4])),
            max_model_len=40,
            num_blocks=draw(st.integers(42, 80)),
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(16, 48)),
            max_prefill_chunk=draw(st.integers(1, 16)),
            enable_prefix_caching=draw(st.booleans()),
            max_preemptions=draw(st.integers(0, 2)),
            force_preempt_every=draw(st.sampled_from([0, 0, 2, 5])),
            image=image_limits(
                max_num_images=draw(st.integers(1, 4)),
                max_num_embeds=draw(st.integers(2, 8)),
                max_mixed_denoise=draw(st.integers(1, 20)),
                latent_slot_bytes=draw(st.sampled_from([100, 400])),
                whole_images=draw(st.sampled_from([False, False, False, True])),
                checkpoint_steps=draw(st.integers(0, 3)),
                **draw(st.sampled_from([{}, {"reads_text": True, "encode_cost": 3, "decode_cost": 50}])),
            ),
        ),
        "delay": draw(st.integers(0, 2)),
        "num_requests": draw(st.integers(1, 14)),
        "abort_share": draw(st.sampled_from([0.0, 0.1, 0.4])),
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=40 * EFFORT)
@given(workloads())
def test_every_request_ends_once_with_what_it_asked_for(load: dict) -> None:
    rnd = random.Random(load["seed"])
    simulation = Simulation(load["limits"], load["delay"])
    to_come = []
    for i in range(load["num_requests"]):
        details = {"priority": rnd.choice([0, 0, -1]), "tenant": rnd.choice("xyz"), "salt": rnd.choice(["", "a"])}
        prompt = [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 12))]
        is_image, given = rnd.random() < 0.5, rnd.choice([None, None, embeds(*range(2 * rnd.randint(1, 12)))])
        if is_image and load["limits"].image.reads_text:
            to_come.append(
                drawing(
                    f"r{i}",
                    (),
                    rnd.choice([1, 2, 9]),
                    seed=i,
                    guidance=rnd.choice([0.0, 1.0, 3.0]),
                    text="" if given else rnd.choice(["", f"cat {i}"]),
                    negative_text=rnd.choice(["", "a dog"]),
                    preview_every=rnd.choice([0, 0, 2]),
                    given=given,
                    **details,
                )
            )
        elif is_image:
            to_come.append(
                drawing(
                    f"r{i}",
                    rnd.choice([prompt[: rnd.randint(0, 12)], SHARED_PROMPT]),
                    rnd.choice([1, 2, 9]),
                    seed=i,
                    guidance=rnd.choice([0.0, 1.0, 3.0]),
                    negative=[rnd.randrange(VOCAB) for _ in range(rnd.choice([0, 0, 5]))],
                    sampler=rnd.choice(["euler", "heun"]),
                    preview_every=rnd.choice([0, 0, 2]),
                    given=given,
                    **details,
                )
            )
        else:
            to_come.append(
                request(f"r{i}", prompt * rnd.choice([1, 3]), rnd.randint(1, 30), stop=i % 2 == 0, **details)
            )
    asked = {one.request_id: one for one in to_come}
    aborted = set()
    for _ in range(20_000):
        while to_come and rnd.random() < 0.4:
            simulation.add(to_come.pop())
        if simulation.scheduler.cursors and rnd.random() < load["abort_share"] / 4:
            name = rnd.choice(list(simulation.scheduler.cursors))
            assert simulation.abort(name)
            aborted.add(name)
        if not simulation.step() and not to_come:
            break
    now = simulation.scheduler.stats()
    assert (now.running, now.waiting, now.blocks_used, now.images_running, now.embedding_bytes) == (0, 0, 0, 0, 0)
    for name, one in asked.items():
        if one.image is not None:
            shown, expected = simulation.shown.get(name, {}), expected_images(one)
            progress = simulation.progress.get(name, [])
            assert progress == sorted(set(progress))
            assert shown.items() <= expected.items()
            if name not in aborted:
                assert progress[-1] == one.image.steps and shown[progress[-1]] == expected[progress[-1]]
                assert simulation.ends[name].finish is FinishReason.STOP
        else:
            expected_tokens = expected_output(one, 40)
            got = simulation.outputs[name]
            assert got == (expected_tokens[: len(got)] if name in aborted else expected_tokens)
        assert (name in simulation.ends) != (name in aborted)
