"""The styles of tool calls and reasoning, by name or by a model's chat template, and the parser of an answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from msgspec import Struct

from weft.errors import ConfigError
from weft.text.parsers.calls import CallParser
from weft.text.parsers.pieces import CallShape, Parser, PlainParser
from weft.text.parsers.reasoning import ReasoningParser, ReasoningStyle
from weft.text.parsers.tool_parsers import (
    ARGS,
    CALL_ID,
    CALLS,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    HermesParser,
    Llama3Parser,
    MistralParser,
)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """Make a call id for Mistral, whose templates refuse ids that are not nine letters and digits."""
    return secrets.token_hex(5)[:9]


class ToolStyle(Struct, frozen=True, kw_only=True):
    """A style is one way to write tool calls. To add one, write a parser and an entry in the table below."""

    name: str
    parser: type[CallParser]
    markers: tuple[str, ...]
    """Texts that a tokenizer may have as special tokens; they must reach the parser all the same."""
    shape: CallShape
    """How this model's template writes calls. The parser reads more than that."""
    in_template: tuple[str, ...]
    """Texts that a chat template of this style contains, all of them."""
    not_in_template: tuple[str, ...] = ()
    """Texts that a chat template of this style does not contain."""
    new_id: Callable[[], str] = new_call_id

    def fits(self, chat_template: str) -> bool:
        return all(text in chat_template for text in self.in_template) and not any(
            text in chat_template for text in self.not_in_template
        )


TOOL_STYLES = (
    ToolStyle(
        name="hermes",
        parser=HermesParser,
        markers=(TOOL_CALL, TOOL_CALL_END),
        shape=CallShape(
            before_name=TOOL_CALL + '\n{"name": "',
            before_arguments='", "arguments": ',
            after_arguments="}\n" + TOOL_CALL_END,
            separator="\n",
        ),
        in_template=(TOOL_CALL, "arguments"),
        # The same tags around something other than JSON: Qwen-Coder's and GLM's.
        not_in_template=("<function=", "<arg_key>"),
    ),
    ToolStyle(
        name="mistral",
        parser=MistralParser,
        markers=(CALLS,),
        shape=CallShape(
            opening=CALLS + "[",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after_arguments="}",
            separator=", ",
            closing="]",
        ),
        in_template=(CALLS,),
        not_in_template=(ARGS,),
        new_id=_nine_characters,
    ),
    ToolStyle(
        name="mistral-args",
        parser=MistralParser,
        markers=(CALLS, CALL_ID, ARGS),
        shape=CallShape(before_name=CALLS, before_arguments=ARGS, separator=""),
        in_template=(CALLS, ARGS),
        new_id=_nine_characters,
    ),
    ToolStyle(
        name="llama3",
        parser=Llama3Parser,
        markers=(PYTHON_TAG,),
        shape=CallShape(
            before_name='{"name": "',
            before_arguments='", "parameters": ',
            after_arguments="}",
            separator="; ",
        ),
        in_template=('{"name": function name, "parameters": ',),
    ),
)

REASONING_STYLES = (
    ReasoningStyle(name="think", begin="<think>", end="</think>"),
    ReasoningStyle(name="mistral", begin="[THINK]", end="[/THINK]"),
)


def tool_style(name: str | None, chat_template: str | None) -> ToolStyle | None:
    """Return the style of this name; without one, that of the template. None for "none", or when no style fits."""
    if name is None:
        return next((style for style in TOOL_STYLES if style.fits(chat_template or "")), None)
    return _named("tool", TOOL_STYLES, name)


def reasoning_style(name: str | None, chat_template: str | None) -> ReasoningStyle | None:
    """Return the style of reasoning, found as `tool_style` finds one."""
    if name is None:
        return next((style for style in REASONING_STYLES if style.fits(chat_template or "")), None)
    return _named("reasoning", REASONING_STYLES, name)


def parser_for(
    tools: ToolStyle | None,
    reasoning: ReasoningStyle | None,
    *,
    declared: Collection[str] | None = None,
    reasoning_opened: bool = False,
    new_id: Callable[[], str] | None = None,
) -> Parser:
    """Return the parser of one answer: reasoning first, tool calls in what follows.

    `tools`: None when the request has no tools, so that calls stay text. `declared`: the names of its tools.
    """
    parser: Parser = tools.parser(new_id or tools.new_id, declared) if tools else PlainParser()
    return ReasoningParser(reasoning, parser, reasoning_opened) if reasoning else parser


Style = TypeVar("Style", ToolStyle, ReasoningStyle)


def _named(kind: str, styles: Sequence[Style], name: str) -> Style | None:
    if name == "none":
        return None
    for style in styles:
        if style.name == name:
            return style
    known = ", ".join(style.name for style in styles)
    raise ConfigError(f"There is no {kind} style {name!r}; there are: {known}, and none.")
