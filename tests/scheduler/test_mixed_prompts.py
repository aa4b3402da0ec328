"""Prompts with rows of prompt embeds among their tokens: what they share, what they hold, and what is refused."""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace

from tests.scheduler.simulation import (
    Simulation,
    drawing,
    embeds,
    expected_output,
    image_limits,
    limits,
    request,
)
from weft.errors import InvalidRequest
from weft.payloads import MAX_BYTES, EmbedsSegment, PromptEmbeds
from weft.plan import Limits
from weft.scheduler.scheduler import Scheduler
from weft.types import MixedPrompt, Pooling, Request

ROWS, OTHERS = embeds(*range(16)), embeds(*range(100, 116))
"""Eight rows each: two blocks."""
ROW_BYTES = 4


def taking(**changes: object) -> Limits:
    return limits(**{"embeds_width": 2, "max_embedding_bytes": 1000, **changes})


def mixed(*parts: list[int] | PromptEmbeds) -> MixedPrompt:
    return MixedPrompt.of(parts)


def served(simulation: Simulation, *asked: Request) -> list[int | None]:
    """Serve requests one after the other, check their answers, and tell how many tokens of each were cached."""
    cached = []
    for one in asked:
        before = len(simulation.events)
        simulation.add(one)
        simulation.run()
        assert simulation.outputs[one.request_id] == expected_output(one, 64)
        cached.append(simulation.events[before].cached_tokens)
    assert simulation.scheduler.stats().embedding_bytes == 0
    return cached


# What is shared.


def test_equal_rows_hit_and_different_rows_never_do() -> None:
    simulation = Simulation(taking())
    same, other = mixed([1, 2, 3, 4], ROWS, [5, 6]), mixed([1, 2, 3, 4], OTHERS, [5, 6])
    asked = [request("first", same), request("again", same), request("other", other), request("ids", same.token_ids)]
    assert served(simulation, *asked) == [0, 12, 4, 4], "the tokens before the rows are anybody's"


def test_one_row_that_differs_ends_what_is_shared() -> None:
    last = embeds(*range(15), 99)
    asked = [request("first", mixed(ROWS, [1, 2])), request("other", mixed(last, [1, 2]))]
    assert served(Simulation(taking()), *asked) == [0, 4]


def test_the_place_of_a_row_counts() -> None:
    """A placeholder and a token of its id are told apart."""
    row = embeds(1, 2)
    asked = [request("first", mixed(row, [0, 0, 0, 5])), request("other", mixed([0], row, [0, 0, 5]))]
    assert served(Simulation(taking()), *asked) == [0, 0]


def test_rows_in_two_tensors_or_in_another_salt_are_not_mistaken() -> None:
    one, two = embeds(*range(8)), embeds(*range(8, 16))
    asked = [
        request("whole", mixed(ROWS, [1])),
        request("halves", mixed(one, two, [1])),
        request("salted", mixed(ROWS, [1]), salt="a"),
    ]
    assert served(Simulation(taking()), *asked) == [0, 8, 0]


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("delay", [0, 1])
def test_siblings_share_their_rows(chunk: int, delay: int) -> None:
    simulation = Simulation(taking(max_prefill_chunk=chunk), delay)
    prompt = mixed([1, 2], ROWS, [3])
    family = [request("a", prompt), *(request(f"b{i}", prompt, sibling_of="a") for i in range(2))]
    simulation.add(*family)
    simulation.run()
    for one in family:
        assert simulation.outputs[one.request_id] == expected_output(one, 64)
    assert simulation.rows_of("b0")[0].start == 8, "the full blocks of the prompt"


def test_other_rows_are_no_sibling() -> None:
    scheduler = Scheduler(taking())
    scheduler.add(request("a", mixed([1, 2], ROWS)))
    with pytest.raises(InvalidRequest, match="no sibling"):
        scheduler.add(request("b", mixed([1, 2], OTHERS), sibling_of="a"))


# What is held.


def test_who_finds_no_bytes_waits_and_is_passed_by_others() -> None:
    simulation = Simulation(taking(max_embedding_bytes=2 * 8 * ROW_BYTES))
    asked = [request(f"r{i}", mixed(ROWS, [i]), 4) for i in range(3)]
    plain = request("plain", [1, 2, 3], 4)
    simulation.add(*asked, plain)
    simulation.step()
    now = simulation.scheduler.stats()
    assert (now.running, now.waiting, now.embedding_bytes) == (3, 1, 64)
    simulation.run()
    assert simulation.admissions() == ["r0", "r1", "plain", "r2"]
    for one in [*asked, plain]:
        assert simulation.outputs[one.request_id] == expected_output(one, 64)
    assert simulation.scheduler.stats().embedding_bytes == 0


