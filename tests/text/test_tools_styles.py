"""Tests each style of tool calls by example, and how a style is chosen."""

from __future__ import annotations

import re

import pytest

from tests.text.test_tools import STYLES, calls_of, numbered_ids, parse, parser_of, pieces_of
from weft.errors import ConfigError
from weft.text.parsers.pieces import ParsedAnswer, collect
from weft.text.parsers.styles import (
    REASONING_STYLES,
    new_call_id,
    parser_for,
    reasoning_style,
    tool_style,
)


def any_name(style: str, text: str) -> ParsedAnswer:
    return collect(pieces_of(parser_of(style, declared=None), [text]))


HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALL = [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    "text",
    [
        HERMES_CALL,
        '<tool_call>{"name":"f","arguments":{"a": 1}}</tool_call>',
        '<tool_call> \r\n\t{ "name" : "f" , "arguments" : {"a": 1} } </tool_call>\n',
        '<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"id": [1, {"x": "}"}], "name": "f", "arguments": {"a": 1}, "type": "function"}\n</tool_call>',
        '<tool_call>\n{"n\\u0061me": "\\u0066", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        '<tool_call>\n{"arguments": "{\\"a\\": 1}", "name": "f"}\n</tool_call>',
    ],
)
def test_hermes_reads_a_call_in_many_spellings(text: str) -> None:
    answer = parse("hermes", text)
    assert calls_of(answer) == CALL
    assert answer.content == ""


def test_hermes_keeps_content_around_and_between_calls() -> None:
    answer = parse("hermes", f"First.\n\n{HERMES_CALL}\nThen.\n{HERMES_CALL}\n{HERMES_CALL}\n\nDone.\n")
    assert calls_of(answer) == CALL * 3
    assert answer.content == "First.\nThen.\n\nDone.\n"


@pytest.mark.parametrize(
    ("end", "content"),
    [
        ("", ""),
        ("\n", ""),
        (HERMES_CALL, ""),
        ("\nDone.", "\nDone."),
        ("}\n</tool_call>", ""),
        ("\n}} so", "\n}} so"),
        ("\n}", "\n}"),
    ],
)
def test_hermes_forgives_the_end_of_a_call(end: str, content: str) -> None:
    answer = parse("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}' + end)
    assert calls_of(answer) == CALL * (2 if end == HERMES_CALL else 1)
    assert answer.content == content


def test_hermes_takes_the_first_arguments_of_two() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "f"}</tool_call>'
    assert calls_of(parse("hermes", text)) == CALL


def test_hermes_ends_broken_arguments_where_another_call_begins() -> None:
    answer = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": 1{HERMES_CALL}')
    assert calls_of(answer) == [("f", '{"a": 1'), *CALL]
    assert answer.content == ""


def test_hermes_forgives_a_missing_brace() -> None:
    answer = parse("hermes", f'<tool_call>\n{{"name": "f", "arguments": {{"a": 1}}\n</tool_call>\n{HERMES_CALL}')
    assert calls_of(answer) == CALL * 2
    assert answer.content == ""


