"""The requests that coding agents send by default are taken.

Those of Claude Code and Codex CLI have the fields that were recorded, with the texts cut. Those of Cline, Continue and
Zed are written from their published sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.http import post
from tests.api.says import model_that_says
from weft.api.handler import FIELDS_HEADER

FOLDER = Path(__file__).parent
CHAT = "/v1/chat/completions"


def request_of(agent: str) -> Any:
    return json.loads((FOLDER / f"{agent}.json").read_text())


@pytest.mark.parametrize(
    ("agent", "path", "without_effect"),
    [
        (
            "claude_code",
            "/v1/messages",
            "context_management, messages.content.cache_control, output_config.effort, max_tokens",
        ),
        ("codex", "/v1/responses", "client_metadata, include, tools.web_search"),
        ("continue", CHAT, "max_tokens"),
        ("zed", CHAT, "max_tokens, reasoning_effort"),
    ],
)
def test_what_an_agent_sends_is_taken(agent: str, path: str, without_effect: str) -> None:
    engine = model_that_says("Done.")
    answered = post(engine, path, request_of(agent))
    assert answered.status_code == 200, answered.text
    assert {*answered.headers[FIELDS_HEADER].split(", ")} == {*without_effect.split(", ")}
    assert engine.messages[-1]["role"] == "tool"


def test_tools_described_in_a_long_prompt_are_called_in_xml() -> None:
    """Cline's prompt has more than 10,000 tokens; what the model writes between tags is passed on as it is."""
    call = "<attempt_completion>\n<result>\nDone.\n</result>\n</attempt_completion>"
    body = request_of("cline")
    body["messages"][0]["content"] *= 200
    assert len(body["messages"][0]["content"]) > 40_000
    engine = model_that_says(call, range(0, len(call), 5))
    answered = post(engine, CHAT, body)
    assert answered.status_code == 200 and FIELDS_HEADER not in answered.headers, answered.text
    *events, usage = (json.loads(line[6:]) for line in answered.text.splitlines() if line.startswith("data: {"))
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == call
    assert usage["usage"]["completion_tokens"] == 7 and usage["choices"] == []
    assert "successfully saved" in str(engine.messages[-1]["content"])
