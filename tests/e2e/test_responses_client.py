"""OpenAI's client at /v1/responses and /v1/embeddings, the real model, a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server import Server
from weft.api.handler import FIELDS_HEADER

QUESTION = "What is the capital of Germany?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Place(BaseModel):
    city: str
    population: int


@pytest.fixture(scope="module")
def client(locked: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=locked.url + "/v1", api_key="sesame", max_retries=0) as client:
        yield client


def test_streamed_and_not_are_the_same(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**asked)
    assert "Berlin" in whole.output_text
    assert whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    cut = client.responses.create(**asked | {"max_output_tokens": 2})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_conversation_is_kept(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(**asked, input="My name is Zebedee. Remember it.")
    second = client.responses.create(**asked, input="What is my name?", previous_response_id=first.id)
    assert "Zebedee" in second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    [item] = client.responses.input_items.list(first.id)
    assert item.content[0].text == "My name is Zebedee. Remember it."
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_tool_is_called_and_its_result_answered(client: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "temperature": 0, "tools": [WEATHER], "parallel_tool_calls": False}
    forced = asked | {"input": "What is the weather in Oslo?", "tool_choice": "required", "max_output_tokens": 60}
    first = client.responses.create(**forced)
    [call] = first.output
    assert (call.type, call.name) == ("function_call", "weather")
    assert isinstance(json.loads(call.arguments)["city"], str)
    with client.responses.stream(**forced) as stream:
        [streamed] = stream.get_final_response().output
    assert streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    second = client.responses.create(
        **asked, input=[result], previous_response_id=first.id, tool_choice="none", max_output_tokens=8
    )
    assert second.output[0].type == "message"


def test_an_answer_in_form(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="smollm2", input="Oslo has 700000 people.", text_format=Place, temperature=0, max_output_tokens=60
    ).output_parsed
    assert isinstance(parsed, Place)


def test_what_the_template_does_not_know_is_a_hint_by_its_name_here(client: openai.OpenAI) -> None:
    asked = client.responses.with_raw_response
    answered = asked.create(model="smollm2", input="hi", reasoning={"effort": "low"}, max_output_tokens=1)
    assert answered.headers[FIELDS_HEADER] == "reasoning.effort"


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again in March."]
    together = client.embeddings.create(model="smollm2", input=texts)
    vectors = [item.embedding for item in together.data]
    assert [item.index for item in together.data] == [0, 1, 2]

    def likeness(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert all(likeness(vector, vector) == pytest.approx(1, abs=1e-3) for vector in vectors)
    assert likeness(vectors[0], vectors[1]) > likeness(vectors[0], vectors[2])
    alone = client.embeddings.create(model="smollm2", input=texts[0], encoding_format="float")
    assert likeness(alone.data[0].embedding, vectors[0]) == pytest.approx(1, abs=1e-3)
    assert alone.usage.total_tokens < together.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="smollm2", input="a", dimensions=3)
