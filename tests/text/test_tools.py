"""Properties that hold for every style of tool calls, however the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import EFFORT
from tests.growth import check_linear
from weft.text.parsers.calls import CustomInput
from weft.text.parsers.pieces import CallStarted, Content, ParsedAnswer, Parser, Piece, ToolCall, collect, merged
from weft.text.parsers.reasoning import ReasoningStyle
from weft.text.parsers.styles import REASONING_STYLES, TOOL_STYLES, ToolStyle, parser_for

STYLES = {style.name: style for style in TOOL_STYLES}
DECLARED = ("get_weather", "f")


def numbered_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"call_{next(numbers):024x}"


def parser_of(name: str, *, declared: Iterable[str] | None = DECLARED) -> Parser:
    return parser_for(STYLES[name], None, declared=declared and tuple(declared), new_id=numbered_ids())


def pieces_of(parser: Parser, chunks: Iterable[str]) -> list[Piece]:
    return [*itertools.chain.from_iterable(map(parser.push, chunks)), *parser.finish()]


def parse(name: str, text: str) -> ParsedAnswer:
    """Parse an answer without streaming, and check that streaming gives the same."""
    answer = collect(pieces_of(parser_of(name), [text]))
    assert collect(pieces_of(parser_of(name), text)) == answer
    return answer


def calls_of(answer: ParsedAnswer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.tool_calls]


def cut(text: str, at: Iterable[int]) -> list[str]:
    bounds = [0, *sorted(position % (len(text) + 1) for position in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<think>", "</think>", "[THINK]", "[/THINK]"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}', '{"name": "g"}', '"name": "f"'),
    *('"arguments": {', '"arguments": "{\\"a\\": \\"\\ud83d\\ude00\\"}"', '"parameters": null', '"type": "function"'),
    *("{", "}", "[", "]", '"', "\\", "\\u", "\\ud83d", ":", ",", ";", "<", "</", "[TOOL", "null", "f"),
    *(" ", "\n", "\n\n", "Hello", "é", "🎉", "你好"),
]
PIECES_OF_TEXT = st.one_of(st.sampled_from(FRAGMENTS), st.text(alphabet='<[{}]"\\abé🎉 \n;', max_size=4))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["}", '"{', "</tool_call>", "]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.builds(
    lambda value, ascii_only, indent: json.dumps(value, ensure_ascii=ascii_only, indent=indent),
    st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=3),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
)
CALLS = st.lists(st.tuples(st.sampled_from(DECLARED), ARGUMENTS), min_size=1, max_size=3)


def damaged(style: ToolStyle, calls: list[tuple[str, str]], at: int, removed: int, inserted: str) -> str:
    text = style.shape.write(calls)
    at %= len(text)
    return text[:at] + inserted + text[at + removed :]


TEXTS = st.one_of(
    st.lists(PIECES_OF_TEXT, max_size=16).map("".join),
    st.builds(
        damaged,
        st.sampled_from(TOOL_STYLES),
        CALLS,
        st.integers(0, 1000),
        st.integers(0, 3),
        st.just("") | PIECES_OF_TEXT,
    ),
)
"""Texts that are nearly calls: every marker and bracket in any order, and calls with a mistake."""

SETUPS = [
    (tools, reasoning, opened)
    for tools in (None, *TOOL_STYLES)
    for reasoning, opened in ((None, False), *itertools.product(REASONING_STYLES, (False, True)))
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: "-".join(str(getattr(s, "name", s)) for s in setup))
@settings(max_examples=15 * EFFORT)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=12), declared=st.sampled_from([None, DECLARED]))
def test_every_way_to_cut_the_text_gives_the_same_answer(
    setup: tuple[ToolStyle | None, ReasoningStyle | None, bool],
    text: str,
    cuts: list[int],
    declared: tuple[str, ...] | None,
) -> None:
    tools, reasoning, opened = setup

    def answer(chunks: list[str]) -> ParsedAnswer:
        ids = numbered_ids()
        return collect(
            pieces_of(parser_for(tools, reasoning, declared=declared, reasoning_opened=opened, new_id=ids), chunks)
        )

    whole = answer([text])
    assert answer(list(text)) == whole
    assert answer(cut(text, cuts)) == whole


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=40 * EFFORT)
@given(text=TEXTS)
def test_text_without_a_call_is_content_unchanged(name: str, text: str) -> None:
    answer = parse(name, text)
    if not answer.tool_calls:
        assert answer.content == text
    rest = iter(text)
    assert all(char in rest for char in answer.content), "content has nothing that the text has not, in its order"


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15 * EFFORT)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_what_a_model_should_write_is_read_exactly(name: str, calls: list[tuple[str, str]], cuts: list[int]) -> None:
    text = STYLES[name].shape.write(calls)
    for chunks in ([text], list(text), cut(text, cuts)):
        answer = collect(pieces_of(parser_of(name), chunks))
        assert calls_of(answer) == calls
        assert answer.content == ""


WORDS = st.text(alphabet="abé🎉,. <[", min_size=1, max_size=8).map(lambda text: f"a{text}.")


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral-args"])
@settings(max_examples=25 * EFFORT)
@given(calls=CALLS, before=WORDS, between=st.sampled_from(["", " ", "\n", "\r\n\t"]), after=WORDS)
def test_content_around_calls_is_kept(
    name: str, calls: list[tuple[str, str]], before: str, between: str, after: str
) -> None:
    text = f"{before}{between}{STYLES[name].shape.write(calls)}{between}{after}"
    answer = collect(pieces_of(parser_of(name), list(text)))
    assert calls_of(answer) == calls
    assert answer.content == f"{before}{between}{after}"


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15 * EFFORT)
@given(arguments=ARGUMENTS)
def test_arguments_in_a_string_are_decoded(name: str, arguments: str) -> None:
    if name == "mistral-args":
        return
    text = STYLES[name].shape.write([("f", json.dumps(arguments))])
    for chunks in ([text], list(text)):
        assert calls_of(collect(pieces_of(parser_of(name), chunks))) == [("f", arguments)]


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15 * EFFORT)
@given(calls=CALLS, data=st.data())
def test_a_text_cut_off_anywhere_gives_whole_calls_and_at_most_one_in_part(
    name: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    text = STYLES[name].shape.write(calls)
    part = text[: data.draw(st.integers(0, len(text)))]
    answer = parse(name, part)
    *whole, last = [*calls_of(answer)] or [("", "")]
    assert whole == calls[: len(whole)]
    if answer.tool_calls:
        assert last[0] == calls[len(whole)][0]
        assert calls[len(whole)][1].startswith(last[1])
    else:
        assert answer.content == part


@pytest.mark.parametrize("reasoning", [None, REASONING_STYLES[0]])
@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=15 * EFFORT)
@given(calls=CALLS, before=st.sampled_from(["", "Let me look.\n"]), data=st.data())
def test_an_answer_that_is_cut_in_a_call_has_no_markup_in_its_content(
    name: str, reasoning: ReasoningStyle | None, calls: list[tuple[str, str]], before: str, data: st.DataObject
) -> None:
    shape = STYLES[name].shape
    before = before if STYLES[name].parser.markers[0] in shape.opening + shape.before_name else ""
    text = before + shape.write(calls)
    first = len(before) + 1
    part = text[: data.draw(st.integers(first + 1, len(text)))]
    for chunks in ([part], list(part)):
        parser = parser_for(STYLES[name], reasoning, declared=DECLARED)
        pieces = [*itertools.chain.from_iterable(map(parser.push, chunks)), *parser.finish(is_cut=True)]
        answer = collect(pieces)
        assert answer.content.strip() == before.strip()
        assert answer.reasoning == ""
        *whole, last = [*calls_of(answer)] or [("", "")]
        assert whole == calls[: len(whole)]
        if answer.tool_calls:
            assert last[0] == calls[len(whole)][0]
            assert calls[len(whole)][1].startswith(last[1])
        assert (last[0] == "") == (len(part) < len(before + shape.opening + shape.before_name + calls[0][0]) + 1)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("hermes", "a <", "a <"),
        ("hermes", "if a <b", "if a <b"),
        ("hermes", "a <tool_call>so", "a <tool_call>so"),
        ("mistral", "[TOOL", ""),
        ("mistral", "a [1", "a [1"),
        ("llama3", "{", "{"),
        ("llama3", '{"name": "Bo', '{"name": "Bo'),
        ("llama3", '{"type": "circle", "r', '{"type": "circle", "r'),
        ("llama3", '{"name": "get_w', ""),
    ],
)
def test_an_answer_that_is_cut_keeps_what_is_no_call(name: str, text: str, content: str) -> None:
    for chunks in ([text], list(text)):
        parser = parser_of(name)
        pieces = [*itertools.chain.from_iterable(map(parser.push, chunks)), *parser.finish(is_cut=True)]
        assert collect(pieces) == ParsedAnswer(content=content)


@pytest.mark.parametrize("name", STYLES)
def test_a_call_starts_with_its_arguments_and_streams_them(name: str) -> None:
    shape = STYLES[name].shape
    parser = parser_of(name)
    assert parser.push(shape.opening + shape.before_name + "f" + shape.before_arguments) == []
    started, *_ = parser.push("{")
    assert started == CallStarted(0, f"call_{0:024x}", "f")
    arguments = '"city": "São Paulo", "days": [1, {"x": "}"}]}'
    for char in arguments:
        if char != "[":  # which may be the beginning of a marker
            assert "".join(piece.text for piece in parser.push(char)).endswith(char)
        else:
            parser.push(char)


@pytest.mark.parametrize("name", STYLES)
def test_content_is_held_only_while_it_can_be_a_marker_or_the_space_before_one(name: str) -> None:
    parser = parser_of(name)
    assert parser.push("Hello, ") == [Content("Hello,")]
    assert parser.push("world") == [Content(" world")]
    for marker in STYLES[name].markers[:1]:
        assert parser.push(marker[:-1]) == []
        assert parser.push("?") == [Content(f"{marker[:-1]}?")]
    assert parser.push("\n") == []
    assert parser.finish() == [Content("\n")]


@pytest.mark.parametrize("name", STYLES)
def test_a_push_gives_one_piece_of_a_kind(name: str) -> None:
    text = STYLES[name].shape.write([("f", '{"a": [1, "b\\n", {}]}'), ("get_weather", "{}")])
    pieces = parser_of(name).push(text)
    assert len(pieces) == 4
    assert merged(pieces) == pieces


def test_pieces_are_put_together() -> None:
    pieces = pieces_of(parser_of("hermes"), ["a ", *STYLES["hermes"].shape.write([("f", "{}")]), "b"])
    assert collect(pieces) == ParsedAnswer("ab", "", (ToolCall("call_" + "0" * 24, "f", "{}"),))


ADVERSARIES: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: " " * n,
    "markers begun": lambda n: "<[" * (n // 2),
    "open brackets": lambda n: "[TOOL_CALLS][<tool_call>{" * (n // 25),
    "arguments before a name": lambda n: '<tool_call>{"arguments": {"a": "' + "x" * n,
    "a key without end": lambda n: '{"name": "f", "' + "k" * n,
    "escapes": lambda n: '<tool_call>{"name": "f", "arguments": "{' + "\\ud83d" * (n // 6),
    "depth": lambda n: '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (n // 5),
    "less than": lambda n: '<tool_call>{"name": "f", "arguments": {' + "<" * n,
    "a name without end": lambda n: "[TOOL_CALLS]" + "n" * n,
    "closers": lambda n: '<tool_call>{"name": "f", "arguments": {}}' + "}" * n,
    "separators": lambda n: '{"name": "f", "parameters": {}}' + "; " * (n // 2),
    "reasoning": lambda n: "<think>" + "\n" * n,
}
"""Each makes a text of about so many characters."""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' { "input" :\n"a" , "other": "b"} ', "a"),
        ('{"input": "\\ud83d\\ude00\\ud800x\\q\\u12"}', "\N{GRINNING FACE}\ufffdx\\q\\u12"),
        ('{"input": ""}', ""),
        ('{"input": "cut \\', "cut "),
        ('{"inp', ""),
        ('{"input": 5}', '{"input": 5}'),
        ('{"other": "a", "input": "b"}', '{"other": "a", "input": "b"}'),
        ("{}", "{}"),
        ("a plain text", "a plain text"),
    ],
)
def test_the_text_of_a_custom_tool_s_call_is_read_however_it_is_cut(arguments: str, text: str) -> None:
    for cut in range(len(arguments)):
        reader = CustomInput()
        pieces = [*reader.push(arguments[:cut]), *reader.push(arguments[cut:])]
        assert collect(pieces) == ParsedAnswer(content=text)
    one_by_one = CustomInput()
    assert collect(piece for char in arguments for piece in one_by_one.push(char)) == ParsedAnswer(content=text)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("hostile", ADVERSARIES.values(), ids=ADVERSARIES)
def test_a_long_hostile_text_costs_linear_time(name: str, hostile: Callable[[int], str]) -> None:
    def whole(text: str) -> None:
        pieces_of(parser_of(name), [text])

    def by_character(text: str) -> None:
        pieces_of(parser_for(STYLES[name], REASONING_STYLES[0], declared=DECLARED), text)

    check_linear(lambda n: hostile(n) * 5, whole, 1_000)
    check_linear(hostile, by_character, 2_000)
    parser = STYLES[name].parser(numbered_ids(), DECLARED)
    for char in hostile(5_000):
        parser.push(char)
        assert len(parser._text) <= len("[TOOL_CALLS]"), "text that waits is copied by every push"
