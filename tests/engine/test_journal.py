"""What the journal counts is what a look at every open request would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from weft.engine.journal import MAX_OUTSIDE_DEATHS, Entry, Journal, Place, Queued, queued_tokens
from weft.types import Event, FinishReason, Request, SamplingParams

NAMES = st.sampled_from([*"abcdef"])
ACTIONS = st.one_of(
    st.tuples(st.just("open"), NAMES),
    st.tuples(st.just("close"), NAMES),
    st.tuples(st.just("start"), NAMES),
    st.tuples(st.just("token"), NAMES),
    st.tuples(st.just("end"), NAMES),
    st.tuples(st.sampled_from(["send", "die"]), st.just("")),
)


def request(name: str) -> Request:
    number = ord(name) - ord("a")
    return Request(
        request_id=name,
        prompt_token_ids=[1] * (number + 1),
        params=SamplingParams(max_tokens=10, seed=0),
        tenant="one" if number % 2 else "other",
        sibling_of="a" if name == "f" else "",
    )


def act(journal: Journal, action: str, name: str) -> None:
    match action:
        case "open" if name not in journal:
            journal.open(request(name))
        case "close":
            journal.close(name)
        case "start":
            journal.started([name])
        case "token":
            journal.record_tokens({name: 7})
        case "end":
            journal.record(Event(request_id=name, finish=FinishReason.STOP))
        case "send":
            journal.send()
        case "die":
            journal.engine_died()


def total(entries: list[Entry]) -> Queued:
    return Queued(len(entries), sum(queued_tokens(entry.request) for entry in entries))


@settings(max_examples=150 * EFFORT)
@given(actions=st.lists(ACTIONS, max_size=60))
def test_the_counts_are_those_of_the_entries(actions: list[tuple[str, str]]) -> None:
    journal = Journal()
    for action, name in actions:
        act(journal, action, name)
        entries = list(journal._entries.values())
        assert list(journal.held.values()) == [entry for entry in entries if entry.place is Place.HELD]
        waiting = [entry for entry in entries if entry.place in (Place.HELD, Place.QUEUED)]
        tenants = {entry.request.tenant for entry in waiting}
        assert journal.waiting.total == total(waiting)
        assert journal.waiting.by_tenant == {
            tenant: total([entry for entry in waiting if entry.request.tenant == tenant]) for tenant in tenants
        }
        on_trial = [entry for entry in entries if entry.deaths and entry.place in (Place.QUEUED, Place.STARTED)]
        assert journal.num_on_trial == len(on_trial) <= 1


def test_after_a_death_suspects_are_sent_one_at_a_time_and_before_the_others() -> None:
    journal = Journal()
    a, b, c = (journal.open(request(name)) for name in "abc")
    assert journal.send() == [a, b, c]
    journal.started(["a", "b"])
    assert journal.engine_died() == []
    assert journal.send() == [a] and journal.send() == []
    journal.record_tokens({"a": 7})
    assert journal.send() == [b]
    journal.started(["b"])
    assert journal.engine_died() == [b], "the second engine has died with it"


def test_an_engine_that_others_ended_is_no_evidence_but_four_in_a_row_are() -> None:
    journal = Journal()
    a = journal.open(request("a"))
    journal.send()
    for _ in range(MAX_OUTSIDE_DEATHS + 1):
        assert journal.engine_died(from_outside=True) == []
        assert journal.send() == [a]
    journal.record_tokens({"a": 7})
    for _ in range(MAX_OUTSIDE_DEATHS + 1):
        assert journal.engine_died(from_outside=True) == [], "a token has proven it"
        assert journal.send() == [a]
    assert journal.engine_died(from_outside=True) == [a]


def test_a_fault_of_the_engine_s_own_is_evidence_at_once() -> None:
    journal = Journal()
    a = journal.open(request("a"))
    for _ in range(2):
        journal.send()
        assert journal.engine_died(from_outside=True) == []
    journal.send()
    assert journal.engine_died() == [a]


def test_a_request_that_was_in_no_step_is_a_suspect_like_any_other() -> None:
    journal = Journal()
    a, b = (journal.open(request(name)) for name in "ab")
    journal.send()
    journal.record_tokens({"a": 7})
    c = journal.open(request("c"))
    assert journal.engine_died() == []
    assert journal.send() == [a]
    journal.record_tokens({"a": 7})
    assert journal.send() == [b]
    assert journal.engine_died() == [b], "the second engine has died with it, and it was in no step"
    journal.close("b")
    journal.send()
    journal.record_tokens({"a": 7})
    assert journal.send() == [c] and not c.deaths, "it was with no engine"
