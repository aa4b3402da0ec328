"""The forms that a request may ask of its output. `param` is the request's field, for errors to name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from weft.errors import InvalidRequest
from weft.text.parsers.pieces import CallShape
from weft.text.tokenizer import Tokenizer, num_chars


class JsonObjectSpec(Struct, frozen=True, kw_only=True, tag=True):
    """Any JSON object."""

    param: str = "response_format"


class JsonSchemaSpec(Struct, frozen=True, kw_only=True, tag=True):
    """JSON that is valid for a schema."""

    schema: Mapping[str, Any]
    param: str = "response_format"


class RegexSpec(Struct, frozen=True, kw_only=True, tag=True):
    """Text that a regular expression matches from its beginning to its end."""

    pattern: str
    param: str = "regex"


class ChoiceSpec(Struct, frozen=True, kw_only=True, tag=True):
    """Exactly one of these texts."""

    options: Sequence[str]
    param: str = "choice"


class LarkSpec(Struct, frozen=True, kw_only=True, tag=True):
    """A context-free grammar in llguidance's variant of Lark, or in llama.cpp's notation, GBNF."""

    text: str
    param: str = "grammar"


OutputSpec = JsonObjectSpec | JsonSchemaSpec | RegexSpec | ChoiceSpec | LarkSpec


class ToolSpec(Struct, frozen=True, kw_only=True):
    name: str
    parameters: Mapping[str, Any] | None = None
    """The schema of the arguments, an object; None when the tool takes no arguments."""


class ToolCallsSpec(Struct, frozen=True, kw_only=True):
    """Calls of these tools, written as a model writes them."""

    shape: CallShape
    tools: Sequence[ToolSpec]
    at_least_one: bool = True
    """False when text may stand before the calls, or instead of them."""
    parallel: bool = True
    """False when there may be no more than one call."""
    text: OutputSpec | None = None
    """The form of a text instead of the calls; None: any. With `at_least_one` there is none."""
    param: str = "tools"


class ThinkingSpec(Struct, frozen=True, kw_only=True):
    """The reasoning that a model may write before the constrained output."""

    begin: str
    end: str
    is_open: bool
    """True when the prompt has opened the reasoning; else the model may open it, or write none."""


GrammarSpec = OutputSpec | ToolCallsSpec


def check_size(spec: GrammarSpec, max_kb: int) -> None:
    """Raise InvalidRequest for a spec of more than `max_kb` KiB of characters, having looked at no more than those."""
    match spec:
        case ToolCallsSpec(tools=tools, text=text):
            if text is not None:
                check_size(text, max_kb)
            asked: object = [(tool.name, tool.parameters) for tool in tools]
        case JsonSchemaSpec(schema=asked) | RegexSpec(pattern=asked) | ChoiceSpec(options=asked) | LarkSpec(text=asked):
            pass
        case JsonObjectSpec():
            asked = ""
    if num_chars(asked, max_kb * 1024) > max_kb * 1024:
        raise too_large(spec.param, max_kb)


def too_large(param: str, max_kb: int, verb: str = "has") -> InvalidRequest:
    return InvalidRequest(
        f"{param} {verb} more than {max_kb} KiB of characters.",
        hint="The server's limit is --max-schema-kb.",
        param=param,
    )


def encode_spec(spec: OutputSpec, max_kb: int) -> str:
    """Encode a spec for `SamplingParams.grammar`. Raises InvalidRequest above `max_kb` KiB of characters."""
    check_size(spec, max_kb)
    try:
        text = msgspec.json.encode(spec).decode()
    except RecursionError:
        raise InvalidRequest("The schema is nested too deep.", param=spec.param) from None
    if len(text) > max_kb * 1024:
        raise too_large(spec.param, max_kb)
    return text


def decode_spec(grammar: str) -> OutputSpec:
    """Decode what `encode_spec` wrote."""
    spec: OutputSpec = msgspec.json.decode(grammar, type=OutputSpec)
    return spec


class GrammarVocabulary(Struct, frozen=True, kw_only=True):
    tokens: list[bytes]
    """The bytes of every token by id; empty for an id without a token."""
    special_ids: list[int]
    """Ids of tokens that are never a part of text."""
    eos_token_ids: list[int]


def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """Collect the vocabulary of a tokenizer, which takes a fraction of a second."""
    return GrammarVocabulary(
        tokens=[tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        special_ids=sorted(tokenizer.special_ids | set(tokenizer.eos_token_ids)),
        eos_token_ids=list(tokenizer.eos_token_ids),
    )
