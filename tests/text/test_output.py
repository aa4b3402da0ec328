"""The text of an answer is the same however its tokens arrive, and its stop strings are found."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.text.detokenizer import OutputText
from weft.text.tokenizer import Tokenizer
from weft.types import Arrival, Event, FinishReason, Output, Request, SamplingParams, TokenLogprob, Usage

token_ids = st.lists(st.integers(min_value=0, max_value=320), min_size=1, max_size=20)
grouping = st.lists(st.integers(min_value=1, max_value=4), min_size=20, max_size=20)


def request(stop: Sequence[str] = (), **params: object) -> Request:
    return Request(request_id="r", prompt_token_ids=[5], params=SamplingParams(stop=tuple(stop), **params))


def in_groups(arrivals: Sequence[Arrival], sizes: Sequence[int]) -> list[list[Arrival]]:
    rest = iter(arrivals)
    return [group for size in sizes if (group := list(itertools.islice(rest, size)))]


class Answer(NamedTuple):
    text: str
    token_ids: list[int]
    finish: FinishReason
    stop_reason: str | int | None
    usage: Usage


def answer(tokenizer: Tokenizer, groups: Sequence[Sequence[Arrival]], asked: Request) -> Answer:
    """Join all deltas; only the last one may have a finish reason."""
    output = OutputText(tokenizer, asked)
    deltas: list[Output] = []
    for group in groups:
        assert not output.ended
        if (delta := output.push(group)) is not None:
            deltas.append(delta)
        if output.ended:
            break
    *most, last = deltas
    assert last.finish is not None and all(delta.finish is None for delta in most)
    return Answer(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        last.finish,
        last.stop_reason,
        last.usage,
    )


@settings(max_examples=150)
@given(ids=token_ids, sizes=grouping, stop=st.lists(st.sampled_from(["e", "the", " t", "你"]), max_size=2))
def test_the_answer_does_not_depend_on_how_its_tokens_arrive(
    byte_level: Tokenizer, sentencepiece: Tokenizer, ids: list[int], sizes: list[int], stop: list[str]
) -> None:
    end = Event(request_id="r", token_ids=ids[-1:], finish=FinishReason.LENGTH)
    as_events: list[Arrival] = [*(Event(request_id="r", token_ids=[token]) for token in ids[:-1]), end]
    as_tokens: list[Arrival] = [*ids[:-1], end]
    for tokenizer in (byte_level, sentencepiece):
        whole = answer(tokenizer, [as_events], request(stop))
        assert answer(tokenizer, [[arrival] for arrival in as_tokens], request(stop)) == whole
        assert answer(tokenizer, in_groups(as_tokens, sizes), request(stop)) == whole
        assert answer(tokenizer, in_groups(as_events, sizes), request(stop)) == whole
        assert whole.usage.completion_tokens == len(whole.token_ids)


def test_a_stop_string_cuts_tokens_and_logprobs_where_it_is_complete(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox dog")
    event = Event(request_id="r", token_ids=ids, logprobs=[TokenLogprob(-float(i)) for i in range(len(ids))])
    output = OutputText(byte_level, request(["x"], logprobs=0))
    delta = output.push([event])
    assert delta is not None and delta.logprobs is not None
    assert (delta.text, delta.finish, delta.stop_reason) == ("fo", FinishReason.STOP, "x")
    assert len(delta.logprobs) == len(delta.token_ids) < len(ids)
    assert byte_level.decode(delta.token_ids) == "fox"


def test_what_is_held_back_is_shown_at_the_end_unless_it_failed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("fox")
    for error, text in (("", "fox"), ("broken", "fo")):
        output = OutputText(byte_level, request(["xyz"]))
        deltas = [output.push([token]) for token in ids]
        last = output.push([Event(request_id="r", finish=FinishReason.ERROR, error=error)])
        assert last is not None and last.error == error
        assert "".join(delta.text for delta in [*deltas, last] if delta) == text


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_nothing_gives_no_delta_and_cached_tokens_are_of_the_first_event(
    byte_level: Tokenizer, stop: list[str]
) -> None:
    output = OutputText(byte_level, request(stop))
    assert output.push([]) is None
    first = output.push([Event(request_id="r", token_ids=[40], cached_tokens=3)])
    assert first is not None and first.usage.cached_tokens == 3
    resumed = output.push([Event(request_id="r", token_ids=[41], cached_tokens=1)])
    assert resumed is not None and resumed.usage.cached_tokens == 3


def test_what_comes_with_the_first_event_is_told_once(byte_level: Tokenizer) -> None:
    scores = [TokenLogprob(-1.5, ((3, -0.5),))]
    first = Event(request_id="r", token_ids=[7], cached_tokens=0, prompt_logprobs=scores, queue_seconds=0.25)
    last = Event(request_id="r", token_ids=[9], finish=FinishReason.LENGTH)
    for groups in ([[first], [8], [last]], [[first, 8, last]]):
        output = OutputText(byte_level, request())
        told, *others = [delta for group in groups if (delta := output.push(group)) is not None]
        assert (told.prompt_logprobs, told.queue_seconds) == (scores, 0.25)
        assert all(delta.prompt_logprobs is None and delta.queue_seconds is None for delta in others)


def test_a_stop_string_in_the_first_token_hides_nothing_else(byte_level: Tokenizer) -> None:
    first = Event(request_id="r", token_ids=byte_level.encode("a")[:1], cached_tokens=0, queue_seconds=0.5)
    output = OutputText(byte_level, request(stop=["a"]))
    delta = output.push([first])
    assert delta is not None and output.ended and delta.queue_seconds == 0.5


def test_a_vector_is_the_whole_answer(byte_level: Tokenizer) -> None:
    event = Event(request_id="r", cached_tokens=0, queue_seconds=0.5, finish=FinishReason.STOP, embedding=b"1234")
    output = OutputText(byte_level, request())
    delta = output.push([event])
    assert delta is not None and output.ended
    assert (delta.embedding, delta.text, delta.finish, delta.queue_seconds) == (b"1234", "", FinishReason.STOP, 0.5)
    assert delta.usage == Usage(prompt_tokens=1)


def test_the_garbage_collector_does_not_look_at_log_probabilities() -> None:
    """An answer may have a million of them: to go through them all would hold up every stream."""
    scores = [TokenLogprob(-1.0, tuple((i, -float(i)) for i in range(20))) for _ in range(100)]
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(scores), type=list[TokenLogprob])
    for _ in range(2):  # a collection lets go of tuples whose items it has let go of before
        gc.collect()
    assert read == scores
    assert not any(gc.is_tracked(score) or gc.is_tracked(score.top) for score in read)


def test_usage_counts_the_drafted_tokens_that_are_in_the_answer(byte_level: Tokenizer) -> None:
    """A stop string may end the answer among tokens that were drafted rightly."""
    first, *others = byte_level.encode("abcdefgh", add_special_tokens=False)
    drafted = Event(request_id="r", token_ids=others, draft_tokens=len(others) + 2, accepted_tokens=len(others) - 1)
    end = Event(request_id="r", finish=FinishReason.LENGTH)
    usage = answer(byte_level, [[first], [drafted], [end]], request()).usage
    assert (usage.draft_tokens, usage.accepted_tokens) == (len(others) + 2, len(others) - 1)
    usage = answer(byte_level, [[first], [drafted]], request(["d"])).usage
    assert (usage.draft_tokens, usage.accepted_tokens) == (len(others) + 2, usage.completion_tokens - 1)
    assert usage.completion_tokens < 1 + len(others)
