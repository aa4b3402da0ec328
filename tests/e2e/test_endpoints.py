"""One server over HTTP and gRPC: the same answers, the same keys."""

from __future__ import annotations

import json

import grpc
import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE
from weft.api.grpc.ai_service_pb2 import GenerationParameters, StreamPredictRequest, StreamPredictResponse

KEY = {"authorization": "Bearer sesame"}
PROMPT = "One, two, three,"


def predict(server: Server, **metadata: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port()}") as channel:
        call = channel.stream_stream(
            "/cy.llm.AiInference/StreamPredict",
            request_serializer=StreamPredictRequest.SerializeToString,
            response_deserializer=StreamPredictResponse.FromString,
        )
        request = StreamPredictRequest(prompt=PROMPT, generation=GenerationParameters(temperature=0, max_new_tokens=6))
        return "".join(
            response.chunk for response in call(iter([request]), metadata=tuple(metadata.items()), timeout=PATIENCE)
        )


def test_both_protocols_give_the_same_answer(locked: Server) -> None:
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    answer = httpx.post(locked.url + "/v1/completions", json=body, headers=KEY, timeout=PATIENCE).json()
    text = answer["choices"][0]["text"]
    assert len(text) > 5
    assert predict(locked, **KEY) == text


def test_both_protocols_are_closed_without_the_key(locked: Server) -> None:
    assert httpx.get(locked.url + "/v1/models", timeout=PATIENCE).status_code == 401
    assert httpx.get(locked.url + "/health/live", timeout=PATIENCE).status_code == 200
    with pytest.raises(grpc.RpcError) as refused:
        predict(locked, authorization="Bearer sesam")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def streamed(server: Server, path: str, **body: object) -> list[str]:
    """The texts of the events of a streamed answer."""
    texts = []
    body = {"model": "smollm2", "temperature": 0, "stream": True, **body}
    with httpx.stream("POST", server.url + path, json=body, headers=KEY, timeout=PATIENCE) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            choice = next(iter(event.get("choices", ())), {})
            delta = event.get("delta", {}) if isinstance(event.get("delta"), (dict, str)) else {}
            text = delta if isinstance(delta, str) else delta.get("text")
            texts.append(text or choice.get("text") or choice.get("delta", {}).get("content") or "")
    return [text for text in texts if text]


def test_pieces_have_as_many_tokens_as_the_operator_says_at_every_endpoint(locked: Server) -> None:
    """The first token comes alone, then two at a time, then the rest: 1 + 2 + 2 + 1."""
    messages = [{"role": "user", "content": "Count to ten."}]
    asked: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 6}),
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 6}),
        ("/v1/messages", {"messages": messages, "max_tokens": 6}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 6}),
    ]

    def set_size(tokens: int) -> None:
        answer = httpx.post(
            locked.url + "/admin/stream-chunk-size",
            json={"tokens": tokens},
            headers={"authorization": "Bearer boss"},
            timeout=PATIENCE,
        )
        assert answer.json() == {"tokens": tokens}

    whole = ["".join(streamed(locked, path, **body)) for path, body in asked]
    predicted = predict(locked, **KEY)
    set_size(2)
    try:
        pieces = [streamed(locked, path, **body) for path, body in asked]
        assert predict(locked, **KEY) == predicted == whole[0]
    finally:
        set_size(0)
    assert ["".join(texts) for texts in pieces] == whole
    assert [len(texts) for texts in pieces] == [4] * len(asked)


def test_tokens_and_text(locked: Server) -> None:
    def ask(path: str, **body: object) -> dict[str, object]:
        return httpx.post(locked.url + path, json=body, headers=KEY, timeout=PATIENCE).json()

    tokens = ask("/tokenize", prompt="Grüße, 世界!")["tokens"]
    assert ask("/detokenize", tokens=tokens)["prompt"] == "Grüße, 世界!"
    messages = [{"role": "user", "content": "hi"}]
    counted = ask("/tokenize", messages=messages)["count"]
    chat = ask("/v1/chat/completions", model="smollm2", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == counted  # type: ignore[index]
