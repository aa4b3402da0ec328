"""Texts of images: encoded once for all who draw from them, known until their slots are needed, and tensors of clients
instead of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import Simulation, drawing, embeds, expected_output, image_limits, request
from tests.scheduler.test_denoise import DELAYS, assert_drawn, assert_nothing_is_held, roomy, simulated
from weft.errors import InvalidRequest
from weft.payloads import Conditioning, PromptEmbeds
from weft.scheduler.cursors import DenoiseStage, EncodePrompt, stages_of
from weft.scheduler.integrity import IntegrityError, check_integrity
from weft.scheduler.prompt_embeds import EmbedsCache, PromptKey
from weft.scheduler.scheduler import Scheduler
from weft.types import FinishReason, Request

P, N = [1, 2, 3, 4, 5], [7, 8]


def family(count: int, **changes: object) -> list[Request]:
    """Images of one prompt."""
    return [drawing(f"i{i}", P, 4, negative=N, **({"seed": i} | changes)) for i in range(count)]


# Sharing.


@DELAYS
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_the_images_of_a_prompt_encode_it_once(delay: int, chunk: int) -> None:
    asked = family(4)
    simulation = simulated(*asked, delay=delay, max_prefill_chunk=chunk, of_images=image_limits(max_num_images=4))
    simulation.run()
    assert_drawn(simulation, *asked)
    assert simulation.worker.encoded == [len(P), len(N)] or simulation.worker.encoded == [len(N), len(P)]
    assert simulation.worker.computed == len(P) + len(N)
    assert_nothing_is_held(simulation)


def test_an_image_whose_texts_are_known_goes_straight_to_its_steps() -> None:
    first, again = drawing("first", P, 3, negative=N), drawing("again", P, 5, negative=N, seed=9)
    simulation = simulated(first)
    simulation.run()
    before = len(simulation.plans)
    simulation.add(again)
    simulation.run()
    assert_drawn(simulation, first, again)
    assert [len(plan.denoise) for plan in simulation.plans[before:]] == [1] * 5
    assert not any(plan.rows for plan in simulation.plans[before:])


def test_a_negative_prompt_is_shared_by_images_of_different_prompts() -> None:
    asked = [drawing(f"i{i}", [i] * 4, 3, negative=N) for i in range(3)]
    simulation = simulated(*asked)
    simulation.run()
    assert_drawn(simulation, *asked)
    assert sorted(simulation.worker.encoded) == [2, 4, 4, 4]


def test_one_prompt_for_both_is_one_text() -> None:
    asked = drawing("i", P, 3, negative=P)
    simulation = simulated(asked)
    simulation.step()
    assert simulation.scheduler.stats().embedding_bytes == 100 + 10
    simulation.run()
    assert_drawn(simulation, asked)
    assert simulation.worker.encoded == [len(P)]


def test_texts_of_different_salts_are_not_shared() -> None:
    asked = [drawing(f"i{i}", P, 3, salt=salt) for i, salt in enumerate(["", "a", "a"])]
    simulation = simulated(*asked)
    simulation.run()
    assert_drawn(simulation, *asked)
    assert len(simulation.worker.encoded) == 2


def test_who_waits_for_a_text_encodes_another_meanwhile() -> None:
    one, other = drawing("one", P, 3), drawing("other", P, 3, negative=N)
    simulation = simulated(one, other, max_prefill_chunk=2)
    simulation.step()
    assert [row.count for row in simulation.plans[0].rows] == [2, 2]
    simulation.run()
    assert_drawn(simulation, one, other)
    assert simulation.worker.computed == len(P) + len(N)


def test_those_who_wait_are_in_nobodys_way() -> None:
    chat = request("chat", [9], 3)
    simulation = simulated(*family(3), chat, max_prefill_chunk=1)
    simulation.step()
    now = simulation.scheduler.stats()
    assert (now.running, now.waiting, now.images_running) == (3, 1, 3), "two encode, the chat runs, one stands aside"
    simulation.run()
    assert simulation.outputs["chat"] == expected_output(chat, 64)


def test_a_queued_encoder_holds_nobody_up_who_is_more_urgent() -> None:
    """Rows are taken: the text is encoded by whoever gets one first."""
    chats = [request(f"c{i}", [i], 20, priority=-1) for i in range(2)]
    slow, urgent = drawing("slow", P, 2), drawing("urgent", P, 2, priority=-2)
    simulation = simulated(*chats, max_num_seqs=2)
    simulation.step()
    simulation.add(slow)
    simulation.step()
    simulation.add(urgent)
    simulation.run()
    assert simulation.admissions() == ["c0", "c1", "urgent"]
    assert_drawn(simulation, slow, urgent)
    assert simulation.worker.encoded == [len(P)]


# An encoder that does not come to its end.


@DELAYS
@pytest.mark.parametrize("after", range(6))
def test_one_of_those_who_wait_takes_over(after: int, delay: int) -> None:
    gone, *others = family(4)
    simulation = simulated(gone, *others, delay=delay, max_prefill_chunk=2, of_images=image_limits(max_num_images=4))
    for _ in range(after):
        simulation.step()
    simulation.abort("i0")
    simulation.run()
    assert_drawn(simulation, *others)
    assert simulation.worker.encoded.count(len(P)) <= 2
    assert_nothing_is_held(simulation)


@DELAYS
def test_each_ends_by_itself_where_the_text_is_no_numbers(delay: int) -> None:
    broken = [drawing(f"b{i}", [49, 1, 2], 3) for i in range(3)]
    sound = drawing("sound", [1], 3)
    simulation = simulated(*broken, sound, delay=delay, of_images=image_limits(max_num_images=4))
    simulation.worker.broken = {49}
    simulation.run()
    for one in broken:
        assert simulation.ends[one.request_id].error == "not a number"
    assert_drawn(simulation, sound)
    assert PromptKey("", (49, 1, 2)) not in simulation.scheduler.images.memory.embeds.by_key
    assert_nothing_is_held(simulation)


@DELAYS
@pytest.mark.parametrize("every", [1, 2, 3])
def test_preemption_of_encoders_is_bounded(every: int, delay: int) -> None:
    """Who takes over has not been preempted himself, yet all of them together must come to an end."""
    asked = family(4)
    simulation = simulated(
        *asked,
        delay=delay,
        force_preempt_every=every,
        max_prefill_chunk=1,
        max_preemptions=2,
        of_images=image_limits(max_num_images=4),
    )
    simulation.run(max_steps=200)
    assert simulation.scheduler.stats().preemptions > 0
    assert_drawn(simulation, *asked)


# What is known, and for how long.


def test_a_slot_that_is_needed_is_that_of_the_text_let_go_longest_ago() -> None:
    simulation = simulated(of_images=image_limits(max_num_images=1, max_num_embeds=3))

    def encodes(*prompt: int) -> bool:
        before = len(simulation.worker.encoded)
        asked = drawing("i", prompt, 1, guidance=1.0)
        simulation.ends.clear()
        simulation.progress.clear()
        simulation.shown.clear()
        simulation.add(asked)
        simulation.run()
        assert_drawn(simulation, asked)
        return len(simulation.worker.encoded) > before

    assert [encodes(1), encodes(2), encodes(3)] == [True] * 3
    assert not encodes(1), "used again, it outlives the others"
    assert encodes(4), "in the place of 2"
    assert [encodes(3), encodes(1), encodes(4)] == [False] * 3
    assert encodes(2)
    assert encodes(3)


def test_a_slot_that_holds_nothing_is_reused_before_one_that_does() -> None:
    asked = [
        drawing("known", P, 1, guidance=1.0),
        drawing("given", given=embeds(1, 2), steps=1, guidance=1.0),
        drawing("other", N, 1, guidance=1.0),
        drawing("again", P, 1, guidance=1.0),
    ]
    simulation = simulated(of_images=image_limits(max_num_images=1, max_num_embeds=2))
    for one in asked:
        simulation.add(one)
        simulation.run()
    assert_drawn(simulation, *asked)
    assert simulation.worker.encoded == [len(P), len(N)]


def test_a_text_that_was_never_whole_is_not_known() -> None:
    simulation = simulated(drawing("gone", P, 3), max_prefill_chunk=2)
    simulation.step()
    simulation.abort("gone")
    again = drawing("again", P, 3)
    simulation.add(again)
    simulation.run()
    assert_drawn(simulation, again)
    assert simulation.worker.computed == 2 + len(P)


def test_what_is_drawn_from_is_not_forgotten_and_all_else_is() -> None:
    done, running = drawing("done", N, 1), drawing("running", P, 9)
    simulation = simulated(done, running)
    while "done" not in simulation.ends:
        simulation.step()
    texts = simulation.scheduler.images.memory.embeds
    assert len(texts.by_key) == 2
    texts.forget_unused()
    check_integrity(simulation.scheduler)
    assert [key.token_ids for key in texts.by_key] == [tuple(P)]
    simulation.add(drawing("again", N, 1), drawing("same", P, 1))
    simulation.run()
    assert simulation.worker.encoded == [len(N), len(P), len(N)]
    assert_drawn(simulation, running)


def test_images_wait_for_texts_where_those_are_fewer_than_latent_slots() -> None:
    asked = [drawing(f"i{i}", [i], 3, negative=[i, i]) for i in range(5)]
    chat = request("chat", [1], 4)
    simulation = simulated(*asked, chat, of_images=image_limits(max_num_images=4, max_num_embeds=3))
    simulation.run()
    assert_drawn(simulation, *asked)
    assert simulation.outputs["chat"] == expected_output(chat, 64)
    assert_nothing_is_held(simulation)


# Tensors of clients.


def test_the_language_model_is_not_asked_for_what_a_client_has_encoded() -> None:
    here = roomy()
    both = drawing("i", negative_given=embeds(3, 4), given=embeds(1, 2))
    assert stages_of(both, here) == [DenoiseStage(both.image, 8)]
    prompt_alone = drawing("i", given=embeds(1, 2), negative=[3])
    assert stages_of(prompt_alone, here) == [EncodePrompt(PromptKey("", (3,))), DenoiseStage(prompt_alone.image, 8)]


@DELAYS
def test_images_are_drawn_from_tensors_beside_all_others(delay: int) -> None:
    asked = [
        drawing("given", given=embeds(1, 2, 3, 4), steps=6, seed=1),
        drawing("both", given=embeds(5, 6), negative_given=embeds(7, 8), steps=3),
        drawing("away", P, 4, negative_given=embeds(9, 9)),
        drawing("one pass", given=embeds(1, 2, 3, 4), guidance=1.0, preview_every=1),
        *family(3),
    ]
    chat = request("chat", [5, 6], 9)
    simulation = simulated(*asked, chat, delay=delay)
    simulation.run()
    assert_drawn(simulation, *asked)
    assert simulation.outputs["chat"] == expected_output(chat, 64)
    assert simulation.worker.encoded.count(len(P)) == 1
    assert_nothing_is_held(simulation)


def test_equal_tensors_are_neither_shared_nor_kept() -> None:
    asked = [drawing(f"i{i}", given=embeds(1, 2), guidance=1.0, steps=4) for i in range(2)]
    simulation = simulated(*asked)
    simulation.step()
    assert simulation.scheduler.stats().embedding_bytes == 2 * (100 + 10 + 4), "latent slot, text and tensor"
    simulation.run()
    texts = simulation.scheduler.images.memory.embeds
    assert not texts.by_key and all(text.source is None for text in texts.slots)


LARGE = embeds(*range(20))
"""40 of the 100 bytes that there are for tensors."""


def given(name: str, steps: int = 4, **details: object) -> Request:
    return drawing(name, given=LARGE, steps=steps, **details)


@DELAYS
def test_tensors_that_do_not_fit_wait_and_block_nobody_who_has_none(delay: int) -> None:
    first = [given(f"g{i}") for i in range(3)]
    others = [drawing(f"i{i}", [i], 3) for i in range(3)]
    chat = request("chat", [1, 2], 5)
    simulation = simulated(*first, *others, chat, delay=delay, of_images=image_limits(max_num_images=6))
    simulation.step()
    now = simulation.scheduler.stats()
    assert (now.images_running, now.images_waiting) == (5, 1)
    assert [cursor.id for cursor in simulation.scheduler.waiting] == ["g2"]
    simulation.run()
    assert_drawn(simulation, *first, *others)
    assert simulation.outputs["chat"] == expected_output(chat, 64)
    assert_nothing_is_held(simulation)


def aborted(simulation: Simulation) -> None:
    simulation.abort("first")


def finished(simulation: Simulation) -> None:
    while "first" not in simulation.ends:
        simulation.step()
    assert simulation.ends["first"].finish is FinishReason.STOP


def failed(simulation: Simulation) -> None:
    simulation.worker.broken_seeds = {66}
    while "first" not in simulation.ends:
        simulation.step()
    assert simulation.ends["first"].finish is FinishReason.ERROR


@DELAYS
@pytest.mark.parametrize("end", [aborted, finished, failed], ids=lambda end: end.__name__)
def test_bytes_are_given_back_on_every_end(end: Callable[[Simulation], None], delay: int) -> None:
    first, second = given("first", negative_given=LARGE, seed=66), given("second")
    simulation = simulated(first, second, delay=delay)
    simulation.step()
    assert simulation.scheduler.images.memory.client_bytes == 80
    end(simulation)
    simulation.worker.broken_seeds = set()
    simulation.step()
    assert simulation.scheduler.images.memory.client_bytes == 40, "the second has its turn at once"
    simulation.run()
    assert_drawn(simulation, second)
    assert_nothing_is_held(simulation)


def test_an_image_that_waits_for_bytes_can_be_aborted() -> None:
    simulation = simulated(given("first", 9, negative_given=LARGE), given("second"))
    simulation.step()
    simulation.abort("second")
    assert simulation.scheduler.stats().images_waiting == 0
    simulation.run()
    assert_nothing_is_held(simulation)


def test_tensors_that_never_fit_are_refused_with_the_flag() -> None:
    with pytest.raises(InvalidRequest, match=r"40 bytes; there are 39 for all tensors \(--max-embedding-mb\)"):
        simulated(given("i"), of_images=image_limits(max_embedding_bytes=3 * 100 + 6 * 10 + 39))
    with pytest.raises(ValueError, match="more than 359 bytes"):
        Scheduler(roomy(image_limits(max_embedding_bytes=359)))


def tensor(**changes: object) -> PromptEmbeds:
    parts = {"data": memoryview(bytes(4)), "shape": (1, 2), "dtype": "float16"} | changes
    return PromptEmbeds(**parts)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (tensor(shape=(4,)), "shape"),
        (tensor(shape=(1, 4)), "shape"),
        (tensor(shape=(13, 2), data=memoryview(bytes(52))), "shape"),
        (tensor(dtype="int8"), "dtype"),
        (tensor(data=memoryview(bytes(5))), "data"),
        (tensor(data=memoryview(b"\0\x7c\0\0")), "data"),
        (tensor(sha256="0"), "sha256"),
    ],
)
def test_the_engine_checks_tensors_again(wrong: PromptEmbeds, field: str) -> None:
    simulation = simulated()
    for asked, place in (
        (drawing("i", given=wrong), "prompt_embeds"),
        (drawing("i", negative_given=wrong), "additional_information.entries['negative_prompt_embeds'].tensor"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            simulation.add(asked)
        assert caught.value.param == f"{place}.{field}"
    assert not simulation.scheduler.has_work


@pytest.mark.parametrize(
    ("texts", "changes", "param"),
    [
        (Conditioning(prompt=embeds(1, 2)), {"prompt": P}, "prompt_embeds"),
        (Conditioning(negative=embeds(1, 2)), {"negative": N}, "negative_prompt"),
    ],
)
def test_a_prompt_is_given_once(texts: Conditioning, changes: dict[str, list[int]], param: str) -> None:
    with pytest.raises(InvalidRequest, match="already") as caught:
        simulated(replace(drawing("i", **({"prompt": []} | changes)), conditioning=texts))
    assert caught.value.param == param


def test_only_images_have_tensors() -> None:
    with pytest.raises(InvalidRequest, match="Only requests for images"):
        simulated(replace(request("chat", [1]), conditioning=Conditioning(prompt=embeds(1, 2))))


def test_a_model_that_draws_from_no_states_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="takes no prompt embeds"):
        simulated(drawing("i", given=embeds(1, 2)), of_images=image_limits(inputs={}))


# The books.


def texts_of(simulation: Simulation) -> EmbedsCache:
    return simulation.scheduler.images.memory.embeds


def text_taken_for_nobody(simulation: Simulation) -> None:
    texts_of(simulation).take(PromptKey("", (9,)))


def text_given_back_under_its_image(simulation: Simulation) -> None:
    texts_of(simulation).give_back(simulation.scheduler.images.denoising[0].embeds[0])


def text_lost_by_its_image(simulation: Simulation) -> None:
    simulation.scheduler.images.denoising[0].embeds = None, None


def text_used_and_to_be_reused(simulation: Simulation) -> None:
    texts_of(simulation).unused[simulation.scheduler.images.denoising[0].embeds[0]] = None


def slot_never_reused(simulation: Simulation) -> None:
    texts_of(simulation).unused.popitem()


def text_under_anothers_key(simulation: Simulation) -> None:
    text = texts_of(simulation).by_key.pop(PromptKey("", tuple(P)))
    texts_of(simulation).by_key[PromptKey("", (9,))] = text


def text_not_found(simulation: Simulation) -> None:
    texts_of(simulation).by_key.clear()


def drawn_from_half_a_text(simulation: Simulation) -> None:
    simulation.scheduler.images.denoising[0].embeds[0].is_complete = False


def encoded_by_nobody(simulation: Simulation) -> None:
    """Its images would wait for ever."""
    simulation.scheduler.images.denoising[0].embeds[0].is_being_encoded = True


def half_a_text_is_known(simulation: Simulation) -> None:
    """The next image of its prompt would be drawn from half of it."""
    text = next(iter(texts_of(simulation).unused))
    text.source = PromptKey("", (9,))
    texts_of(simulation).by_key[text.source] = text


def tensor_of_two(simulation: Simulation) -> None:
    one, other = simulation.scheduler.images.denoising[1:]
    other.embeds[0].refs -= 1
    one.embeds[0].refs += 1
    other.embeds = one.embeds


def miscounted_tensors(simulation: Simulation) -> None:
    simulation.scheduler.images.memory.client_bytes -= 1


def aside_without_a_latent_slot(simulation: Simulation) -> None:
    images = simulation.scheduler.images
    cursor = images.denoising.pop()
    cursor.release(images.memory)
    images.awaiting_embeds.append(cursor)


@pytest.mark.parametrize(
    "damage",
    [
        text_taken_for_nobody,
        text_given_back_under_its_image,
        text_lost_by_its_image,
        text_used_and_to_be_reused,
        slot_never_reused,
        text_under_anothers_key,
        text_not_found,
        drawn_from_half_a_text,
        encoded_by_nobody,
        half_a_text_is_known,
        tensor_of_two,
        miscounted_tensors,
        aside_without_a_latent_slot,
    ],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_noticed(damage: Callable[[Simulation], None]) -> None:
    asked = [drawing("a", P, 9, guidance=1.0), *(drawing(name, given=embeds(1, 2), steps=9) for name in "bc")]
    simulation = simulated(*asked)
    while len(simulation.scheduler.images.denoising) < 3:
        simulation.step()
    simulation.scheduler.images.denoising.sort(key=lambda cursor: cursor.id)
    check_integrity(simulation.scheduler)
    damage(simulation)
    with pytest.raises(IntegrityError):
        check_integrity(simulation.scheduler)
