"""Anthropic's own client, the real model, a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.e2e.server import Server

if TYPE_CHECKING:
    import anthropic

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(locked: Server) -> Iterator[anthropic.Anthropic]:
    import anthropic  # A second and a half, for the one worker that runs this file.

    with anthropic.Anthropic(base_url=locked.url, api_key="sesame", max_retries=0) as client:
        yield client


def test_streamed_and_not_are_the_same(client: anthropic.Anthropic) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert "Berlin" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    read = final.usage.cache_read_input_tokens
    assert read > 0, "the prompt was computed before"
    assert final.usage.input_tokens + read == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_tokens_are_counted_before_they_are_spent(client: anthropic.Anthropic) -> None:
    asked = {"model": "smollm2", "messages": QUESTION, "system": "You are a pirate."}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_a_tool_is_called_and_its_result_answered(client: anthropic.Anthropic) -> None:
    asked = {"model": "smollm2", "max_tokens": 60, "tools": [WEATHER], "extra_body": {"temperature": 0}}
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.messages.create(**asked, messages=messages, tool_choice=ONE_CALL)
    assert first.stop_reason == "tool_use"
    [call] = first.content
    assert (call.type, call.name) == ("tool_use", "weather")
    assert isinstance(call.input["city"], str)
    with client.messages.stream(**asked, messages=messages, tool_choice=ONE_CALL) as stream:
        [streamed] = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}]},
    ]
    second = client.messages.create(**asked | {"max_tokens": 8}, messages=messages, tool_choice={"type": "none"})
    assert second.content[0].type == "text"


def test_a_stop_sequence_and_a_begun_answer(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Count to ten in words."}, {"role": "assistant", "content": "One, two,"}]
    answer = client.messages.create(
        model="smollm2", messages=messages, max_tokens=24, stop_sequences=["five"], extra_body={"temperature": 0}
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "five")
    assert answer.content[0].text.strip().startswith("three")
    assert "five" not in answer.content[0].text


def test_errors_are_anthropic_s(client: anthropic.Anthropic, locked: Server) -> None:
    import anthropic

    asked = {"messages": QUESTION, "max_tokens": 8}
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", **asked)
    with pytest.raises(anthropic.BadRequestError, match="top_k") as refused:
        client.messages.create(model="smollm2", **asked, extra_body={"top_k": -5})
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with (
        anthropic.Anthropic(base_url=locked.url, api_key="guess", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="smollm2", **asked)
