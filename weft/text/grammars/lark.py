"""Writes the text of a grammar for what a request asks, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from weft.errors import InvalidRequest, shortened
from weft.options import JsonWhitespace
from weft.text.grammars.json_schema import check_schema
from weft.text.grammars.specs import (
    ChoiceSpec,
    GrammarSpec,
    JsonObjectSpec,
    JsonSchemaSpec,
    LarkSpec,
    OutputSpec,
    RegexSpec,
    ThinkingSpec,
    ToolCallsSpec,
    ToolSpec,
)

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Lets the model decide how text is cut into tokens. It follows the grammar, whose lines errors count."""
_JSON_STYLES: dict[JsonWhitespace, dict[str, object]] = {
    "compact": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "indented": {"whitespace_pattern": r"\x20|\n[\x20\t]{0,64}"},
}
"""The white space that JSON has: a space behind every comma and colon, as chat templates write JSON; or anywhere a
space, or a line's end and indentation. With more, a model may never end, and a small one may not with the latter."""
_ANY_TEXT = r"TEXT: /(.|\n)*/"
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_RULE_OPTION = re.compile(r"\s*+[?!]*+[\w-]++\s*+\[[^\]]*\b(stop|temperature)\s*+=")
"""Matched against one line at a time: the name of a rule and its options stand on one."""


_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)
MAX_GBNF_RULES = 500
"""llguidance looks at all rules of a grammar once for each of them."""


