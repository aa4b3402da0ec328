"""What a scripted model says in the tests of every chat interface: thoughts, text and calls, cut as one likes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from tests.api.scripted_engine import ScriptedEngine
from weft.backends.contract import ChatStyles
from weft.text.parsers.styles import reasoning_style, tool_style
from weft.types import FinishReason, Output, Usage

STYLES = ChatStyles(tool_style("hermes", None), reasoning_style("think", None))
THOUGHT = "Which city?"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
EVERYTHING = f"<think>{THOUGHT}</think>Let me look.{CALLS}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def model_that_says(
    text: str,
    cuts: Sequence[int] = (),
    *,
    finish: FinishReason = FinishReason.STOP,
    stop_reason: str | int | None = None,
    styles: ChatStyles = STYLES,
) -> ScriptedEngine:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[start:end] for start, end in pairwise(edges)]
    usage = Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=4)
    last = Output(finish=finish, stop_reason=stop_reason, usage=usage)
    engine = ScriptedEngine([*(Output(text=part, token_ids=[65]) for part in parts), last])
    engine.styles = styles
    return engine


def named_events(response: httpx.Response) -> list[Any]:
    """The data of a stream whose events have names, which must be the data's own."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, empty = response.text.split("\n\n")
    assert empty == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
