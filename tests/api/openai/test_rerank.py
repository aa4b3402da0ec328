"""Score and rerank, by the cosine of vectors; and what is told of the tokenizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api.http import error_of, post, request
from tests.api.scripted_engine import ScriptedEngine

# The scripted vector of a text is its length and its first byte.
SHORT, LONG = "A", "A" * 65


def cosine(a: str, b: str) -> float:
    one, other = (len(a), ord(a[0])), (len(b), ord(b[0]))
    return sum(x * y for x, y in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("texts", "pairs"),
    [
        ((SHORT, LONG), [(SHORT, LONG)]),
        ((SHORT, [SHORT, LONG]), [(SHORT, SHORT), (SHORT, LONG)]),
        (([SHORT, LONG], [LONG, LONG]), [(SHORT, LONG), (LONG, LONG)]),
    ],
)
def test_scores_are_cosines(path: str, texts: tuple[Any, Any], pairs: list[tuple[str, str]]) -> None:
    body = post(ScriptedEngine(), path, {"model": "scripted", "text_1": texts[0], "text_2": texts[1]}).json()
    assert body["object"] == "list" and body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"]
    assert [item["index"] for item in body["data"]] == [*range(len(pairs))]
    assert [item["score"] for item in body["data"]] == pytest.approx([cosine(*pair) for pair in pairs], abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(path: str) -> None:
    asked = {"model": "scripted", "query": SHORT, "documents": [LONG, {"text": SHORT}, "AA"]}
    body = post(ScriptedEngine(), path, asked).json()
    assert [(result["index"], result["document"]["text"]) for result in body["results"]] == [
        (1, SHORT), (2, "AA"), (0, LONG),
    ]  # fmt: skip
    assert body["results"][2]["relevance_score"] == pytest.approx(cosine(SHORT, LONG), abs=1e-6)
    assert body["usage"]["total_tokens"] == 1 + 65 + 1 + 2
    best = post(ScriptedEngine(), path, asked | {"top_n": 1, "return_documents": False}).json()["results"]
    assert [(result["index"], result["document"]) for result in best] == [(1, None)]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "", "text_2": "a"}, None),
        ("/v1/score", {"text_1": "a", "text_2": ["a"] * 3000}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 3000}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents[0]"),
    ],
)
def test_what_cannot_be_compared_is_refused(path: str, fields: dict[str, Any], param: str | None) -> None:
    refused = post(ScriptedEngine(), path, {"model": "scripted", **fields})
    assert refused.status_code == 400 and error_of(refused)["param"] == param, refused.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
def test_a_model_without_vectors_says_so(path: str, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    engine.abilities = replace(engine.abilities, embeddings=False)
    refused = post(engine, path, {"model": "scripted", **fields})
    assert refused.status_code == 400 and "embeddings" in error_of(refused)["message"]


def test_the_tokenizer_is_told_of() -> None:
    engine = ScriptedEngine()
    engine.styles = replace(engine.styles, template="{{ messages }}")
    body = request(engine, "GET", "/tokenizer_info").json()
    assert (body["vocab_size"], body["model_max_length"], body["eos_token"]) == (256, 1000, "\0")
    assert body["chat_template"] == "{{ messages }}"
    assert request(engine, "GET", "/tokenizer_info?model=another").status_code == 404
