"""Reasoning and answer, told apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_tools import DECLARED, STYLES, calls_of, numbered_ids, pieces_of
from weft.text.parsers.pieces import Answer, Content, Parser, Reasoning, collect
from weft.text.parsers.reasoning import opens_reasoning
from weft.text.parsers.styles import REASONING_STYLES, parser_for, reasoning_style

THINK, MISTRAL = REASONING_STYLES


def thinking(*, opened: bool = False) -> Parser:
    return parser_for(None, THINK, reasoning_opened=opened)


def parse(text: str, *, opened: bool = False) -> Answer:
    whole = collect(pieces_of(thinking(opened=opened), [text]))
    assert collect(pieces_of(thinking(opened=opened), text)) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>why</think>because", Answer("because", "why")),
        ("<think>\nwhy\n\nso\n</think>\n\nbecause\n", Answer("because\n", "why\n\nso")),
        ("\n <think>\r\nwhy</think>\r\n  code", Answer("  code", "why")),
        ("<think>\n\n</think>\n\nbecause", Answer("because", "")),
        ("<think>why", Answer("", "why")),
        ("<think>why\n", Answer("", "why\n")),
        ("<think>why</thin", Answer("", "why</thin")),
        ("<think>a < b </ </think </think>c", Answer("c", "a < b </ </think ")),
        ("<think>a <think> b</think>c</think>d", Answer("c</think>d", "a <think> b")),
        ("because <think>why</think>", Answer("because <think>why</think>", "")),
        ("  because", Answer("  because", "")),
        ("<thin", Answer("<thin", "")),
        ("", Answer()),
        ("\n", Answer("\n", "")),
    ],
)
def test_reasoning_stands_before_the_answer(text: str, answer: Answer) -> None:
    assert parse(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("why</think>because", Answer("because", "why")),
        ("\nwhy\n</think>\n\nbecause", Answer("because", "why")),
        (" why</think>", Answer("", " why")),
        ("<think>\nwhy</think>because", Answer("because", "why")),
        ("why", Answer("", "why")),
        ("\n\n", Answer("", "")),
        ("</think>because", Answer("because", "")),
        ("", Answer()),
    ],
)
def test_an_answer_may_begin_inside_reasoning(text: str, answer: Answer) -> None:
    assert parse(text, opened=True) == answer


@settings(max_examples=200, deadline=None)
@given(
    reasoning=st.text(alphabet="ab<é🎉 \n", max_size=12).map(lambda text: f"a{text}b"),
    content=st.text(alphabet="ab</think>é🎉 \n", max_size=12).map(lambda text: f"a{text}"),
    opened=st.booleans(),
)
def test_no_character_of_either_is_lost(reasoning: str, content: str, opened: bool) -> None:
    text = f"{'' if opened else '<think>'}\n{reasoning}\n</think>\n\n{content}"
    assert parse(text, opened=opened) == Answer(content, reasoning)


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
    assert collect(pieces_of(parser_for(STYLES["hermes"], THINK), [text])) == Answer(text)
    assert collect(pieces_of(parser_for(STYLES["hermes"], THINK), text)) == Answer(text)


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
