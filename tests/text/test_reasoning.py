"""Reasoning and answer are told apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_tools import DECLARED, STYLES, calls_of, numbered_ids, pieces_of
from weft.text.parsers.pieces import Content, ParsedAnswer, Parser, Reasoning, collect
from weft.text.parsers.reasoning import opens_reasoning
from weft.text.parsers.styles import REASONING_STYLES, parser_for, reasoning_style

THINK, MISTRAL = REASONING_STYLES


def thinking(*, opened: bool = False) -> Parser:
    return parser_for(None, THINK, reasoning_opened=opened)


def parse(text: str, *, opened: bool = False) -> ParsedAnswer:
    whole = collect(pieces_of(thinking(opened=opened), [text]))
    assert collect(pieces_of(thinking(opened=opened), text)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>why</think>because", ParsedAnswer("because", "why")),
        ("<think>\nwhy\n\nso\n</think>\n\nbecause\n", ParsedAnswer("because\n", "why\n\nso")),
        ("\n <think>\r\nwhy</think>\r\n  code", ParsedAnswer("  code", "why")),
        ("<think>\n\n</think>\n\nbecause", ParsedAnswer("because", "")),
        ("<think>why", ParsedAnswer("", "why")),
        ("<think>why\n", ParsedAnswer("", "why\n")),
        ("<think>why</thin", ParsedAnswer("", "why</thin")),
        ("<think>a < b </ </think </think>c", ParsedAnswer("c", "a < b </ </think ")),
        ("<think>a <think> b</think>c</think>d", ParsedAnswer("c</think>d", "a <think> b")),
        ("because <think>why</think>", ParsedAnswer("because <think>why</think>", "")),
        ("  because", ParsedAnswer("  because", "")),
        ("<thin", ParsedAnswer("<thin", "")),
        ("", ParsedAnswer()),
        ("\n", ParsedAnswer("\n", "")),
    ],
)
def test_reasoning_stands_before_the_answer(text: str, answer: ParsedAnswer) -> None:
    assert parse(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("why</think>because", ParsedAnswer("because", "why")),
        ("\nwhy\n</think>\n\nbecause", ParsedAnswer("because", "why")),
        (" why</think>", ParsedAnswer("", " why")),
        ("<think>\nwhy</think>because", ParsedAnswer("because", "why")),
        ("why", ParsedAnswer("", "why")),
        ("\n\n", ParsedAnswer("", "")),
        ("</think>because", ParsedAnswer("because", "")),
        ("", ParsedAnswer()),
    ],
)
def test_an_answer_may_begin_inside_reasoning(text: str, answer: ParsedAnswer) -> None:
    assert parse(text, opened=True) == answer


@settings(max_examples=200)
@given(
    reasoning=st.text(alphabet="ab<é🎉 \n", max_size=12).map(lambda text: f"a{text}b"),
    content=st.text(alphabet="ab</think>é🎉 \n", max_size=12).map(lambda text: f"a{text}"),
    opened=st.booleans(),
)
def test_no_character_of_either_is_lost(reasoning: str, content: str, opened: bool) -> None:
    text = f"{'' if opened else '<think>'}\n{reasoning}\n</think>\n\n{content}"
    assert parse(text, opened=opened) == ParsedAnswer(content, reasoning)


def test_reasoning_is_streamed_as_it_comes() -> None:
    parser = thinking()
    assert parser.push("<think>\n") == []
    assert parser.push("I ") == [Reasoning("I ")]
    assert parser.push("see\n") == [Reasoning("see")]
    assert parser.push("it</") == [Reasoning("\nit")]
    assert parser.push("b") == [Reasoning("</b")]
    assert parser.push("\n</think>\n") == []
    assert parser.push("\nYes") == [Content("Yes")]
    assert parser.finish() == []


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("opened", [False, True])
def test_calls_follow_reasoning(name: str, opened: bool) -> None:
    call = STYLES[name].shape.write([("f", '{"a": 1}')])
    text = f"{'' if opened else '<think>'}I could write {call}\n</think>\n\n{call}"
    parser = parser_for(STYLES[name], THINK, declared=DECLARED, reasoning_opened=opened, new_id=numbered_ids())
    answer = collect(pieces_of(parser, text))
    assert calls_of(answer) == [("f", '{"a": 1}')]
    assert answer.content == ""
    assert answer.reasoning == f"I could write {call}"


@pytest.mark.parametrize("text", ["", "\n", " Yes\n", "<tool_call>", "<thin"])
def test_an_answer_without_reasoning_is_all_content(text: str) -> None:
    assert collect(pieces_of(parser_for(STYLES["hermes"], THINK), [text])) == ParsedAnswer(text)
    assert collect(pieces_of(parser_for(STYLES["hermes"], THINK), text)) == ParsedAnswer(text)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}", THINK),
        ("{% set content = content.split('</think>')[-1] %}", THINK),
        ("{{ '[THINK]' + thinking + '[/THINK]' }}", MISTRAL),
        ("{{ message.content }}", None),
        (None, None),
    ],
)
def test_the_style_is_what_the_chat_template_shows(template: str | None, style: object) -> None:
    assert reasoning_style(None, template) is style


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("What does <think> mean?", False),
        ("", False),
    ],
)
def test_a_template_may_open_the_reasoning(prompt: str, opened: bool) -> None:
    assert opens_reasoning(THINK, prompt) is opened