@pytest.mark.parametrize("written", ['"arguments": null', '"arguments": ""', '"arguments": " "', '"type": 1'])
def test_hermes_takes_missing_arguments_for_an_empty_object(written: str) -> None:
    assert calls_of(parse("hermes", f'<tool_call>{{"name": "f", {written}}}</tool_call>')) == [("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>f(a=1)</tool_call>",
        '<tool_call>\n{"name": "f"',
        '<tool_call>\n{"name": "f"\n</tool_call>',
        '<tool_call>\n{"name": "f", "argu',
        '<tool_call>\n{"name": "f", "arguments": ',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": 5}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "no"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "\\ud83d"}\n</tool_call>',
        '<tool_call>\n{"name": null, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"arguments": {"a": 1}, "name',
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        "<tool_cal",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse("hermes", f"Well: \n{text}\n") == ParsedAnswer(f"Well: \n{text}\n")


def test_a_call_after_one_that_is_broken_is_found() -> None:
    answer = parse("hermes", f"<tool_call>f()</tool_call>\n{HERMES_CALL}")
    assert calls_of(answer) == CALL
    assert answer.content == "<tool_call>f()</tool_call>"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1', '{"a": 1'),
        ('{"a": [1}}</tool_call>', '{"a": [1}}'),
        ("{'a': 1}}</tool_call>", "{'a': 1}"),
        ('{"a": 1</tool_call>', '{"a": 1'),
        ('{"a": 1}, "parameters": {"b": 2}}</tool_call>', '{"a": 1}'),
        ('{"a": "</tool_call>', '{"a": "</tool_call>'),
        ('{"a": 1 < 2}}</tool_call>', '{"a": 1 < 2}'),
        ('"{\\"a\\": \\u00', '{"a": \\u00'),
        ('"{\\x\\ud83d"}</tool_call>', "{\\x\ufffd"),
        ('"{\\ud83da\\ude00"}</tool_call>', "{\ufffda\ufffd"),
    ],
)
def test_broken_arguments_are_passed_on_as_they_are(written: str, arguments: str) -> None:
    answer = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {written}')
    assert calls_of(answer) == [("f", arguments)]
    assert answer.content == ""


def test_an_unknown_tool_after_a_marker_is_a_call() -> None:
    assert calls_of(parse("hermes", HERMES_CALL.replace('"f"', '"unknown"'))) == [("unknown", '{"a": 1}')]
    assert calls_of(parse("mistral", "[TOOL_CALLS]unknown{}")) == [("unknown", "{}")]
    assert calls_of(parse("llama3", '<|python_tag|>{"name": "unknown", "parameters": {}}')) == [("unknown", "{}")]


LLAMA_CALL = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    "text",
    [
        LLAMA_CALL,
        f"\n\n{LLAMA_CALL}\n",
        f"<|python_tag|>{LLAMA_CALL}",
        f"<|python_tag|> {LLAMA_CALL};",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{"parameters": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "f", "parameters": "{\\"a\\": 1}"}',
        '{"name": "f", "parameters": {"a": 1}, "reason": "because"}',
    ],
)
def test_llama_reads_a_call_in_many_spellings(text: str) -> None:
    answer = parse("llama3", text)
    assert calls_of(answer) == CALL
    assert answer.content == ""


@pytest.mark.parametrize("between", [";", "; ", " ;\n", "\n", "", "; <|python_tag|>", "<|python_tag|>"])
@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_llama_reads_several_calls(tag: str, between: str) -> None:
    answer = parse("llama3", tag + between.join([LLAMA_CALL] * 3))
    assert calls_of(answer) == CALL * 3
    assert answer.content == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f"}',
        '{"name": "f", "description": "A tool.", "parameters": {}}',
        '{"answer": 42}',
        "{}",
        "{ not JSON }",
        f"Call it so: {LLAMA_CALL}",
        f"[{LLAMA_CALL}]",
        f"; {LLAMA_CALL}",
        '<|python_tag|>print("hi")',
        '{"name": "f", "parameters": ',
    ],
)
def test_llama_leaves_an_answer_that_is_no_call(text: str) -> None:
    assert parse("llama3", text) == ParsedAnswer(text)


def test_llama_takes_any_name_when_none_are_declared() -> None:
    assert calls_of(any_name("llama3", '{"name": "unknown", "parameters": {}}')) == [("unknown", "{}")]


def test_an_answer_in_json_is_not_held_back() -> None:
    parser = parser_of("llama3")
    assert collect(parser.push('{"answer": 4')).content == '{"answer": 4'


def test_llama_takes_what_follows_a_tagged_call_for_a_call_too() -> None:
    other = '{"name": "unknown", "parameters": {}}'
    assert calls_of(parse("llama3", f"<|python_tag|>{LLAMA_CALL}; {other}")) == [*CALL, ("unknown", "{}")]
    assert calls_of(parse("llama3", f"{LLAMA_CALL}; {other}")) == CALL