def test_a_preempted_request_keeps_its_bytes_and_an_abort_gives_them_back() -> None:
    simulation = Simulation(taking(force_preempt_every=2, max_preemptions=1, max_embedding_bytes=ROWS.data.nbytes))
    simulation.add(asked := request("r", mixed([1], ROWS, [2]), 6), waiting := request("w", mixed(OTHERS), 6))
    for _ in range(3):
        simulation.step()
        assert simulation.scheduler.stats().embedding_bytes == ROWS.data.nbytes
    simulation.run()
    assert simulation.scheduler.stats().preemptions > 0
    for one in (asked, waiting):
        assert simulation.outputs[one.request_id] == expected_output(one, 64)
    for name in ("running", "queued"):
        simulation.add(request(name, mixed(ROWS)))
    simulation.step()
    for name in ("queued", "running"):
        assert simulation.abort(name)
    assert simulation.scheduler.stats().embedding_bytes == 0


def test_images_and_prompts_share_the_bytes_for_tensors() -> None:
    simulation = Simulation(taking(image=image_limits()))
    image = drawing("i", given=embeds(*range(12)), steps=3)
    prompts = [request(f"r{i}", mixed(ROWS, OTHERS), 2) for i in range(2)]
    simulation.add(prompts[0], image, prompts[1])
    simulation.run()
    assert simulation.admissions() == ["r0", "r1"]
    assert simulation.progress["i"] == [1, 2, 3]
    for one in prompts:
        assert simulation.outputs[one.request_id] == expected_output(one, 64)


def test_payloads_that_exceed_the_budget_together_wait_for_each_other() -> None:
    """Four payloads of 30 MB in a budget of 100 MB."""
    width, rows = 150_000, 50
    simulation = Simulation(taking(embeds_width=width, max_embedding_bytes=100_000_000, num_blocks=80))
    for i in range(4):
        data = memoryview(struct.pack("<f", i) * (width * rows))
        large = PromptEmbeds(data=data, shape=(rows, width), dtype="float32")
        simulation.add(request(f"r{i}", mixed([1], large, [2]), 3))
    most = 0
    while simulation.step():
        most = max(most, simulation.scheduler.stats().embedding_bytes)
    assert most == 90_000_000 and simulation.scheduler.stats().embedding_bytes == 0
    assert simulation.admissions() == ["r0", "r1", "r2", "r3"]
    assert [len(tokens) for tokens in simulation.outputs.values()] == [3] * 4


# What is refused.


def moved(start: int) -> list[EmbedsSegment]:
    return [replace(segment, start=start) for segment in mixed(ROWS).embeds]


GOOD = request("r", mixed(ROWS, [1]))
NOT_TAKEN = {
    "no engine for it": (taking(embeds_width=0), GOOD),
    "another width": (taking(embeds_width=3), GOOD),
    "more bytes than there are": (taking(max_embedding_bytes=31), GOOD),
    "a vector": (taking(), replace(GOOD, pooling=Pooling.MEAN)),
    "log probabilities of rows": (taking(), request("r", mixed(ROWS), prompt_logprobs=1)),
    "behind the prompt": (taking(), replace(GOOD, embeds=moved(2))),
    "before the prompt": (taking(), replace(GOOD, embeds=moved(-1))),
    "two in one place": (taking(), replace(GOOD, embeds=moved(0) * 2)),
    "no digests": (taking(), replace(GOOD, embeds=[replace(GOOD.embeds[0], digests=b"")])),
    "not a number": (taking(), request("r", mixed(embeds(1, float("nan"))))),
    "an image": (taking(image=image_limits()), replace(drawing("i"), embeds=moved(0))),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_the_engine_cannot_take_is_refused_when_it_is_added(name: str) -> None:
    bounds, asked = NOT_TAKEN[name]
    scheduler = Scheduler(bounds)
    with pytest.raises(InvalidRequest) as refused:
        scheduler.add(asked)
    assert refused.value.param is not None
    assert refused.value.param.startswith(("prompt_embeds", "prompt_logprobs"))
    assert not scheduler.has_work


def test_the_tensors_of_a_prompt_are_bounded_together() -> None:
    half = PromptEmbeds(data=memoryview(bytes(MAX_BYTES // 2 + 4)), shape=(MAX_BYTES // 8 + 1, 2), dtype="float16")
    segments = [EmbedsSegment(0, half, b""), EmbedsSegment(1, half, b"")]
    with pytest.raises(InvalidRequest, match="together; at most 100000000"):
        Scheduler(taking()).add(replace(GOOD, embeds=segments))
