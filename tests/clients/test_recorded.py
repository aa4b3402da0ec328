"""The requests that coding agents send by default are taken: their fields as they were recorded, with the texts cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.http import post
from tests.api.says import model_that_says
from weft.api.handler import FIELDS_HEADER

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("agent", "path", "without_effect"),
    [
        (
            "claude_code",
            "/v1/messages",
            "metadata, context_management, messages.content.cache_control, output_config.effort, max_tokens",
        ),
        ("codex", "/v1/responses", "prompt_cache_key, client_metadata, include, tools.web_search"),
    ],
)
def test_what_an_agent_sends_is_taken(agent: str, path: str, without_effect: str) -> None:
    engine = model_that_says("Done.")
    answered = post(engine, path, json.loads((FOLDER / f"{agent}.json").read_text()))
    assert answered.status_code == 200, answered.text
    assert {*answered.headers[FIELDS_HEADER].split(", ")} == {*without_effect.split(", ")}
    assert engine.messages[-1]["role"] == "tool"
