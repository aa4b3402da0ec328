"""The store of answers is bounded by entries, by bytes and by time, and what was not used for longest goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.api.clock import Clock
from weft.api.openai.response_store import ResponseStore, StoredResponse


def kept(text: str) -> StoredResponse:
    return StoredResponse(text.encode(), [], [])


SIZE = 100
TEXT = "x" * (SIZE - len("[[],[]]"))


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 10_000)
    for name in ("a", "b"):
        store.put("", name, kept(name))
    assert store.get("", "a") is not None
    store.put("", "c", kept("c"))
    assert store.get("", "b") is None
    assert [found.answer for name in "ac" if (found := store.get("", name))] == [b"a", b"c"]


def test_bytes_are_bounded_whatever_holds_them() -> None:
    store = ResponseStore(100, 3 * SIZE)
    for name in "abcd":
        store.put("", name, kept(TEXT))
    assert (len(store), store.num_bytes) == (3, 3 * SIZE)
    store.put("", "e", StoredResponse(b"", [{"text": TEXT}], [{"content": TEXT}]))
    assert store.get("", "e") is not None
    assert len(store) < 3, "input and conversation count as well"


def test_what_is_larger_than_all_the_room_drives_nobody_out() -> None:
    store = ResponseStore(100, SIZE)
    store.put("", "a", kept(TEXT))
    store.put("", "b", kept(TEXT + "x"))
    assert store.get("", "a") is not None
    assert store.get("", "b") is None


def test_time_is_bounded() -> None:
    clock = Clock()
    store = ResponseStore(10, 10_000, ttl_s=60, clock=clock)
    store.put("", "a", kept("a"))
    clock.now += 59
    assert store.get("", "a") is not None, "use does not make it last longer"
    clock.now += 1
    assert store.get("", "a") is None
    assert not store.delete("", "a")
    store.put("", "b", kept("b"))
    assert len(store) == 1, "what is over is not counted"


def test_what_is_on_disk_is_dropped_there_when_it_is_dropped_here() -> None:
    clock, dropped = Clock(), list[str]()
    store = ResponseStore(2, 10_000, ttl_s=60, clock=clock, on_drop=dropped.append)
    on_disk = StoredResponse(b"", [], [], is_on_disk=True)
    store.put("", "old", on_disk, age_s=60)
    assert dropped == ["old"] and not len(store)
    store.put("", "a", on_disk, age_s=50)
    store.put("", "a", on_disk, age_s=50)
    assert dropped == ["old"], "it was replaced"
    store.put("", "memory", kept("b"))
    clock.now += 10
    store.put("", "c", on_disk)
    assert dropped == ["old", "a"] and len(store) == 2
    for name in ("d", "e"):
        store.put("", name, on_disk)
    assert dropped == ["old", "a", "c"] and store.delete("", "d") and dropped[-1] == "d"


def test_owners_are_apart() -> None:
    store = ResponseStore(10, 10_000)
    store.put("mine", "a", kept("a"))
    assert store.get("yours", "a") is None
    assert not store.delete("yours", "a")
    assert store.delete("mine", "a")
    assert store.get("mine", "a") is None
    assert store.num_bytes == 0


def test_a_tenant_that_keeps_much_drives_out_its_own() -> None:
    store = ResponseStore(10, 100 * SIZE)
    for name in "ab":
        store.put("quiet", name, kept(TEXT))
    for number in range(100):
        store.put("loud", str(number), kept(TEXT))
    assert len(store) == 10
    assert store.get("quiet", "a") is not None and store.get("quiet", "b") is not None
    assert [number for number in range(100) if store.get("loud", str(number))] == list(range(92, 100))
    for number in range(100):
        store.put("new", str(number), kept(TEXT))
    assert [sum(store.get(owner, str(i)) is not None for i in range(100)) for owner in ("loud", "new")] == [4, 4]


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.sampled_from("abcdefgh"), st.integers(0, 300))))
def test_the_bounds_hold_whatever_is_done(steps: list[tuple[str, str, int]]) -> None:
    clock = Clock()
    store = ResponseStore(3, 500, ttl_s=50, clock=clock)
    for number, (what, name, size) in enumerate(steps):
        clock.now += 5
        if what == "p":
            # Ids are never used twice.
            store.put(name, f"{name}{number}", kept("x" * size))
        elif what == "g":
            store.get(name, f"{name}{number - 1}")
        else:
            store.delete(name, f"{name}{number - 1}")
        assert len(store) <= 3
        assert 0 <= store.num_bytes <= 500
        assert (store.num_bytes == 0) == (len(store) == 0)
