from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.growth import check_linear
from weft.text.detokenizer import Detokenizer
from weft.text.tokenizer import Tokenizer

ids_of_both = st.lists(st.integers(min_value=0, max_value=320), max_size=24)
cuts = st.lists(st.integers(min_value=0, max_value=24), max_size=6)


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    pushed = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(pushed) + detokenizer.flush()


@settings(max_examples=150)
@given(ids=ids_of_both, cuts=cuts, prompt=ids_of_both, skip=st.booleans())
def test_the_text_does_not_depend_on_how_tokens_are_grouped(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        whole = streamed(tokenizer, ids, [], prompt, skip)
        assert streamed(tokenizer, ids, cuts, prompt, skip) == whole
        assert streamed(tokenizer, ids, range(len(ids)), prompt, skip) == whole
        detokenizer = Detokenizer(tokenizer, prompt, skip)
        assert "".join(map(detokenizer.push_one, ids)) + detokenizer.flush() == whole


@settings(max_examples=150)
@given(ids=ids_of_both, prompt=ids_of_both, skip=st.booleans())
def test_a_token_alone_shows_what_it_shows_in_a_group(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], prompt: list[int], skip: bool
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        alone, grouped = Detokenizer(tokenizer, prompt, skip), Detokenizer(tokenizer, prompt, skip)
        assert [alone.push_one(token) for token in ids] == [grouped.push([token]) for token in ids]


@settings(max_examples=150)
@given(ids=ids_of_both, skip=st.booleans())
def test_random_tokens_give_what_decode_gives(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], skip: bool
) -> None:
    every = range(len(ids))
    assert streamed(byte_level, ids, every, skip=skip) == byte_level.decode(ids, skip_special_tokens=skip)
    # Where a run of lone bytes is not UTF-8, the library gives up the whole run, and a stream only the bad bytes.
    whole = sentencepiece.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in whole:
        assert streamed(sentencepiece, ids, every, skip=skip) == whole


@settings(max_examples=150)
@given(
    prompt=st.text(alphabet="the wand .你好🎉é", max_size=12), output=st.text(alphabet="the wand\n你界🎉é", max_size=12)
)
def test_the_output_continues_the_prompt(
    byte_level: Tokenizer, sentencepiece: Tokenizer, prompt: str, output: str
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        prompt_ids = tokenizer.encode(prompt)
        ids = tokenizer.encode(prompt + output)[len(prompt_ids) :]
        before = tokenizer.decode(prompt_ids)
        if "\ufffd" in before:
            continue
        assert before + streamed(tokenizer, ids, range(len(ids)), prompt_ids) == tokenizer.decode(prompt_ids + ids)


@settings(max_examples=100)
@given(text=st.text(max_size=20), cuts=cuts)
def test_any_text_comes_back_from_its_tokens(
    byte_level: Tokenizer, sentencepiece: Tokenizer, text: str, cuts: list[int]
) -> None:
    assert streamed(byte_level, byte_level.encode(text), cuts, skip=False) == text
    ids = sentencepiece.encode(text.replace("▁", ""))
    assert streamed(sentencepiece, ids, cuts, [1]) == sentencepiece.decode(ids)


def test_a_character_is_held_until_it_is_whole(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("龍")[:-1]]
    last = byte_level.encode("龍")[-1]
    assert ids, "the tiny vocabulary must need several tokens for this character"
    detokenizer = Detokenizer(byte_level, [])
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * len(ids)
    assert detokenizer.push([last]) == "龍"
    assert detokenizer.flush() == ""


def test_a_character_that_never_ends_is_replaced_at_the_flush_only(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, [])
    assert detokenizer.push(byte_level.encode("龍")[:1]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_character_that_the_prompt_began_is_shown_whole(byte_level: Tokenizer) -> None:
    *prompt, last = byte_level.encode("the 龍")
    assert streamed(byte_level, [last], [], prompt) == "龍"


def test_the_space_that_encoding_puts_before_a_text_is_not_shown(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.encode("the", add_special_tokens=False)
    assert sentencepiece.token_text(the[0]) == " the"
    assert streamed(sentencepiece, the, [], prompt=[1]) == "the"
    detokenizer = Detokenizer(sentencepiece, [1])
    assert [detokenizer.push_one(the[0]), detokenizer.push_one(the[0])] == ["the", " the"]
    assert streamed(sentencepiece, the, [], prompt=[1, *the]) == " the"


def test_special_tokens_are_shown_only_when_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the<|end|>")
    assert streamed(byte_level, ids, []) == "the"
    assert streamed(byte_level, ids, [], skip=False) == "the<|end|>"


def test_time_is_linear_in_the_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("龍界 the fox ")

    def push(times: range) -> None:
        detokenizer = Detokenizer(byte_level, [])
        for _ in times:
            detokenizer.push(ids)

    check_linear(range, push, 1_000)
