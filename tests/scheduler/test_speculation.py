"""Drafts: where they come from, when they are made, and that they change nothing but the number of steps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.scheduler.simulation import Oracle, Simulation, embeds, expected_output, limits, request
from weft.errors import InvalidRequest
from weft.plan import DraftPrefill, Sampled, accepted
from weft.scheduler import speculation
from weft.scheduler.cursors import TokenCursor
from weft.scheduler.integrity import check_integrity
from weft.scheduler.speculation import (
    FIRST_DRAFT,
    FIRST_PAUSE,
    LONGEST_MATCH,
    MAX_CANDIDATES,
    MAX_DRAFT,
    MAX_PAUSE,
    ModelDrafter,
    NgramDrafter,
    NgramIndex,
)
from weft.types import FinishReason, MixedPrompt, Request

PROMPT = list(range(10, 20))


class Truthful(Oracle):
    """A drafter that is always right, and drafts as much as it may."""

    def draft(self, pending: int, most: int) -> list[int]:
        first = len(self.tokens) + pending
        return self.whole[first : first + max(0, min(most, MAX_DRAFT))]


class Wrong(Truthful):
    """A drafter whose drafts are right but for the token at one place."""

    place = 0

    def draft(self, pending: int, most: int) -> list[int]:
        draft = super().draft(pending, most)
        return [token + (i == self.place) for i, token in enumerate(draft)]


def simulated(
    asked: list, drafter: type[Oracle], *, delay: int = 0, **changes: object
) -> tuple[Simulation, list[Oracle]]:
    """A simulation in which every request has a drafter of that kind."""
    simulation = Simulation(limits(max_speculative_tokens=32, **changes), delay)
    simulation.add(*asked)
    drafters = []
    for one in asked:
        cursor = simulation.scheduler.cursors[one.request_id]
        assert isinstance(cursor, TokenCursor)
        whole = one.prompt_token_ids + expected_output(one, simulation.scheduler.limits.max_model_len)
        cursor.drafter = drafter(cursor.tokens, whole, random.Random(0))
        drafters.append(cursor.drafter)
    return simulation, drafters


# The index.


def longest_match(tokens: list[int]) -> int:
    """The same as `NgramIndex.find`, by looking everywhere."""
    for length in range(LONGEST_MATCH, 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[len(tokens) - length :]:
                return end
    return 0


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=20))
def test_the_index_finds_the_latest_of_the_longest_matches(prompt: list[int], answer: list[int]) -> None:
    tokens = list(prompt)
    index = NgramIndex(tokens)
    for token in [*answer, None]:
        index.extend()
        (found, length), expected = index.find(tokens), longest_match(tokens)
        assert tokens[found - length : found] == tokens[len(tokens) - length :] or not found
        # With so few different tokens there may be more places than are compared: what is found is a match still.
        assert (found > 0) == (expected > 0)
        assert found == expected or (found > expected and tokens[found - 2 : found] == tokens[-2:])
        if token is not None:
            tokens.append(token)


def test_a_long_prompt_is_indexed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_INDEXED", 10)
    tokens = [*range(100), 50, 51]
    index = NgramIndex(tokens)
    for step in range(11):
        assert (index.find(tokens)[0] > 0) == (step >= 6), step
        index.extend()
    assert index.find(tokens) == (52, 2)


def test_a_prompt_of_one_kind_of_token_costs_no_more_than_another() -> None:
    """A long prompt of tokens that are all alike has as many places to compare: only the latest are."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, at: Any) -> Any:
            self.reads += 1
            return super().__getitem__(at)

    def reads(tokens: list[int]) -> int:
        counted = Counted(tokens)
        index = NgramIndex(counted)
        for _ in range(10):
            index.extend()
        counted.reads = 0
        assert index.find(counted)[0]
        return counted.reads

    long, short = [7, 8] * 4000, [7, 8] * 400
    assert reads(long) == reads(short) < 10
    many = [token for i in range(2000) for token in (i, 7, 8)]
    assert reads(many) < 3 * MAX_CANDIDATES * LONGEST_MATCH


# The drafter.


def test_a_predicted_text_is_looked_up_from_its_beginning() -> None:
    """It stands behind the end of the prompt, as the answer does."""
    tokens = [1, 2, 3, 4, 5]
    drafter = NgramDrafter(tokens, [2, 3, 4, 5, 20, 21, 22, 23, 24])
    assert drafter.draft(0, 8) == [20, 21]
    assert drafter.draft(1, 8) == [21, 22]
    tokens += [20, 21, 9, 9, 22]
    assert drafter.draft(0, 8) == []
    tokens.append(23)
    assert drafter.draft(0, 8) == [24], "it has no more"
    assert drafter.draft(1, 8) == []


