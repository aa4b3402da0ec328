"""Ollama's own client, and requests as llama.cpp's clients send them: the real model, a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE

if TYPE_CHECKING:
    import ollama

QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
GREEDY = {"temperature": 0, "num_predict": 24}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def client(locked: Server) -> Iterator[ollama.Client]:
    import ollama

    with ollama.Client(host=locked.url, headers=KEY) as client:
        yield client


def complete(locked: Server, **body: Any) -> Any:
    response = httpx.post(f"{locked.url}/completion", headers=KEY, json={"temperature": 0} | body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


def test_streamed_and_not_are_the_same(client: ollama.Client) -> None:
    whole = client.chat("smollm2", QUESTION, options=GREEDY)
    assert "Berlin" in (whole.message.content or "") and whole.done_reason == "stop"
    pieces = [*client.chat("smollm2:latest", QUESTION, options=GREEDY, stream=True)]
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].eval_count == whole.eval_count and len(pieces) > 2


def test_a_schema_is_kept_to(client: ollama.Client) -> None:
    said = client.chat("smollm2", QUESTION, format=CITY, options={"temperature": 0, "num_predict": 64}).message.content
    assert said is not None and said.replace(" ", "").replace("\n", "").startswith('{"city":"')


def test_a_text_is_continued(client: ollama.Client) -> None:
    answer = client.generate("smollm2", "One, two, three,", raw=True, options={"temperature": 0, "num_predict": 4})
    assert answer.response.startswith(" four") and answer.done_reason == "length"


def test_vectors_have_length_1(client: ollama.Client) -> None:
    [vector] = client.embed("smollm2", "The sea is calm.").embeddings
    assert sum(value * value for value in vector) == pytest.approx(1)


def test_models_are_told_of(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["smollm2:latest"]
    shown = client.show("smollm2:latest")
    assert shown.template and shown.capabilities and "tools" in shown.capabilities


def test_only_an_admin_key_pulls(client: ollama.Client, locked: Server) -> None:
    import ollama

    with pytest.raises(ollama.ResponseError) as refusal:
        client.pull("smollm2")
    assert refusal.value.status_code == 403
    with ollama.Client(host=locked.url, headers={"Authorization": "Bearer boss"}) as operator:
        assert operator.pull("smollm2").status == "success"


def test_a_completion_by_a_grammar_of_gbnf(locked: Server) -> None:
    grammar = 'root ::= " " answer\nanswer ::= "yes" | "no" # a comment'
    body = complete(locked, prompt="Is the sea blue? Say yes or no:", grammar=grammar)
    assert body["content"] in (" yes", " no") and body["stop_type"] == "eos"


def test_a_completion_ends_at_a_stop_string(locked: Server) -> None:
    body = complete(locked, prompt="One, two, three, four,", n_predict=24, stop=["seven"], n_probs=1)
    assert (body["content"], body["stop_type"], body["stopping_word"]) == (" five, six, ", "word", "seven")
    assert body["completion_probabilities"][0]["token"] == " five"