def test_llama_finds_a_tag_after_content() -> None:
    answer = parse("llama3", f"I will look.\n<|python_tag|>{LLAMA_CALL}; and more")
    assert calls_of(answer) == CALL
    assert answer.content == "I will look.; and more"


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
        '[TOOL_CALLS] [ {"name": "f", "arguments": {"a": 1}, "id": "aB3dE6gH9"} ] ',
        '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}',
        '[TOOL_CALLS]f[ARGS]{"a": 1}',
        '[TOOL_CALLS]f{"a": 1}',
        '[TOOL_CALLS] f [ARGS] {"a": 1}\n',
        '[TOOL_CALLS]f[CALL_ID]aB3dE6gH9[ARGS]{"a": 1}',
    ],
)
def test_mistral_reads_a_call_in_many_spellings(text: str) -> None:
    answer = parse("mistral", text)
    assert calls_of(answer) == CALL
    assert answer.content == ""


def test_mistral_reads_several_calls() -> None:
    listed = '{"name": "f", "arguments": {"a": 1}}'
    assert calls_of(parse("mistral", f"[TOOL_CALLS] [{listed},\n {listed} , {listed}]")) == CALL * 3
    assert calls_of(parse("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}' * 3)) == CALL * 3
    assert calls_of(parse("mistral", '[TOOL_CALLS]f{"a": 1[TOOL_CALLS]f{"a": 1}')) == [("f", '{"a": 1'), *CALL]


@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS][1]",
        '[TOOL_CALLS][{"name": "f"',
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[CALL_ID]123",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]I call {}",
        '[TOOL_CALLS]f"x"',
    ],
)
def test_mistral_gives_back_what_is_no_call(text: str) -> None:
    assert parse("mistral", f"So: {text}") == ParsedAnswer(f"So: {text}")


def test_a_broken_entry_of_a_list_leaves_those_before_it() -> None:
    answer = parse("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"nome": "f"}]')
    assert calls_of(answer) == CALL
    assert answer.content == ', {"nome": "f"}]'


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}', "hermes"),
        ("{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}{{ tool_call.arguments }}", None),
        ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key>{{ tc.arguments }}", None),
        ('{{- "[TOOL_CALLS] [" }}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral-args"),
        ('\'Respond in the format {"name": function name, "parameters": dictionary of argument name\'', "llama3"),
        ("{{ message.content }}", None),
        ("", None),
        (None, None),
    ],
)
def test_the_style_is_what_the_chat_template_shows(template: str | None, name: str | None) -> None:
    style = tool_style(None, template)
    assert (style and style.name) == name


def test_a_style_by_name_goes_before_the_template() -> None:
    assert tool_style("llama3", "[TOOL_CALLS]") is STYLES["llama3"]
    assert tool_style("none", "[TOOL_CALLS]") is None
    assert reasoning_style("mistral", "<think>") is REASONING_STYLES[1]
    assert reasoning_style("none", "<think>") is None


def test_an_unknown_style_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'qwen'; there are: hermes, mistral, mistral-args, llama3, and none"):
        tool_style("qwen", None)
    with pytest.raises(ConfigError, match="reasoning style 'r1'; there are: think"):
        reasoning_style("r1", None)


def test_without_tools_calls_stay_text() -> None:
    assert collect(pieces_of(parser_for(None, None), HERMES_CALL)) == ParsedAnswer(HERMES_CALL)


def test_ids_are_new_and_of_the_form_that_the_style_needs() -> None:
    assert re.fullmatch(r"call_[0-9a-f]{24}", new_call_id())
    assert new_call_id() != new_call_id()
    for style in STYLES.values():
        parser = parser_for(style, None, declared=("f",))
        first, second = collect(parser.push(style.shape.write([("f", "{}")] * 2))).tool_calls
        assert first.id != second.id
        pattern = r"[A-Za-z0-9]{9}" if "mistral" in style.name else r"call_[0-9a-f]{24}"
        assert re.fullmatch(pattern, first.id)
    given = parser_for(STYLES["mistral"], None, new_id=numbered_ids())
    assert collect(given.push("[TOOL_CALLS]f{}")).tool_calls[0].id == f"call_{0:024x}"


def test_the_shape_says_how_a_model_writes_calls() -> None:
    calls = [("f", '{"a": 1}'), ("g", "{}")]
    assert STYLES["hermes"].shape.write(calls) == (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    )
    assert STYLES["mistral"].shape.write(calls) == (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    )
    assert STYLES["mistral-args"].shape.write(calls) == '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    assert STYLES["llama3"].shape.write(calls) == (
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    )