def test_the_longer_match_wins_and_of_equal_ones_the_predicted() -> None:
    tokens = [5, 1, 2, 3, 30, 31, 9, 1, 2, 3]
    assert NgramDrafter(tokens, [7, 2, 3, 40, 41]).draft(0, 8) == [30, 31]
    assert NgramDrafter(tokens, [1, 2, 3, 40, 41]).draft(0, 8) == [40, 41]
    assert NgramDrafter(tokens, [9, 1, 2, 3]).draft(0, 8) == [30, 31]


def test_a_prediction_is_longer_than_the_sequence() -> None:
    assert NgramDrafter([3, 4], [1, 2, 3, 4, 5, 6]).draft(0, 8) == [5, 6]


def test_a_draft_is_what_followed_before() -> None:
    drafter = NgramDrafter([1, 2, 3, 4, 5, 6, 9, 2, 3])
    assert drafter.draft(0, 8) == [4, 5]
    assert drafter.draft(0, 1) == [4]
    assert drafter.draft(0, 0) == drafter.draft(0, -3) == []


def test_tokens_that_are_being_sampled_are_taken_to_repeat_as_well() -> None:
    assert NgramDrafter([1, 2, 3, 4, 5, 6, 9, 2, 3]).draft(1, 8) == [5, 6]