class GrammarWriter:
    def __init__(
        self, specials: Mapping[str, int], *, max_schema_depth: int, json_whitespace: JsonWhitespace = "compact"
    ) -> None:
        """`specials` are the tokenizer's special tokens, which are never a part of text."""
        self._specials = specials
        self._special = re.compile(
            "|".join(re.escape(text) for text in sorted(specials, key=len, reverse=True)) or "$^"
        )
        self._max_schema_depth = max_schema_depth
        self._json_style = _JSON_STYLES[json_whitespace]

    def write(self, spec: GrammarSpec, thinking: ThinkingSpec | None = None) -> str:
        lines = self._tool_calls(spec) if isinstance(spec, ToolCallsSpec) else self._lines(spec)
        if thinking is not None:
            lines = self._after_thoughts(thinking, lines)
        return "\n".join(lines) + _OPTIONS

    def _lines(self, spec: OutputSpec) -> list[str]:
        match spec:
            case JsonObjectSpec():
                return ["start: " + self._json({"type": "object"}, spec.param)]
            case JsonSchemaSpec(schema=schema, param=param):
                return ["start: " + self._json(schema, param)]
            case RegexSpec(pattern=pattern):
                from llguidance import regex_to_lark  # costs nothing before it is needed

                return [f"start: /{regex_to_lark(pattern, '')}/"]
            case ChoiceSpec(options=options, param=param):
                if not options:
                    raise InvalidRequest("There is nothing to choose from.", param=param)
                return ["start: CHOICE", "CHOICE: " + " | ".join(json.dumps(option) for option in options)]
            case LarkSpec(text=text, param=param):
                lark = _from_gbnf(text, param) if _GBNF_RULE.search(text) else text
                _check_lark(lark, param)
                return [lark]

    def _after_thoughts(self, thinking: ThinkingSpec, lines: list[str]) -> list[str]:
        ends = ["thoughts"] + ([f"TEXT {self._token(thinking.end)}"] if thinking.end in self._specials else [])
        thoughts = f"({' | '.join(ends)}) GAP"
        if not thinking.is_open:
            thoughts = f"({self._literal(thinking.begin)} {thoughts})?"
        return [
            f"start: {thoughts} answer",
            f"thoughts[lazy]: TEXT {json.dumps(thinking.end)}",
            _ANY_TEXT,
            "GAP: /[ \\n]{0,4}/",
            "answer: %lark {",
            *lines,
            "}",
        ]

    def _json(self, schema: Mapping[str, Any], param: str) -> str:
        check_schema(schema, max_depth=self._max_schema_depth, param=param)
        try:
            return "%json " + json.dumps({**schema, "x-guidance": self._json_style}, allow_nan=False)
        except (RecursionError, TypeError, ValueError) as error:
            raise InvalidRequest(f"The schema is not valid JSON: {error}.", param=param) from error

    def _tool_calls(self, spec: ToolCallsSpec) -> list[str]:
        if not spec.tools:
            raise InvalidRequest("There are no tools to call.", param=spec.param)
        shape = spec.shape
        numbers = range(len(spec.tools))
        before = [f"{shape.before_name}{tool.name}{shape.before_arguments}" for tool in spec.tools]
        after = self._literal(shape.after_arguments)
        lines = [
            f"arguments_{i}: {self._json(_parameters(tool, spec.param), spec.param)}"
            for i, tool in enumerate(spec.tools)
        ]
        lines += [f"call_{i}: {self._literal(before[i])} arguments_{i} {after}" for i in numbers]
        lines.append("call: " + " | ".join(f"call_{i}" for i in numbers))
        more = f"({self._literal(shape.separator)} call)*" if spec.parallel else ""
        end = f"{more} {self._literal(shape.closing)}"
        if spec.at_least_one:
            return [f"start: {self._literal(shape.opening)} call {end}", *lines]
        if spec.text is not None:
            start = f"start: {self._literal(shape.opening)} call {end} | text"
            return [start, *lines, "text: %lark {", *self._lines(spec.text), "}"]
        # Text goes on until the first marker of a call; from there on, it is one.
        begin = shape.opening + shape.before_name
        marker = _MARKER.match(begin)
        lead = marker.group() if marker else begin
        heads = ["head"] + ([f"TEXT {self._token(lead)}"] if lead in self._specials else [])
        lines += [
            f"first_{i}: {self._literal((shape.opening + before[i])[len(lead) :])} arguments_{i} {after}"
            for i in numbers
        ]
        return [
            f"start: TEXT | ({' | '.join(heads)}) ({' | '.join(f'first_{i}' for i in numbers)}) {end}",
            f"head[lazy]: TEXT {json.dumps(lead)}",
            _ANY_TEXT,
            *lines,
        ]

    def _literal(self, text: str) -> str:
        """Return a text as it is; a special token in it may be written as that token, or be spelled out."""
        parts, at = [], 0
        for found in self._special.finditer(text):
            parts += [text[at : found.start()], found.group()]
            at = found.end()
        parts.append(text[at:])
        return " ".join(
            f"({json.dumps(part)} | {self._token(part)})" if part in self._specials else json.dumps(part)
            for part in parts
            if part
        )

    def _token(self, special: str) -> str:
        return f"<[{self._specials[special]}]>"


def _parameters(tool: ToolSpec, param: str) -> Mapping[str, Any]:
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"The parameters of the tool {tool.name!r} are not an object.", param=param)
    return {"type": "object", **tool.parameters}


def _from_gbnf(text: str, param: str) -> str:
    """Return a grammar of llama.cpp's notation in Lark's."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (count := text.count("::=")) > MAX_GBNF_RULES:
        raise InvalidRequest(f"The grammar has {count} rules; at most {MAX_GBNF_RULES} in GBNF.", param=param)
    try:
        lark: str = gbnf_to_lark(text)
    except Exception as error:  # It raises Exception itself, and others where a grammar ends too early.
        raise InvalidRequest(f"The grammar is not valid GBNF: {shortened(str(error))}.", param=param) from error
    return lark.removeprefix("%llguidance {}").lstrip()


def _check_lark(text: str, param: str) -> None:
    if text.lstrip().startswith("{"):
        raise InvalidRequest(
            "The grammar is written neither in Lark nor in GBNF.",
            hint="Send rules such as: start: greeting NAME. Lists of grammars are not taken.",
            param=param,
        )
    for option in filter(None, map(_RULE_OPTION.match, text.split("\n"))):
        raise InvalidRequest(f"The grammar's option {option.group(1)} is not supported.", hint="Try lazy.", param=param)
