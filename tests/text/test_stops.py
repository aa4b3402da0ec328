from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.growth import check_linear
from weft.errors import InvalidRequest
from weft.text.detokenizer import StopMatch, StopStrings


def oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Find the first stop string to be complete, character by character; of several, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def streamed(chunks: list[str], stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include)
    shown = ""
    for chunk in chunks:
        match = watcher.push(chunk)
        shown += match.text
        if match.matched is not None:
            return shown, match.matched
    return shown + watcher.flush(), None


@settings(max_examples=150)
@given(
    text=st.text(alphabet="ab。", max_size=9),
    stops=st.lists(st.text(alphabet="ab。", min_size=1, max_size=4), max_size=4).map(tuple),
    include=st.booleans(),
)
def test_every_way_to_cut_the_text_gives_the_oracles_answer(text: str, stops: tuple[str, ...], include: bool) -> None:
    expected = oracle(text, stops, include)
    for size in range(max(len(text), 1)):
        for cuts in itertools.combinations(range(1, len(text)), size):
            bounds = [0, *cuts, len(text)]
            chunks = [text[a:b] for a, b in itertools.pairwise(bounds)]
            assert streamed(chunks, stops, include) == expected


@settings(max_examples=150)
@given(
    text=st.text(alphabet="ab", max_size=30),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1),
)
def test_no_part_of_a_stop_string_is_shown_and_nothing_else_is_held(text: str, stops: list[str]) -> None:
    watcher = StopStrings(tuple(stops), include=False)
    expected, _ = oracle(text, tuple(stops), include=False)
    shown = ""
    for at, char in enumerate(text, start=1):
        match = watcher.push(char)
        shown += match.text
        assert expected.startswith(shown)
        if match.matched is not None:
            break
        begun = [size for stop in stops for size in range(len(stop)) if text[:at].endswith(stop[:size])]
        assert len(shown) == at - max(begun)


def test_a_stop_string_across_pushes_is_cut_and_named() -> None:
    watcher = StopStrings(("\nUser:",), include=False)
    assert watcher.push("Hello\nUs") == StopMatch("Hello")
    assert watcher.push("er: and more") == StopMatch("", "\nUser:")


def test_a_stop_string_is_kept_when_asked() -> None:
    assert StopStrings(("END",), include=True).push("the END of it") == StopMatch("the END", "END")


def test_held_text_is_shown_when_it_cannot_be_a_stop_string_any_more() -> None:
    watcher = StopStrings(("###",), include=False)
    assert watcher.push("a##") == StopMatch("a")
    assert watcher.push("b") == StopMatch("##b")
    assert watcher.push("#") == StopMatch("")
    assert watcher.flush() == "#"


def test_of_stop_strings_complete_at_the_same_character_the_longest_wins() -> None:
    assert StopStrings(("d", "cd"), include=False).push("abcd") == StopMatch("ab", "cd")


def test_nothing_is_shown_after_a_match() -> None:
    watcher = StopStrings(("x",), include=False)
    watcher.push("ax")
    assert watcher.push("more") == StopMatch("", "x")
    assert watcher.flush() == ""


def test_without_stop_strings_text_passes_through() -> None:
    watcher = StopStrings((), include=False)
    assert watcher.push("anything") == StopMatch("anything")
    assert watcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        StopStrings(("",), include=False)


def test_a_stop_string_that_almost_matches_everywhere_costs_linear_time() -> None:
    def search(text: str) -> None:
        StopStrings((text[len(text) // 2 :] + "b",), include=False).push(text)

    check_linear("a".__mul__, search, 2_000)


def test_time_is_linear_in_the_pushes() -> None:
    def push(text: str) -> None:
        watcher = StopStrings(("a" * 255 + "b",), include=False)
        for char in text:
            watcher.push(char)

    check_linear("a".__mul__, push, 10_000)
