"""Images beside text in one scheduler: their stages, their latent slots, their place in the steps, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import (
    SIZE,
    Simulation,
    drawing,
    embeds,
    expected_images,
    expected_output,
    expected_vector,
    image_limits,
    limits,
    request,
)
from weft.errors import InvalidRequest
from weft.plan import ImageLimits, KeptHiddenStates, Limits
from weft.scheduler.cursors import DenoiseStage, EncodePrompt, GenerateTokens, PoolPrompt, stages_of
from weft.scheduler.denoise import PATIENCE
from weft.scheduler.integrity import IntegrityError, check_integrity
from weft.scheduler.prompt_embeds import PromptKey
from weft.types import FinishReason, LatentCheckpoint, Pooling, Request

DELAYS = pytest.mark.parametrize("delay", [0, 1, 2])


def roomy(of_images: ImageLimits | None = None, **changes: object) -> Limits:
    return limits(image=of_images or image_limits(), **({"num_blocks": 100, "max_num_seqs": 8} | changes))


def simulated(
    *requests: Request, delay: int = 0, of_images: ImageLimits | None = None, **changes: object
) -> Simulation:
    simulation = Simulation(roomy(of_images, **changes), delay)
    simulation.add(*requests)
    return simulation


def assert_drawn(simulation: Simulation, *requests: Request) -> None:
    for asked in requests:
        name, steps = asked.request_id, asked.image.steps
        assert simulation.shown[name] == expected_images(asked), name
        assert simulation.progress[name] == list(range(1, steps + 1)), name
        assert simulation.ends[name].finish is FinishReason.STOP and not simulation.ends[name].error


def assert_nothing_is_held(simulation: Simulation) -> None:
    scheduler = simulation.scheduler
    now = scheduler.stats()
    assert (now.running, now.waiting, now.blocks_used) == (0, 0, 0)
    assert (now.images_running, now.images_waiting, now.embedding_bytes) == (0, 0, 0)
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    check_integrity(scheduler)


# What kind of request it is.


def encode(*token_ids: int, salt: str = "") -> EncodePrompt:
    return EncodePrompt(PromptKey(salt, token_ids))


def test_the_kind_comes_from_the_request_and_the_model() -> None:
    here = roomy()
    image = drawing("i", [1, 2], negative=[3])
    of_two = DenoiseStage(image.image, 4 * 2)
    assert stages_of(image, here) == [encode(1, 2), encode(3), of_two]
    assert stages_of(request("t", [1, 2]), here) == [GenerateTokens()]
    assert stages_of(request("v", [1, 2], pooling=Pooling.MEAN), here) == [PoolPrompt(Pooling.MEAN)]
    assert stages_of(drawing("i", [1, 2]), here) == [encode(1, 2), DenoiseStage(drawing("i").image, 8)]
    alone = drawing("i", [1, 2], negative=[3], guidance=1.0)
    assert stages_of(alone, here) == [encode(1, 2), DenoiseStage(alone.image, 4)], "one pass steers away from nothing"
    twice = drawing("i", [1, 2], negative=[1, 2], salt="s")
    assert stages_of(twice, here) == [encode(1, 2, salt="s"), DenoiseStage(twice.image, 8)], "one text, encoded once"


@DELAYS
def test_text_vector_and_image_of_one_prompt_each_get_what_they_asked_for(delay: int) -> None:
    prompt = [5, 6, 7, 8, 9]
    text, image = request("text", prompt, 12), drawing("image", prompt, 7)
    vector = request("vector", prompt, 1, pooling=Pooling.MEAN)
    simulation = simulated(text, vector, image, delay=delay)
    simulation.run()
    assert_drawn(simulation, image)
    assert simulation.outputs["text"] == expected_output(text, 64) and simulation.outputs["image"] == []
    assert simulation.ends["vector"].embedding == expected_vector(vector)
    assert_nothing_is_held(simulation)


def test_without_a_model_that_draws_an_image_is_refused() -> None:
    simulation = Simulation(limits())
    with pytest.raises(InvalidRequest, match="no image model"):
        simulation.add(drawing("i"))
    assert not simulation.scheduler.has_work


# Stages.


def test_the_fast_way_is_one_step_for_the_prompt_and_one_for_each_step_asked_for() -> None:
    simulation = simulated(drawing("i", [1, 2, 3], 4))
    simulation.run()
    shapes = [
        (plan.rows and plan.rows[0].count, [(one.start, one.wants_image) for one in plan.denoise])
        for plan in simulation.plans
    ]
    assert shapes == [(3, []), ([], [(0, False)]), ([], [(1, False)]), ([], [(2, False)]), ([], [(3, True)])]


@DELAYS
@pytest.mark.parametrize("steps", [1, 2, 25, 1000])
def test_an_image_has_the_steps_that_it_asked_for(steps: int, delay: int) -> None:
    asked = drawing("i", [1, 2, 3], steps)
    simulation = simulated(asked, delay=delay)
    simulation.run()
    assert_drawn(simulation, asked)
    assert simulation.worker.denoised == simulation.scheduler.stats().denoise_steps == steps
    assert_nothing_is_held(simulation)


def test_an_image_of_one_step_ends_with_its_first_event() -> None:
    simulation = simulated(drawing("i", [1, 2, 3], 1))
    simulation.run()
    (event,) = simulation.events
    assert (event.denoise_step, event.finish, event.cached_tokens) == (1, FinishReason.STOP, 0)
    assert event.image is not None and event.queue_seconds is not None


@DELAYS
@pytest.mark.parametrize("chunk", [1, 2, 16])
def test_both_prompts_are_encoded_in_chunks_like_any_other(chunk: int, delay: int) -> None:
    asked = drawing("i", list(range(12)), 3, negative=[40, 41, 42, 43, 44])
    simulation = simulated(asked, delay=delay, max_prefill_chunk=chunk)
    simulation.run()
    assert_drawn(simulation, asked)
    rows = [row for plan in simulation.plans for row in plan.rows]
    assert sum(row.count for row in rows) == 17 and all(isinstance(row.request, KeptHiddenStates) for row in rows)
    assert simulation.scheduler.stats().prompt_tokens == 17
    assert_nothing_is_held(simulation)


def test_a_prompt_of_no_tokens_is_drawn_and_computes_none() -> None:
    asked = [drawing("nothing", [], 3), drawing("away", [], 2, negative=[9])]
    simulation = simulated(*asked)
    simulation.run()
    assert_drawn(simulation, *asked)
    assert sum(row.count for plan in simulation.plans for row in plan.rows) == 1
    assert_nothing_is_held(simulation)


def test_a_drawing_has_neither_a_row_nor_blocks() -> None:
    simulation = simulated(drawing("i", [1, 2, 3], 5))
    simulation.step()
    now = simulation.scheduler.stats()
    assert (now.blocks_used, now.running, now.images_running, len(simulation.scheduler.running)) == (0, 1, 1, 0)
    assert now.embedding_bytes == 100 + 10, "a latent slot and a text"
    simulation.step()
    assert simulation.scheduler.stats().blocks_used == 0
    simulation.run()


def test_a_prompt_that_was_encoded_is_cached_for_others() -> None:
    simulation = simulated(drawing("i", [3] * 12, 2))
    simulation.run()
    chat = request("chat", [3] * 12 + [4], 3)
    simulation.add(chat)
    simulation.run()
    assert simulation.outputs["chat"] == expected_output(chat, 64)
    assert next(event for event in simulation.events if event.request_id == "chat").cached_tokens == 12


def test_images_are_shown_when_that_was_asked_for() -> None:
    asked = drawing("i", [1], 7, preview_every=3)
    simulation = simulated(asked)
    simulation.run()
    assert list(simulation.shown["i"]) == [3, 6, 7]
    assert_drawn(simulation, asked)


def test_the_time_of_each_stage_is_counted() -> None:
    clock = iter(range(1000))
    simulation = simulated(drawing("i", [1, 2], 3))
    simulation.scheduler._clock = lambda: float(next(clock))
    simulation.run()
    now = simulation.scheduler.stats()
    assert now.encode_seconds > 0 and now.denoise_seconds > 0 and now.images == 1


# Together.


@DELAYS
def test_images_at_different_steps_are_drawn_together(delay: int) -> None:
    first, second = drawing("first", [1], 9, seed=1), drawing("second", [2], 9, seed=2)
    simulation = simulated(first, delay=delay)
    for _ in range(5):
        simulation.step()
    simulation.add(second)
    simulation.run()
    assert_drawn(simulation, first, second)
    together = [{one.start for one in plan.denoise} for plan in simulation.plans if len(plan.denoise) == 2]
    assert together and all(len(starts) == 2 for starts in together)


@DELAYS
def test_a_crowd_of_both_kinds_is_served_whole(delay: int) -> None:
    images = [
        drawing(
            f"i{i}", [i] * (i % 4), 2 + i, seed=i, guidance=1.0 if i % 3 == 0 else 2.0, negative=[7] * (i % 2),
            sampler="heun" if i % 5 == 0 else "euler", preview_every=i % 3,
        )
        for i in range(10)
    ]  # fmt: skip
    chats = [request(f"c{i}", [i, i + 1] * (1 + i), 15, stop=i % 2 == 0) for i in range(8)]
    simulation = simulated(*chats[:4], *images, *chats[4:], delay=delay, num_blocks=24)
    simulation.run()
    assert_drawn(simulation, *images)
    for chat in chats:
        assert simulation.outputs[chat.request_id] == expected_output(chat, 64)
    assert_nothing_is_held(simulation)


def test_an_expensive_image_does_not_block_a_cheap_one_behind_it() -> None:
    """Decodes leave room for the second only."""
    chats = [request(f"c{i}", [i], 30) for i in range(4)]
    dear, cheap = drawing("dear", [1], 3, sampler="heun"), drawing("cheap", [2], 3, guidance=1.0)
    simulation = simulated(*chats, dear, cheap, max_num_batched_tokens=16, of_images=image_limits(max_mixed_denoise=16))
    simulation.run()
    assert_drawn(simulation, dear, cheap)
    assert simulation.events.index(simulation.ends["cheap"]) < simulation.events.index(simulation.ends["dear"])


# Budgets.


@pytest.mark.parametrize("budget", [8, 9, 16, 40])
def test_no_step_is_larger_than_its_budget(budget: int) -> None:
    chats = [request(f"c{i}", [i] * 9, 9) for i in range(6)]
    images = [drawing(f"i{i}", [i, i], 6) for i in range(5)]
    simulation = simulated(*chats, *images, max_num_batched_tokens=budget)
    simulation.run()
    assert max(plan.num_tokens for plan in simulation.plans) <= budget
    assert_drawn(simulation, *images)


def test_an_image_whose_step_is_larger_than_any_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="counts as 16 tokens; a step of the engine has at most 15"):
        simulated(drawing("i", sampler="heun"), max_num_batched_tokens=15)
    simulated(drawing("i", sampler="heun"), max_num_batched_tokens=16).run()


def test_a_denoise_step_costs_its_tokens_its_passes_and_its_evaluations() -> None:
    images = [
        drawing("one pass", guidance=1.0),
        drawing("two", guidance=0.0),
        drawing("heun", guidance=1.0, sampler="heun"),
        drawing("both", sampler="heun"),
    ]
    here = image_limits()
    assert [here.cost(asked.image) for asked in images] == [4, 8, 8, 16]


def test_denoise_steps_beside_decodes_are_bounded() -> None:
    chats = [request(f"c{i}", [i], 40) for i in range(3)]
    images = [drawing(f"i{i}", [i], 12) for i in range(3)]
    simulation = simulated(*chats, *images, of_images=image_limits(max_mixed_denoise=8), max_num_batched_tokens=64)
    simulation.run()
    beside = [
        sum(one.cost for one in plan.denoise) for plan in simulation.plans if any(row.samples for row in plan.rows)
    ]
    assert max(beside) == 8
    assert_drawn(simulation, *images)


def test_one_that_costs_more_than_the_credit_pays_by_waiting() -> None:
    chats = [request(f"c{i}", [i], 60) for i in range(3)]
    image = drawing("i", [1], 8)
    simulation = simulated(*chats, image, of_images=image_limits(max_mixed_denoise=2))
    simulation.run()
    at = [i for i, plan in enumerate(simulation.plans) if plan.denoise]
    assert [b - a for a, b in pairwise(at)] == [4] * 7, "8 tokens of 2 a step"
    assert_drawn(simulation, image)


def test_without_decodes_images_and_prompts_share_the_step() -> None:
    image = drawing("i", [1], 30)
    simulation = simulated(image, max_num_batched_tokens=16, max_prefill_chunk=16)
    simulation.step()
    simulation.add(*(request(f"p{i}", [i] * 60, 1) for i in range(3)))
    simulation.run()
    both = [plan for plan in simulation.plans if plan.rows and plan.denoise]
    assert len(both) >= 15, "each takes half of the step"
    assert_drawn(simulation, image)


def test_what_prompts_leave_is_the_images() -> None:
    images = [drawing(f"i{i}", [i], 20) for i in range(3)]
    simulation = simulated(*images, max_num_batched_tokens=24, max_num_seqs=3)
    simulation.step()
    assert len(simulation.scheduler.images.denoising) == 3
    simulation.add(*(request(f"v{i}", [i] * 3, 1, pooling=Pooling.MEAN) for i in range(8)))
    simulation.step()
    (plan,) = simulation.plans[1:]
    assert len(plan.rows) == 3 and len(plan.denoise) == 1, "half of the step is not enough for a second image"
    simulation.run()
    assert any(len(plan.denoise) == 3 for plan in simulation.plans)


def test_where_decodes_fill_the_step_images_get_steps_of_their_own() -> None:
    chats = [request(f"c{i}", [i], 50) for i in range(8)]
    image = drawing("i", [1], 6)
    simulation = simulated(image, *chats, max_num_batched_tokens=8)
    simulation.run()
    assert_drawn(simulation, image)
    alone = [i for i, plan in enumerate(simulation.plans) if plan.denoise and not plan.rows]
    assert len(alone) >= 5
    gaps = [b - a for a, b in pairwise(alone)]
    assert min(gaps) == max(gaps) == PATIENCE + 1, "and no more of them than that"
    for chat in chats:
        assert simulation.outputs[chat.request_id] == expected_output(chat, 64)


def test_a_switch_draws_whole_images_at_once() -> None:
    asked = [drawing(f"i{i}", [i], 5 + i) for i in range(3)]
    chat = request("c", [1], 10)
    simulation = simulated(chat, *asked, of_images=image_limits(whole_images=True))
    simulation.run()
    for one in asked:
        name = one.request_id
        assert simulation.shown[name] == expected_images(one) and simulation.progress[name] == [one.image.steps]
    assert sum(len(plan.denoise) for plan in simulation.plans) == 3
    assert simulation.outputs["c"] == expected_output(chat, 64)
    assert_nothing_is_held(simulation)


# A text encoder and a VAE.

WITH_ENCODERS = image_limits(reads_text=True, encode_cost=6, decode_cost=10, max_num_embeds=0, max_mixed_denoise=8)


def stages(simulation: Simulation) -> list[list[tuple[str, int]]]:
    return [[(one.stage, one.start) for one in plan.denoise] for plan in simulation.plans]


@DELAYS
def test_prompts_and_pictures_are_units_of_their_own(delay: int) -> None:
    asked = drawing("i", (), 4, text="a cat", negative_text="a dog", preview_every=2)
    simulation = simulated(asked, delay=delay, of_images=WITH_ENCODERS)
    simulation.run()
    assert_drawn(simulation, asked)
    assert [unit for (unit,) in stages(simulation)] == [
        ("encode", 0), ("encode", 1), ("denoise", 0), ("denoise", 1), ("decode", 2), ("denoise", 2), ("denoise", 3),
        ("decode", 4),
    ]  # fmt: skip
    assert [plan.num_tokens for plan in simulation.plans] == [6, 6, 8, 8, 10, 8, 8, 10]
    assert simulation.scheduler.stats().denoise_steps == 4
    assert_nothing_is_held(simulation)


def test_only_prompts_that_are_text_and_are_used_are_encoded() -> None:
    images = [
        drawing("one pass", (), 1, text="a cat", guidance=1.0),
        drawing("given", (), 1, given=embeds(1, 2), negative_text="a dog"),
        drawing("both given", (), 1, given=embeds(1, 2), negative_given=embeds(3, 4)),
    ]
    for asked, encoded in zip(images, ([0], [1], []), strict=True):
        simulation = simulated(asked, of_images=WITH_ENCODERS)
        simulation.run()
        assert_drawn(simulation, asked)
        assert [start for (stage, start), *_ in stages(simulation) if stage == "encode"] == encoded
        assert_nothing_is_held(simulation)


def test_encodings_and_decodings_beside_decodes_are_bounded_as_denoise_steps_are() -> None:
    """One that is larger than the credit is alone, and is paid for by the steps that follow."""
    chats = [request(f"c{i}", [i], 60) for i in range(3)]
    images = [drawing(f"i{i}", (), 2, text="a cat", seed=i) for i in range(3)]
    simulation = simulated(*chats, *images, of_images=WITH_ENCODERS, max_num_batched_tokens=64)
    simulation.run()
    # In the first step the chats prefill.
    beside = [sum(one.cost for one in plan.denoise) for plan in simulation.plans[1:] if plan.rows]
    assert max(beside) == 10, "one picture, and nothing beside it"
    assert sum(beside[:20]) <= 20 * 8 + 10
    assert_drawn(simulation, *images)
    for chat in chats:
        assert len(simulation.rows_of(chat.request_id)) == 60, "a token in every step"


def test_a_picture_that_no_step_has_a_budget_for_gets_a_step_of_its_own() -> None:
    chats = [request(f"c{i}", [i], 30) for i in range(3)]
    image = drawing("i", (), 2, text="a cat")
    simulation = simulated(*chats, image, of_images=replace(WITH_ENCODERS, decode_cost=40), max_num_batched_tokens=16)
    simulation.run()
    assert_drawn(simulation, image)
    (alone,) = [plan for plan in simulation.plans if plan.denoise and plan.denoise[0].stage == "decode"]
    assert not alone.rows


# Checkpoints.


@DELAYS
@pytest.mark.parametrize("of_images", [image_limits(), WITH_ENCODERS], ids=["", "with encoders"])
def test_an_image_goes_on_from_any_checkpoint_and_shows_the_same(delay: int, of_images: ImageLimits) -> None:
    """Every k steps there is one, and no two images of a batch have theirs after the same step."""
    text = "a cat" if of_images.reads_text else ""
    asked = [drawing(f"i{i}", [1], 9, seed=i, text=text, preview_every=3) for i in range(3)]
    of_images = replace(of_images, checkpoint_steps=3, max_mixed_denoise=64)
    simulation = simulated(*asked, delay=delay, of_images=of_images, max_num_batched_tokens=64)
    simulation.run()
    assert_drawn(simulation, *asked)
    kept = [event for event in simulation.events if event.checkpoint is not None]
    assert all(event.checkpoint.step == event.denoise_step and event.finish is None for event in kept)
    steps = {one.request_id: [e.denoise_step for e in kept if e.request_id == one.request_id] for one in asked}
    assert sorted(steps.values()) == [[1, 4, 7], [2, 5, 8], [3, 6]]
    for event in kept:
        (whose,) = [one for one in asked if one.request_id == event.request_id]
        resumed = simulated(replace(whose, checkpoint=event.checkpoint), delay=delay, of_images=of_images)
        resumed.run()
        assert resumed.progress[whose.request_id] == list(range(event.denoise_step + 1, 10))
        assert resumed.worker.denoised == 9 - event.denoise_step
        assert resumed.shown[whose.request_id].items() <= expected_images(whose).items()
        assert resumed.shown[whose.request_id][9] == expected_images(whose)[9]
        assert_nothing_is_held(resumed)


@pytest.mark.parametrize("step", [0, 5, -1])
def test_a_checkpoint_of_no_step_of_the_image_is_refused(step: int) -> None:
    with pytest.raises(InvalidRequest, match="A checkpoint after"):
        simulated(drawing("i", steps=5, checkpoint=LatentCheckpoint(step, b"")))


# Canvases.


def test_no_more_images_are_drawn_than_there_are_latent_slots_and_nobody_waits_for_them() -> None:
    images = [drawing(f"i{i}", [i], 10) for i in range(5)]
    chat = request("chat", [1, 2], 5)
    simulation = simulated(*images, chat, of_images=image_limits(max_num_images=2))
    simulation.step()
    now = simulation.scheduler.stats()
    assert (now.images_running, now.images_waiting) == (2, 3)
    simulation.run()
    assert simulation.events.index(simulation.ends["chat"]) < simulation.events.index(simulation.ends["i0"])
    assert_drawn(simulation, *images)
    ends = [event.request_id for event in simulation.events if event.finish]
    assert ends == ["chat", "i0", "i1", "i2", "i3", "i4"], "in the order of their arrival"


# Ends.


@DELAYS
@pytest.mark.parametrize("after", range(9))
def test_an_abort_at_any_step_gives_everything_back(after: int, delay: int) -> None:
    other = drawing("other", [9, 9], 6)
    simulation = simulated(drawing("gone", [1] * 6, 4, negative=[2] * 3), other, delay=delay, max_prefill_chunk=4)
    for _ in range(after):
        simulation.step()
    simulation.abort("gone")
    events = len(simulation.events)
    held = simulation.scheduler.stats()
    assert held.images_running <= 1 and held.blocks_used <= 1
    simulation.run()
    assert "gone" not in {event.request_id for event in simulation.events[events:]}
    assert_drawn(simulation, other)
    assert_nothing_is_held(simulation)


@DELAYS
def test_an_id_and_a_latent_slot_can_be_used_again_at_once(delay: int) -> None:
    simulation = simulated(drawing("i", [1], 8, seed=1), delay=delay, of_images=image_limits(max_num_images=1))
    for _ in range(4):
        simulation.step()
    simulation.abort("i")
    again = drawing("i", [2], 5, seed=2)
    simulation.add(again)
    simulation.progress.clear()
    simulation.run()
    assert_drawn(simulation, again)


@DELAYS
def test_latents_that_are_no_numbers_end_that_image_alone(delay: int) -> None:
    broken, sound = drawing("broken", [1], 6, seed=66), drawing("sound", [2], 6, seed=1)
    simulation = simulated(broken, sound, delay=delay)
    simulation.worker.broken_seeds = {66}
    simulation.run()
    end = simulation.ends["broken"]
    assert (end.finish, end.error, end.image) == (FinishReason.ERROR, "not a number", None)
    assert_drawn(simulation, sound)
    assert_nothing_is_held(simulation)


@pytest.mark.parametrize("negative", [False, True])
def test_a_stage_that_fails_ends_the_request_and_frees_everything(negative: bool) -> None:
    broken = drawing("broken", [1, 2], 6, negative=[49]) if negative else drawing("broken", [49], 6)
    sound = drawing("sound", [2], 6)
    simulation = simulated(broken, sound)
    simulation.worker.broken = {49}
    simulation.run()
    end = simulation.ends["broken"]
    assert end.error == "not a number" and "broken" not in simulation.progress
    assert end.queue_seconds is not None and end.cached_tokens == 0
    assert_drawn(simulation, sound)
    assert_nothing_is_held(simulation)


# Priority, tenants, preemption.


def test_a_more_urgent_image_overtakes_at_the_next_step_and_nothing_is_lost() -> None:
    slow, urgent = drawing("slow", [1], 20), drawing("urgent", [2], 5, priority=-1)
    chats = [request(f"c{i}", [i], 60) for i in range(2)]
    simulation = simulated(*chats, slow, of_images=image_limits(max_mixed_denoise=8))
    for _ in range(6):
        simulation.step()
    simulation.add(urgent)
    simulation.run()
    assert_drawn(simulation, slow, urgent)
    assert simulation.events.index(simulation.ends["urgent"]) < simulation.events.index(simulation.ends["slow"])
    assert simulation.worker.denoised == 25, "no step was made twice"


def test_tenants_share_the_denoise_steps() -> None:
    many = [drawing(f"a{i}", [i], 40, tenant="a") for i in range(3)]
    one = drawing("b", [9], 40, tenant="b")
    chats = [request("c", [1], 63, tenant="c")]
    simulation = simulated(*chats, *many, one, of_images=image_limits(max_num_images=4, max_mixed_denoise=8))
    for _ in range(50):
        simulation.step()
    steps = {name: len(simulation.progress.get(name, [])) for name in ("a0", "a1", "a2", "b")}
    assert abs(steps["b"] - (steps["a0"] + steps["a1"] + steps["a2"])) <= 2, steps
    simulation.run()


def test_a_priority_takes_no_denoise_steps_from_other_tenants() -> None:
    urgent = [drawing(f"a{i}", [i], 40, tenant="a", priority=-9) for i in range(3)]
    patient = drawing("b", [9], 40, tenant="b")
    chats = [request("c", [1], 63, tenant="c")]
    simulation = simulated(*chats, *urgent, patient, of_images=image_limits(max_num_images=4, max_mixed_denoise=8))
    for _ in range(50):
        simulation.step()
    steps = {name: len(simulation.progress.get(name, [])) for name in ("a0", "a1", "a2", "b")}
    assert abs(steps["b"] - (steps["a0"] + steps["a1"] + steps["a2"])) <= 2, steps
    simulation.run()


def test_a_tenant_pays_for_images_what_they_cost() -> None:
    simulation = simulated(drawing("i", [1], 10, tenant="a"), request("c", [1], 4, tenant="b"), max_num_seqs=2)
    for _ in range(3):
        simulation.step()
    served = simulation.scheduler.waiting.tenants.served
    assert served("a") == 1 + 2 * 8 and served("b") == 1 + 2


@DELAYS
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_prompt_that_is_preempted_is_encoded_again(every: int, delay: int) -> None:
    images = [drawing(f"i{i}", [i] * 10, 4, negative=[i] * 5) for i in range(4)]
    simulation = simulated(*images, delay=delay, force_preempt_every=every, max_prefill_chunk=3)
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    assert_drawn(simulation, *images)
    assert_nothing_is_held(simulation)


def test_an_image_is_no_sibling_and_no_answer() -> None:
    simulation = simulated(request("leader", [1, 2]))
    for wrong in (
        drawing("i", [1, 2], sibling_of="leader"),
        replace(drawing("i"), pooling=Pooling.LAST),
        replace(drawing("i"), params=replace(drawing("i").params, prompt_logprobs=1)),
    ):
        with pytest.raises(InvalidRequest, match="no tokens, no vector and no siblings"):
            simulation.scheduler.add(wrong)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (drawing("i", size=SIZE + 1), "size"),
        (drawing("i", [1] * 13), "prompt"),
        (drawing("i", negative=[1] * 13), "negative_prompt"),
        (drawing("i", negative=[50]), "negative_prompt"),
        (drawing("i", [50]), "prompt"),
        (drawing("i", steps=0), "num_inference_steps"),
        (drawing("i", steps=1001), "num_inference_steps"),
        (drawing("i", guidance=float("nan")), "guidance_scale"),
        (drawing("i", sampler="rk4"), "sampler"),
    ],
)
def test_an_image_that_cannot_be_drawn_is_refused(asked: Request, param: str) -> None:
    simulation = Simulation(roomy())
    with pytest.raises(InvalidRequest) as caught:
        simulation.scheduler.add(asked)
    assert caught.value.param == param
    assert not simulation.scheduler.has_work
    check_integrity(simulation.scheduler)


# The books.


def lost_latent_slot(simulation: Simulation) -> None:
    simulation.scheduler.images.memory.free_latent_slots.pop()


def latent_slot_of_two(simulation: Simulation) -> None:
    one, other = simulation.scheduler.images.denoising
    one.latent_slot = other.latent_slot


def miscounted_latent_slots(simulation: Simulation) -> None:
    simulation.scheduler.images.memory.num_latent_slots += 1


def miscounted_images(simulation: Simulation) -> None:
    simulation.scheduler.images.num_open -= 1


def forgotten_image(simulation: Simulation) -> None:
    simulation.scheduler.images.denoising.pop()


def drawing_on_nothing(simulation: Simulation) -> None:
    memory, (one, _) = simulation.scheduler.images.memory, simulation.scheduler.images.denoising
    one.release(memory)


def too_far(simulation: Simulation) -> None:
    simulation.scheduler.images.denoising[0].computed += 1


def too_many_bytes(simulation: Simulation) -> None:
    scheduler = simulation.scheduler
    scheduler.limits = replace(scheduler.limits, image=image_limits(max_embedding_bytes=100))


def never_begun(simulation: Simulation) -> None:
    simulation.scheduler.images.denoising[0].is_begun = False


@pytest.mark.parametrize(
    "damage",
    [
        lost_latent_slot,
        latent_slot_of_two,
        miscounted_latent_slots,
        miscounted_images,
        forgotten_image,
        drawing_on_nothing,
        too_far,
        too_many_bytes,
        never_begun,
    ],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_noticed(damage: Callable[[Simulation], None]) -> None:
    simulation = simulated(drawing("a", [1], 9), drawing("b", [2], 9))
    for _ in range(3):
        simulation.step()
    check_integrity(simulation.scheduler)
    damage(simulation)
    with pytest.raises(IntegrityError):
        check_integrity(simulation.scheduler)


@DELAYS
def test_the_budget_is_counted_by_kind_of_work(delay: int) -> None:
    asked = drawing("i", [1, 2, 3], 5, negative=[4, 5])
    simulation = simulated(
        asked, request("t", [1, 2, 3, 4, 5], 4), request("v", [6, 7], pooling=Pooling.MEAN), delay=delay
    )
    simulation.run()
    stats = simulation.scheduler.stats()
    assert (stats.prefill_tokens, stats.decode_tokens) == (5, 3)
    assert stats.encode_tokens == 3 + 2 + 2, "both prompts of the image, and the vector's"
    assert stats.denoise_tokens == 5 * 4 * 2, "five steps of two passes"
    assert stats.computed_tokens == stats.prefill_tokens + stats.decode_tokens + stats.encode_tokens
