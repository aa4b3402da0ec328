"""What a request may ask of its output's form. `param` is the request's field, for errors to name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from weft.errors import InvalidRequest
from weft.text.parsers.pieces import CallShape
from weft.text.tokenizer import Tokenizer


class JsonObjectSpec(Struct, frozen=True, kw_only=True, tag=True):
    """Any JSON object."""

    param: str = "response_format"


class JsonSchemaSpec(Struct, frozen=True, kw_only=True, tag=True):
    """JSON that fits a schema."""

    schema: Mapping[str, Any]
    param: str = "response_format"


class RegexSpec(Struct, frozen=True, kw_only=True, tag=True):
    """Text that a regular expression matches from its beginning to its end."""

    pattern: str
    param: str = "regex"


class ChoiceSpec(Struct, frozen=True, kw_only=True, tag=True):
    """One of these texts."""

    options: Sequence[str]
    param: str = "choice"


class LarkSpec(Struct, frozen=True, kw_only=True, tag=True):
    """A context-free grammar in llguidance's variant of Lark."""

    text: str
    param: str = "grammar"


class ToolSpec(Struct, frozen=True, kw_only=True):
    name: str
    parameters: Mapping[str, Any] | None = None
    """A schema of an object; None: the tool takes no arguments."""


class ToolCallsSpec(Struct, frozen=True, kw_only=True):
    """Calls of these tools, written as a model writes them."""

    shape: CallShape
    tools: Sequence[ToolSpec]
    at_least_one: bool = True
    """False: text, and calls behind it or none."""
    parallel: bool = True
    """False: no more than one call."""
    param: str = "tools"


class ThinkingSpec(Struct, frozen=True, kw_only=True):
    """What a model may write before the output that is in form."""

    begin: str
    end: str
    is_open: bool
    """The prompt has opened the thoughts; else the model may do so, or not think at all."""


OutputSpec = JsonObjectSpec | JsonSchemaSpec | RegexSpec | ChoiceSpec | LarkSpec
GrammarSpec = OutputSpec | ToolCallsSpec


def encode_spec(spec: OutputSpec, max_kb: int) -> str:
    """For `SamplingParams.grammar`; InvalidRequest when it has more than so many KiB of characters."""
    try:
        text = msgspec.json.encode(spec).decode()
    except RecursionError:
        raise InvalidRequest("The schema is nested too deep.", param=spec.param) from None
    if len(text) > max_kb * 1024:
        raise InvalidRequest(
            f"{spec.param} has {len(text)} characters; at most {max_kb} KiB of them are taken.",
            hint="The server's limit is --max-schema-kb.",
            param=spec.param,
        )
    return text


def decode_spec(grammar: str) -> OutputSpec:
    """What `encode_spec` wrote."""
    spec: OutputSpec = msgspec.json.decode(grammar, type=OutputSpec)
    return spec


class GrammarVocabulary(Struct, frozen=True, kw_only=True):
    tokens: list[bytes]
    """By id; empty for an id without a token."""
    special_ids: list[int]
    """Tokens that no text is made of."""
    eos_token_ids: list[int]


def vocabulary_of(tokenizer: Tokenizer) -> GrammarVocabulary:
    """Takes a fraction of a second."""
    return GrammarVocabulary(
        tokens=[tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
        special_ids=sorted(tokenizer.special_ids | set(tokenizer.eos_token_ids)),
        eos_token_ids=list(tokenizer.eos_token_ids),
    )