def test_a_draft_goes_on_beyond_the_tokens_that_are_known() -> None:
    drafter = NgramDrafter([1, 2, 3, 1, 2, 3])
    drafter.learn(4, 4)
    assert drafter.draft(0, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert drafter.draft(2, 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_nothing_is_drafted_without_a_match() -> None:
    assert NgramDrafter([]).draft(0, 8) == NgramDrafter([1]).draft(0, 8) == NgramDrafter([1, 2, 3, 4]).draft(0, 8) == []


def test_drafts_grow_while_they_are_right() -> None:
    drafter = NgramDrafter([1, 2] * 10)
    lengths = []
    for _ in range(4):
        lengths.append(len(drafter.draft(0, 100)))
        drafter.learn(lengths[-1], lengths[-1])
    assert lengths == [FIRST_DRAFT, 4, MAX_DRAFT, MAX_DRAFT]
    drafter.learn(8, 5)
    assert len(drafter.draft(0, 100)) == 5


def test_a_request_whose_drafts_are_wrong_is_left_alone_for_longer_and_longer() -> None:
    tokens = [1, 2] * 10
    drafter = NgramDrafter(tokens)
    pauses = []
    for _ in range(9):
        drafter.learn(2, 0)
        before = len(tokens)
        while not drafter.draft(0, 8):
            tokens.append(1 + len(tokens) % 2)
        pauses.append(len(tokens) - before)
    assert pauses == [FIRST_PAUSE << i for i in range(7)] + [MAX_PAUSE] * 2
    drafter.learn(2, 1)
    assert drafter.draft(0, 8), "a draft that pays ends the pauses"
    drafter.learn(2, 0)
    assert not drafter.draft(0, 8)
    tokens += [1, 2] * (FIRST_PAUSE // 2)
    assert drafter.draft(0, 8)


@pytest.mark.parametrize(
    ("sampled", "count"),
    [([5, 6, 7, 8], 4), ([5, 6, 7, 0], 4), ([5, 6, 0, 8], 3), ([0, 6, 7, 8], 1), ([5, 6, -1, 8], 2)],
)
def test_a_token_holds_if_all_before_it_were_right(sampled: list[int], count: int) -> None:
    tokens = [Sampled(token, error="not a number" if token < 0 else "") for token in sampled]
    assert accepted([5, 6, 7], tokens) == tokens[:count]


# The scheduler.


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_right_drafts_take_fewer_steps(delay: int) -> None:
    asked = request("r", PROMPT, 30)
    simulation, _ = simulated([asked], Truthful, delay=delay)
    simulation.run()
    assert simulation.outputs["r"] == expected_output(asked, 64)
    # The first token comes with the prompt; then there are four drafts of up to eight, and a token behind each.
    assert [row.count for row in simulation.rows_of("r")] == [10, 9, 9, 9, 2]
    stats = simulation.scheduler.stats()
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens, stats.generation_tokens) == (4, 25, 25, 30)
    assert stats.computed_tokens == simulation.worker.computed == 39


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.parametrize("delay", [0, 1])
def test_what_was_computed_behind_a_wrong_token_is_computed_again(
    place: int, delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrong, "place", place)
    asked = request("r", PROMPT, 30)
    simulation, [drafter] = simulated([asked], Wrong, delay=delay)
    simulation.run()
    assert simulation.outputs["r"] == expected_output(asked, 64)
    assert drafter.accepted[0] == place
    starts = [row.start for row in simulation.rows_of("r")]
    assert starts[:3] == [0, 10, 10 + place + 1]


def test_a_request_with_a_draft_under_way_waits_while_others_go_on() -> None:
    asked = [request("drafted", PROMPT, 20), request("plain", [1, 2, 3], 20)]
    simulation, [_, drafter] = simulated(asked, Truthful, delay=1)
    drafter.whole = []
    simulation.run()
    assert all(simulation.outputs[one.request_id] == expected_output(one, 64) for one in asked)
    drafted = next(i for i, plan in enumerate(simulation.plans) if plan.rows[0].draft)
    both, following = simulation.plans[drafted : drafted + 2]
    assert (len(both.rows), both.rows[1].draft) == (2, [])
    assert [row.row for row in following.rows] == [both.rows[1].row]


def test_an_answer_ends_at_a_stop_token_inside_a_draft() -> None:
    for length in range(1, 50):
        asked = request("r", list(range(length)), 40, stop=True)
        expected = expected_output(asked, 128)
        simulation, _ = simulated([asked], Truthful, max_model_len=128)
        simulation.run()
        end = simulation.ends["r"]
        assert simulation.outputs["r"] == expected
        stopped = expected[-1] in asked.stop_token_ids
        assert end.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert end.stop_token_id == (expected[-1] if stopped else None)


@pytest.mark.parametrize("place", [0, 3])
def test_events_tell_what_was_drafted_and_what_of_it_was_right(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the token behind a wrong draft is the only one: the next event would be too late for a client that
    ends its request."""
    monkeypatch.setattr(Wrong, "place", place)
    simulation, _ = simulated([request("r", PROMPT, 30)], Wrong)
    simulation.run()
    drafted = [event for event in simulation.events if event.draft_tokens]
    assert [(event.draft_tokens, event.accepted_tokens) for event in drafted[:2]] == [(8, place), (8, place)]
    stats = simulation.scheduler.stats()
    assert stats.draft_tokens == sum(event.draft_tokens for event in drafted)
    assert stats.accepted_tokens == sum(event.accepted_tokens for event in drafted)


def test_right_tokens_behind_the_end_are_not_in_the_answer() -> None:
    asked = request("r", PROMPT, 30)
    whole = expected_output(asked, 64)
    asked = replace(asked, stop_token_ids=[whole[3]])
    end = whole.index(whole[3])
    simulation, _ = simulated([asked], Truthful)
    [cursor] = simulation.scheduler.cursors.values()
    cursor.drafter.whole = PROMPT + whole
    simulation.run()
    assert simulation.outputs["r"] == whole[: end + 1]
    drafted = [event for event in simulation.events if event.draft_tokens]
    assert [(event.draft_tokens, event.accepted_tokens) for event in drafted] == [(8, end)]


@pytest.mark.parametrize("done", [0, 1, 9])
def test_an_answer_that_was_predicted_takes_few_steps(done: int) -> None:
    """Also one that is resumed in its middle: it goes on where the prediction does."""
    asked = request("r", PROMPT, 30)
    whole = expected_output(asked, 64)
    params = replace(asked.params, prediction=tuple(whole))
    simulation = Simulation(limits(max_speculative_tokens=16))
    simulation.add(replace(asked, params=params, output_token_ids=whole[:done]))
    simulation.run()
    assert whole[:done] + simulation.outputs["r"] == whole
    stats = simulation.scheduler.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 15
    assert stats.steps < 10


def test_a_predicted_token_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prediction has the token id 50"):
        Simulation(limits()).add(request("r", PROMPT, 30, prediction=(1, 50)))


def test_no_draft_reaches_beyond_the_answer() -> None:
    for max_tokens in range(1, 14):
        asked = request("r", PROMPT, max_tokens)
        simulation, _ = simulated([asked], Truthful)
        simulation.run()
        assert len(simulation.outputs["r"]) == max_tokens
        assert simulation.worker.computed == len(PROMPT) + max_tokens - 1


def test_the_prefix_cache_remembers_no_rejected_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrong, "place", 2)
    asked = request("r", PROMPT, 30)
    simulation, _ = simulated([asked], Wrong, block_size=2)
    simulation.run()
    whole = PROMPT + expected_output(asked, 64)
    again = request("again", whole, 10)
    simulation.add(again)
    simulation.run()
    assert simulation.outputs["again"] == expected_output(again, 64)
    event = next(event for event in simulation.events if event.request_id == "again")
    assert event.cached_tokens == len(whole) - 2, "all that was computed is found, up to the last whole block"


def test_a_draft_takes_no_blocks_that_others_will_want() -> None:
    """With a block for each token, and as many as three short answers need: nobody is preempted for a draft."""
    asked = [request(f"r{i}", [i, 1, 2], 18) for i in range(3)]
    simulation, _ = simulated(asked, Truthful, block_size=1, num_blocks=65)
    simulation.run()
    assert simulation.scheduler.stats().preemptions == 0
    assert simulation.scheduler.stats().accepted_tokens > 0
    assert all(simulation.outputs[one.request_id] == expected_output(one, 64) for one in asked)


def test_decodes_without_a_draft_are_never_left_out() -> None:
    """The budget of a step has a token for each before any is drafted."""
    asked = [request(f"r{i}", [i, 1, 2], 20) for i in range(4)]
    simulation, _ = simulated(asked, Truthful, max_num_batched_tokens=9)
    simulation.run()
    decodes = [plan for plan in simulation.plans if len(plan.rows) > 1 and all(row.samples for row in plan.rows)]
    assert any(row.draft for plan in decodes for row in plan.rows)
    assert all(plan.num_tokens <= 9 for plan in simulation.plans)
    counts = [sum(1 for row in simulation.rows_of(one.request_id)) for one in asked]
    assert max(counts) < 20


def test_many_decodes_draft_nothing() -> None:
    simulation = Simulation(limits(max_speculative_tokens=3, speculates=True))
    asked = [request(f"r{i}", [1, 2] * 5, 10) for i in range(4)]
    simulation.add(*asked)
    simulation.run()
    crowded = [plan for plan in simulation.plans if len(plan.rows) > 2]
    assert crowded and not any(row.draft for plan in crowded for row in plan.rows)


def test_a_step_with_drafts_is_taken_back() -> None:
    """There was no memory for it: its requests are preempted, and go on as if it had not been."""
    asked = [request("a", PROMPT, 30), request("b", [1, 2, 3], 30)]
    simulation, _ = simulated(asked, Truthful)
    for _ in range(2):
        simulation.step()
    plan = simulation.scheduler.schedule()
    assert plan is not None and all(row.draft for row in plan.rows)
    assert simulation.scheduler.take_back(plan) == []
    check_integrity(simulation.scheduler)
    simulation.run()
    assert all(simulation.outputs[one.request_id] == expected_output(one, 64) for one in asked)
    assert simulation.scheduler.stats().preemptions == 2


def test_an_error_behind_a_right_draft_comes_after_the_tokens_before_it() -> None:
    asked = request("r", PROMPT, 20)
    whole = expected_output(asked, 64)
    simulation, _ = simulated([asked], Truthful)
    simulation.worker.broken = {whole[5]} - set(whole[:5])
    simulation.run()
    assert simulation.outputs["r"] == whole[:6]
    assert simulation.ends["r"].finish is FinishReason.ERROR


@pytest.mark.parametrize(
    ("speculates", "speculative", "prediction", "drafts"),
    [
        (False, None, (), False),
        (True, None, (), True),
        (True, False, (), False),
        (False, True, (), True),
        (False, None, (3, 4), True),
        (False, False, (3, 4), False),
    ],
)
def test_who_is_drafted_for(
    speculates: bool, speculative: bool | None, prediction: tuple[int, ...], drafts: bool
) -> None:
    simulation = Simulation(limits(max_speculative_tokens=16, speculates=speculates))
    simulation.add(request("r", [1, 2] * 5, 10, speculative=speculative, prediction=prediction))
    cursor = simulation.scheduler.cursors["r"]
    assert isinstance(cursor, TokenCursor) and (cursor.drafter is not None) == drafts


# The draft model, whose cache the simulated worker checks.


def modelled(*asked: Request, delay: int = 0, **changes: object) -> Simulation:
    simulation = Simulation(limits(max_speculative_tokens=32, speculates=True, has_draft_model=True, **changes), delay)
    simulation.add(*asked)
    simulation.run()
    for one in asked:
        assert simulation.outputs[one.request_id] == expected_output(one, simulation.scheduler.limits.max_model_len)
    return simulation


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_the_draft_model_reads_what_it_lacks_and_drafts(delay: int) -> None:
    """Behind a draft that was right to its end it lacks that token and the next; behind another the next alone."""
    counts = set()
    for last in range(20):
        simulation = modelled(request("r", [*PROMPT, last], 40), delay=delay)
        rows = simulation.rows_of("r")
        first = next(row for row in rows if row.draft_prefill is not None)
        assert first.draft_prefill == DraftPrefill(0, first.start + 1)
        for row, following in itertools.pairwise(rows):
            if row.draft and following.draft_prefill is not None:
                is_right = following.start == row.start + row.count
                counts.add(following.draft_prefill.count)
                assert following.draft_prefill.count == 1 + is_right
        stats = simulation.scheduler.stats()
        assert 0 < stats.accepted_tokens < stats.draft_tokens
        assert stats.steps < 35
    assert counts == {1, 2}


def test_a_draft_model_that_is_far_behind_catches_up_in_chunks() -> None:
    simulation = modelled(request("r", list(range(30)), 20), max_prefill_chunk=8)
    prefills = [row for row in simulation.rows_of("r") if row.draft_prefill is not None]
    behind = [row for row in prefills if not row.draft]
    assert [row.draft_prefill.count for row in behind] == [8] * 4
    assert all(row.count == 1 for row in behind), "the model goes on meanwhile"
    assert prefills[len(behind)].draft


def test_cached_blocks_are_not_drafted_again() -> None:
    first, second = request("first", list(range(30)), 10), request("second", list(range(30)), 10)
    simulation = modelled(first)
    before = simulation.worker.draft_prefilled
    simulation.add(second)
    simulation.run()
    assert simulation.outputs["second"] == simulation.outputs["first"]
    prefill = next(row.draft_prefill for row in simulation.rows_of("second") if row.draft_prefill is not None)
    assert prefill.start == 28, "the last whole block of the prompt"
    assert simulation.worker.draft_prefilled - before < 20


def test_blocks_that_the_draft_model_has_not_read_are_read_when_they_are_found() -> None:
    first = request("first", list(range(30)), 10, speculative=False)
    simulation = modelled(first)
    assert simulation.worker.draft_prefilled == 0
    simulation.add(request("second", list(range(30)), 10))
    simulation.run()
    assert simulation.outputs["second"] == simulation.outputs["first"]
    prefill = next(row.draft_prefill for row in simulation.rows_of("second") if row.draft_prefill is not None)
    assert prefill.start == 0


def test_a_reused_block_is_not_taken_for_drafted() -> None:
    """Blocks go from requests that the draft model has read to others: their cache is checked."""
    asked = [request(f"r{i}", [i, *range(20)], 20, speculative=None if i % 2 else False) for i in range(12)]
    simulation = modelled(*asked, num_blocks=17, block_size=4)
    simulation.add(*(replace(one, request_id=f"{one.request_id} again") for one in asked))
    simulation.run()
    for one in asked:
        assert simulation.outputs[f"{one.request_id} again"] == simulation.outputs[one.request_id]


@pytest.mark.parametrize("delay", [0, 1])
def test_preempted_requests_are_read_again(delay: int) -> None:
    asked = [request(f"r{i}", [i, *range(10)], 30) for i in range(5)]
    simulation = modelled(*asked, delay=delay, force_preempt_every=3, max_preemptions=9)
    assert simulation.scheduler.stats().preemptions > 5


def test_requests_with_a_text_of_their_own_or_rows_of_embeds_are_looked_up() -> None:
    simulation = Simulation(limits(speculates=True, has_draft_model=True, embeds_width=2, max_embedding_bytes=1000))
    rows = MixedPrompt.of([[1, 2], embeds(1, 2), [3]])
    simulation.add(request("plain", PROMPT), request("predicted", PROMPT, prediction=(1, 2)), request("rows", rows))
    kinds = {name: type(cursor.drafter) for name, cursor in simulation.scheduler.cursors.items()}
    assert kinds == {"plain": ModelDrafter, "predicted": NgramDrafter, "rows": NgramDrafter}
