"""One server, two doors: the same answers, the same keys."""

from __future__ import annotations

import re

import grpc
import httpx
import pytest

from tests.e2e.server import Server
from tests.waiting import PATIENCE, wait_until
from weft.api.grpc.ai_service_pb2 import GenerationParameters, StreamPredictRequest, StreamPredictResponse

KEY = {"authorization": "Bearer sesame"}
PROMPT = "One, two, three,"


def predict(server: Server, **metadata: str) -> str:
    wait_until(lambda: "gRPC answers" in "".join(server.log))
    (port,) = re.findall(r"gRPC answers on port (\d+)", "".join(server.log))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(
            "/cy.llm.AiInference/StreamPredict",
            request_serializer=StreamPredictRequest.SerializeToString,
            response_deserializer=StreamPredictResponse.FromString,
        )
        request = StreamPredictRequest(prompt=PROMPT, generation=GenerationParameters(temperature=0, max_new_tokens=12))
        return "".join(
            response.chunk for response in call(iter([request]), metadata=tuple(metadata.items()), timeout=60)
        )


def test_both_doors_give_the_same_answer(locked: Server) -> None:
    body = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    answer = httpx.post(locked.url + "/v1/completions", json=body, headers=KEY, timeout=PATIENCE).json()
    text = answer["choices"][0]["text"]
    assert len(text) > 10
    assert predict(locked, **KEY) == text


def test_both_doors_are_closed_without_the_key(locked: Server) -> None:
    assert httpx.get(locked.url + "/v1/models", timeout=PATIENCE).status_code == 401
    assert httpx.get(locked.url + "/health/live", timeout=PATIENCE).status_code == 200
    with pytest.raises(grpc.RpcError) as refused:
        predict(locked, authorization="Bearer sesam")
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tokens_and_text(locked: Server) -> None:
    def ask(path: str, **body: object) -> dict[str, object]:
        return httpx.post(locked.url + path, json=body, headers=KEY, timeout=PATIENCE).json()

    tokens = ask("/tokenize", prompt="Grüße, 世界!")["tokens"]
    assert ask("/detokenize", tokens=tokens) == {"prompt": "Grüße, 世界!"}
    messages = [{"role": "user", "content": "hi"}]
    counted = ask("/tokenize", messages=messages)["count"]
    chat = ask("/v1/chat/completions", model="smollm2", messages=messages, max_tokens=1)
    assert chat["usage"]["prompt_tokens"] == counted  # type: ignore[index]
