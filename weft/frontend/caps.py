"""How large the parts of a request may be. They are counted before anything is made of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from weft.config import LimitOptions
from weft.errors import InvalidRequest

_STRINGS_AND_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Possessive: a string that never ends is looked at once."""


class TooDeep(InvalidRequest):
    kind = "json_too_deep"


class TooMany(InvalidRequest):
    kind = "too_many"


class Cap(Struct, frozen=True):
    field: str
    count: Callable[[Any], int]
    """Of the field's value, whatever a client may have put there; what it cannot be is for others to say."""
    limit: Callable[[LimitOptions], int]
    flag: str


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _prompts(value: Any) -> int:
    """A list of numbers is one prompt, in token ids."""
    return _length(value) if isinstance(value, list) and value and not isinstance(value[0], int) else 1


CAPS = (
    Cap("messages", _length, lambda limits: limits.max_messages, "--max-messages"),
    Cap("tools", _length, lambda limits: limits.max_tools, "--max-tools"),
    Cap("functions", _length, lambda limits: limits.max_tools, "--max-tools"),
    Cap("prompt", _prompts, lambda limits: limits.max_prompts, "--max-prompts"),
    Cap("input", _prompts, lambda limits: limits.max_messages, "--max-messages"),
    Cap("n", _number, lambda limits: limits.max_n, "--max-n"),
    Cap("best_of", _number, lambda limits: limits.max_n, "--max-n"),
    Cap("stop", _length, lambda limits: limits.max_stop, "--max-stop"),
    Cap("stop_sequences", _length, lambda limits: limits.max_stop, "--max-stop"),
    Cap("logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("top_logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("prompt_logprobs", _number, lambda limits: limits.max_logprobs, "--max-logprobs"),
    Cap("logit_bias", _length, lambda limits: limits.max_logit_bias, "--max-logit-bias"),
)


def check_caps(body: dict[str, Any], limits: LimitOptions) -> None:
    """Raise TooMany, with the limit and its flag, for a decoded body that has too much of something."""
    for cap in CAPS:
        if cap.field in body and (count := cap.count(body[cap.field])) > (limit := cap.limit(limits)):
            raise TooMany(
                f"{cap.field}: {count} in one request; at most {limit}.",
                hint=f"The operator's setting is {cap.flag}.",
                param=cap.field,
            )


def check_depth(body: bytes, limits: LimitOptions) -> None:
    """Raise TooDeep for JSON that is nested too deeply, before it is parsed: in linear time, and without recursion."""
    if body.count(b"[") + body.count(b"{") <= limits.max_json_depth:
        return
    depth = 0
    for match in _STRINGS_AND_BRACKETS.finditer(body):
        first = body[match.start()]
        if first in b"[{":
            depth += 1
            if depth > limits.max_json_depth:
                raise TooDeep(
                    f"The body's JSON is nested more than {limits.max_json_depth} deep.",
                    hint="The operator's setting is --max-json-depth.",
                )
        elif first in b"]}":
            depth -= 1
